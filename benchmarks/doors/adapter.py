"""CPU time that the Realtime door spends on one unit beyond the relay, on the event loop's thread.

One session is driven without sockets, worker and clock: every append of a unit is read and handled, the unit is written
for the worker, the worker's answers are read, and the client's events are written as JSON. The detector of speech,
which runs on threads of its own, and the sockets are not part of it.
"""

import asyncio
import base64
import json
import time
from typing import Any, cast
from unittest import mock

import numpy as np

from benchmarks.doors.stock_session import BYTES_PER_MS
from benchmarks.serve.fake_replies import N_PARTS, SOUND_RATE, tone
from server.access.identity import Identity
from server.doors.core.event_writer import event_text
from server.doors.core.unit_session import UNIT_SPEC, UnitSession
from server.doors.live.sound import detector_feed
from server.doors.live.sound.detector import Heard
from server.doors.realtime.events.client_events import read_event
from server.doors.realtime.events.server_events import EventSender
from server.doors.realtime.session import RealtimeSession, SessionContext
from server.doors.realtime.session_config import RealtimeConfig
from worker.protocol.codec import FromClient
from worker.protocol.messages import AudioChunk, Partial, Result, read_server, write

CYCLE = (False, False, False, True, True, True, True)  # which units speak
TURN_S = 0.001
WARM_UP = 2 * len(CYCLE)  # units


class _NoDetector:
    """Hears nothing."""

    def __init__(self, *_: object):
        pass

    def push(self, _: np.ndarray) -> list[Heard]:
        return []


class _NoTranscriber:
    is_enabled = False


class _Worker:
    """A worker's session without a worker. sent: messages that are not answered."""

    is_paused = has_side_lane = runs_early = False

    def __init__(self) -> None:
        self.sent: list[FromClient] = []

    def send(self, message: FromClient) -> None:
        write(message, UNIT_SPEC)
        self.sent.append(message)

    def take_unit(self) -> AudioChunk:
        """The unit that was sent last."""
        units = [message for message in self.sent if isinstance(message, AudioChunk)]
        assert len(units) == 1, f"units of one second of sound: expected 1, got {len(units)}"
        self.sent.clear()
        return units[0]


async def adapter_ms(n_units: int, chunk_ms: int) -> dict[str, list[float]]:
    """CPU ms of each unit by decision. chunk_ms: length of an append."""
    with mock.patch.object(detector_feed, "SpeechDetector", _NoDetector):
        return await _adapter_ms(n_units, chunk_ms)


async def _adapter_ms(n_units: int, chunk_ms: int) -> dict[str, list[float]]:
    now, texts = 0.0, 0
    worker = _Worker()

    def put(event: dict[str, Any]) -> None:
        nonlocal texts
        texts += len(event_text(event))

    unused = cast(Any, None)
    context = SessionContext(
        voices=unused,
        turns=unused,
        transcriber=cast(Any, _NoTranscriber),
        identity=Identity(),
        expires_at=0,
        clock=lambda: now,
    )
    session = RealtimeSession(EventSender(put), RealtimeConfig("gpt-realtime"), context)
    session.lane.attach(cast(UnitSession, worker), [])
    detecting = asyncio.create_task(session.lane.detector.run(session.lane.on_heard))
    appends, spent = _appends(chunk_ms), {"listen": list[float](), "speak": list[float]()}
    for number in range(1, n_units + WARM_UP + 1):
        speaks = CYCLE[number % len(CYCLE)]
        answers = _answers(number, speaks=speaks, ends=speaks and not CYCLE[(number + 1) % len(CYCLE)])
        now += 1.0
        begin = time.thread_time()
        for text in appends:
            await session.handle(read_event(text))
        unit = worker.take_unit()
        for data in answers:
            message = read_server(data, UNIT_SPEC)
            if isinstance(message, Partial):
                session.lane.on_partial(message)
            else:
                session.lane.on_answer(unit, message)
        ms = 1000 * (time.thread_time() - begin)
        if number > WARM_UP:
            spent["speak" if speaks else "listen"].append(ms)
        await asyncio.sleep(TURN_S)  # in which the detector takes the sound
    detecting.cancel()
    session.stop()
    return spent


def _appends(chunk_ms: int) -> list[str]:
    """The client's events of one second of noise."""
    noise = np.random.default_rng(0).integers(-3000, 3000, 1000 * BYTES_PER_MS // 2).astype("<i2").tobytes()
    size = chunk_ms * BYTES_PER_MS
    chunks = [noise[start : start + size] for start in range(0, len(noise), size)]
    return [
        json.dumps({"type": "input_audio_buffer.append", "audio": base64.b64encode(chunk).decode()}) for chunk in chunks
    ]


def _answers(number: int, *, speaks: bool, ends: bool) -> list[str | bytes]:
    """The worker's messages for one unit."""
    sound = tone("pcm16", SOUND_RATE // N_PARTS)
    text = f"second {number}. "
    parts = [
        Partial(current_time=number, part=part, text=text if part == 1 else "", audio_data=sound)
        for part in range(1, N_PARTS + 1)
        if speaks
    ]
    result = Result(
        is_listen=not speaks,
        text=text if speaks else "",
        end_of_turn=ends,
        current_time=number,
        cost_all_ms=0.0,
        server_send_ts=0.0,
        wall_clock_ms=0.0,
        kv_cache_length=number,
    )
    return [*(write(part, UNIT_SPEC) for part in parts), write(result, UNIT_SPEC)]
