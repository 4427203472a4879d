"""One stock session's waits: first sound after `response.create` and after a turn, end after a cancel and speech."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import numpy as np
import websockets

from benchmarks.doors.stock_session import BYTES_PER_MS, Json, Loop, StockSession, stock_session
from server.doors.core.unit_session import UNIT_SPEC
from worker.protocol.messages import AudioChunk, Partial, Prepare, Result, read_server, write
from worker.protocol.wire import Sound

CHUNK_MS = 20
PAUSE_MS = 500  # of silence, which ends a turn
CONFIRM_MS = 200  # of speech that ends a response, by the door's rules
SOUND, DONE = "response.output_audio.delta", "response.done"
STARTED, STOPPED = "input_audio_buffer.speech_started", "input_audio_buffer.speech_stopped"
SILENCE = Loop(bytes(1000 * BYTES_PER_MS))
SETTLE_S = 1.3  # in which the unit that closes a cancelled turn has run


@asynccontextmanager
async def _asked_session(port: int, **detection: object) -> AsyncIterator[StockSession]:
    """A session whose model speaks only when it is asked."""
    async with stock_session(port) as session:
        turns = {"type": "server_vad", "create_response": False, **detection}
        await session.update(audio={"input": {"turn_detection": turns}})
        yield session


async def engine_first_sound_ms(port: int, rounds: int) -> list[float]:
    """From sending a unit that must speak to its first sound, directly at the worker on this port; ms."""
    url = f"ws://127.0.0.1:{port}/ws/duplex?session_id=omni_bench_direct"
    found = []
    async with websockets.connect(url, compression=None, max_size=2**24, proxy=None) as socket:
        await socket.send(write(Prepare(config={"force_listen_count": 0}, spec=UNIT_SPEC)))
        await socket.recv()
        silence = Sound(np.zeros(16_000, np.float32))
        for _ in range(rounds):
            sent_at, first = time.monotonic(), None
            await socket.send(write(AudioChunk(audio_base64=silence, force_speak=True), UNIT_SPEC))
            while True:
                message = read_server(await socket.recv(), UNIT_SPEC)
                if isinstance(message, Partial | Result) and message.audio_data and first is None:
                    first = 1000 * (time.monotonic() - sent_at)
                if isinstance(message, Result):
                    break
                if not isinstance(message, Partial):
                    raise RuntimeError(f"worker: expected a result, got {message}")
            if first is None:
                raise RuntimeError("worker: expected sound in a unit that must speak, got none")
            found.append(first)
            await socket.send(write(AudioChunk(audio_base64=silence, force_listen=True), UNIT_SPEC))
            while not isinstance(read_server(await socket.recv(), UNIT_SPEC), Result):
                pass
    return found


async def asked_waits_ms(port: int, rounds: int) -> tuple[list[float], list[float]]:
    """Of responses at any point within a unit; sound is sent all the time. Returns: ms to the first sound, and from
    `response.cancel` to `response.done`.
    """
    chance = random.Random(0)
    first_ms, cancel_ms = [], []
    async with _asked_session(port) as session:
        streaming = asyncio.create_task(session.stream(SILENCE.chunks(CHUNK_MS), CHUNK_MS))
        for _ in range(rounds):
            await asyncio.sleep(SETTLE_S + chance.random())
            asked_at = time.monotonic()
            await session.send("response.create")
            await session.until(SOUND)
            first_ms.append(1000 * (time.monotonic() - asked_at))
            wait_s = 0.7 * chance.random()
            reading = asyncio.create_task(session.until(DONE))
            await asyncio.sleep(wait_s)
            asked_at = time.monotonic()
            await session.send("response.cancel")
            done = await reading
            cancel_ms.append(1000 * (time.monotonic() - asked_at))
            _expect_status(done, "cancelled")
        streaming.cancel()
    return first_ms, cancel_ms


async def barge_in_ms(port: int, rounds: int, speech: bytes) -> tuple[list[float], list[float]]:
    """Of responses that the user's speech ends. speech: PCM16 at 24 kHz that begins with speech.

    Returns: ms from sending the sound with `CONFIRM_MS` of speech to `response.done`, and from `speech_started` to it.
    """
    from_sound, from_event = [], []
    microphone = _Microphone()
    async with _asked_session(port, prefix_padding_ms=0) as session:
        streaming = asyncio.create_task(session.stream(microphone, CHUNK_MS))
        for _ in range(rounds):
            await asyncio.sleep(SETTLE_S)
            await session.send("response.create")
            await session.until(SOUND)
            microphone.say(speech)
            started = await session.until(STARTED, DONE)
            if started["type"] == DONE:
                raise RuntimeError(f"expected speech to end the response, got its end {started['response']['status']}")
            started_at = time.monotonic()
            done = await session.until(DONE)
            done_at = time.monotonic()
            _expect_status(done, "cancelled")
            from_sound.append(1000 * (done_at - session.sent_by(started["audio_start_ms"] + CONFIRM_MS)))
            from_event.append(1000 * (done_at - started_at))
            await session.until(STOPPED)
        streaming.cancel()
    return from_sound, from_event


async def answered_ms(port: int, rounds: int, speech: bytes) -> list[float]:
    """Of answers to turns that a pause ends, by a model that does not begin to speak by itself.

    speech: PCM16 at 24 kHz. Returns: ms from sending the last sound of the pause to the first sound of the answer.
    """
    found = []
    microphone = _Microphone()
    turns = {"create_response": True, "silence_duration_ms": PAUSE_MS, "prefix_padding_ms": 0}
    async with _asked_session(port, **turns) as session:
        streaming = asyncio.create_task(session.stream(microphone, CHUNK_MS))
        for _ in range(rounds):
            await asyncio.sleep(SETTLE_S)
            microphone.say(speech)
            stopped = await session.until(STOPPED)
            await session.until(SOUND)
            found.append(1000 * (time.monotonic() - session.sent_by(stopped["audio_end_ms"] + PAUSE_MS)))
            await session.send("response.cancel")
            _expect_status(await session.until(DONE), "cancelled")
        streaming.cancel()
    return found


class _Microphone:
    """Chunks of sound without end: what is said, and silence."""

    def __init__(self) -> None:
        self._said: Iterator[bytes] = iter(())

    def say(self, pcm16: bytes) -> None:
        self._said = Loop(pcm16).chunks(CHUNK_MS, 0, len(pcm16) // (CHUNK_MS * BYTES_PER_MS))

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        return next(self._said, bytes(CHUNK_MS * BYTES_PER_MS))


def _expect_status(done: Json, status: str) -> None:
    if (got := done["response"]["status"]) != status:
        raise RuntimeError(f"response.done: expected the status {status}, got {got}")
