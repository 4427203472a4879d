"""A Realtime session without sockets: its clock is set by hand, and a test gives the answers of the worker.

async with stage(detection) as one:
    one.append(1.0)
    one.listen()
"""

import asyncio
import base64
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from server.access.identity import Identity
from server.doors.core.chat_turn import NO_USAGE, ChatTurns, TurnFinished, TurnRequest, TurnSound, TurnText
from server.doors.core.picture_urls import PictureUrls
from server.doors.core.transcriber import Transcriber
from server.doors.core.unit_session import UnitSession
from server.doors.errors import ApiError
from server.doors.live.sound.detector import SpeechContinues, SpeechHeard, SpeechOver
from server.doors.realtime.events.client_events import read_event
from server.doors.realtime.events.server_events import EventSender
from server.doors.realtime.session import RealtimeSession, SessionContext
from server.doors.realtime.session_config import RealtimeConfig
from server.doors.voices import VoiceNames
from tests.server.doors.realtime.event_log import EventLog
from tests.server.doors.realtime.event_schema import Json
from tests.server.doors.stub_transcriber import StubTranscriber
from worker.protocol.chat_messages import ReplyUsage
from worker.protocol.codec import FromClient
from worker.protocol.messages import (
    Adjust,
    AudioChunk,
    Error,
    Interrupt,
    Prepare,
    Prepared,
    Result,
    ServerMessage,
    VideoFrame,
)
from worker.protocol.wire import Sound, json_text


class StubUnits:
    """The session of a worker that only remembers. sent: messages, in order."""

    is_paused = runs_early = False

    def __init__(self) -> None:
        self.has_side_lane = False
        self.sent: list[FromClient] = []

    def send(self, message: FromClient) -> None:
        self.sent.append(message)


class SessionStage:
    """One session, its events and its worker. log: all events, each checked."""

    def __init__(self, turns: object, picture_urls: PictureUrls):
        self.now = 100.0
        self.log: list[Json] = []
        self.units = StubUnits()
        self._checks = EventLog()
        context = SessionContext(
            cast(VoiceNames, SimpleNamespace(resolve=lambda name: None)),
            cast(ChatTurns, turns),
            cast(Transcriber, StubTranscriber()),
            Identity(),
            2_000_000_000,
            lambda: self.now,
            picture_urls=picture_urls,
        )
        self.session = RealtimeSession(EventSender(self._take), RealtimeConfig("duo"), context)

    def _take(self, event: Json) -> None:
        text = json_text(event)
        self._checks.take(event, len(text.encode()))
        self.log.append(event)

    # --- the client ----------------------------------------------------------------------------

    async def send(self, kind: str, **fields: Any) -> None:
        await self.session.handle(read_event(json_text({"type": kind, **fields})))

    async def update(self, **session: Any) -> None:
        await self.send("session.update", session=session)

    async def append(self, seconds: float) -> None:
        """Send silence."""
        data = bytes(2 * round(24_000 * seconds))
        await self.send("input_audio_buffer.append", audio=base64.b64encode(data).decode())

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.session.lane.refresh()

    def speak_up(self, start_ms: int = 0) -> None:
        """The detector hears the user speak for 300 ms."""
        self.session.lane.on_heard(SpeechHeard(start_ms, 96, start_ms + 96))
        self.session.lane.on_heard(SpeechContinues(320, start_ms + 320))

    def fall_silent(self, end_ms: int = 900) -> None:
        """The detector hears the end of the user's turn."""
        self.session.lane.on_heard(SpeechOver(end_ms))

    # --- the worker ----------------------------------------------------------------------------

    @property
    def chunks(self) -> list[AudioChunk]:
        """All units that the worker got."""
        return [one for one in self.units.sent if isinstance(one, AudioChunk)]

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the engine in force."""
        found: dict[str, Any] = {}
        for one in self.units.sent:
            if isinstance(one, Prepare | Adjust):
                found |= one.config
        return found

    @property
    def n_interrupts(self) -> int:
        return sum(isinstance(one, Interrupt) for one in self.units.sent)

    def answer(self, request: FromClient, answer: ServerMessage) -> None:
        self.session.lane.on_answer(request, answer)

    @property
    def ahead(self) -> list[VideoFrame]:
        """All pictures that the worker got before their units."""
        return [one for one in self.units.sent if isinstance(one, VideoFrame)]

    def prepared(self, start_after_ms: float | None = None) -> None:
        """The context is prepared."""
        [request] = [one for one in self.units.sent if isinstance(one, Prepare)]
        self.answer(request, Prepared(prompt_length=1, start_after_ms=start_after_ms))

    def refuse(self, kind: type[FromClient], code: str) -> None:
        """The newest message of this kind is refused."""
        request = [one for one in self.units.sent if isinstance(one, kind)][-1]
        self.answer(request, Error(error="expected less, got more", code=code))

    def listen(self, rows: int = 100, beside: list[str] | None = None) -> None:
        """The newest unit listens. rows: of the context after it. beside: texts of the side lane."""
        self.answer(self.chunks[-1], _result(is_listen=True, rows=rows, beside=beside))

    def speak(
        self, text: str = "Hi. ", *, ends: bool = False, rows: int = 100, beside: list[str] | None = None
    ) -> None:
        """The newest unit speaks a second of sound. beside: texts of the side lane."""
        self.answer(self.chunks[-1], _result(is_listen=False, text=text, ends=ends, rows=rows, beside=beside))

    @staticmethod
    def outcome(*, is_listen: bool, text: str = "", **fields: Any) -> Result:
        """A result with further fields."""
        return _result(is_listen=is_listen, text=text).model_copy(update=fields)

    # --- events --------------------------------------------------------------------------------

    def kinds(self, *prefixes: str) -> list[str]:
        """The types in the log. prefixes: only of these."""
        return [event["type"] for event in self.log if event["type"].startswith(prefixes or "")]

    def last(self, kind: str) -> Json:
        """The newest event of this type."""
        return next(event for event in reversed(self.log) if event["type"] == kind)


def _result(
    *, is_listen: bool, text: str = "", ends: bool = False, rows: int = 100, beside: list[str] | None = None
) -> Result:
    sound = None if is_listen else Sound(np.full(24_000, 0.25, np.float32))
    return Result(
        is_listen=is_listen,
        text=text,
        audio_data=sound,
        end_of_turn=ends,
        current_time=1,
        cost_all_ms=1,
        n_tokens=2,
        n_tts_tokens=25,
        server_send_ts=0.0,
        wall_clock_ms=1.0,
        kv_cache_length=rows,
        side_texts=beside,
    )


class StubTurns:
    """Chats that answer two words.

    requests: of each chat. max_messages: longer conversations do not fit. waits: each word takes 10 ms.
    """

    def __init__(self, max_messages: int = 1000, *, waits: bool = False) -> None:
        self.requests: list[TurnRequest] = []
        self._max_messages, self._waits = max_messages, waits

    @asynccontextmanager
    async def open(self, request: TurnRequest, _: object) -> AsyncIterator[SimpleNamespace]:
        self.requests.append(request)
        messages: Any = request.fields["messages"]
        if len(messages) > self._max_messages:
            raise ApiError(400, "conversation: expected less, got more", code="context_length_exceeded")
        yield SimpleNamespace(events=self._events)

    async def _events(self) -> AsyncIterator[TurnText | TurnSound | TurnFinished]:
        for word in ("Good ", "day."):
            await asyncio.sleep(0.01 * self._waits)
            yield TurnText(word)
        yield TurnSound(np.full(12_000, 0.25, np.float32))
        yield TurnFinished("Good day.", "stop", ReplyUsage.model_validate(dict(NO_USAGE)))


@asynccontextmanager
async def stage(
    detection: Mapping[str, Any] | None = None,
    *,
    turns: object = None,
    picture_urls: PictureUrls | None = None,
    has_side_lane: bool = False,
    **session: Any,
) -> AsyncIterator[SessionStage]:
    """A session with a worker.

    Args:
        detection: `turn_detection`; None: the default.
        turns: chats of the turn lane.
        picture_urls: fetches pictures.
        has_side_lane: the worker's model calls functions beside its speech.
        session: further settings.
    """
    one = SessionStage(turns, picture_urls or PictureUrls())
    one.units.has_side_lane = has_side_lane
    await one.session.begin()
    audio: dict[str, Any] = session.pop("audio", {})
    if detection is not None:
        audio = {**audio, "input": {**audio.get("input", {}), "turn_detection": dict(detection)}}
    await one.update(audio=audio, **session)
    one.session.lane.attach(cast(UnitSession, one.units), [])
    try:
        yield one
    finally:
        one.session.stop()
