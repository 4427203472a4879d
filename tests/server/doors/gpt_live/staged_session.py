"""A GPT-Live session without a socket, and a recorded worker."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

from benchmarks.serve.fake_replies import tone
from server.access.identity import Identity
from server.doors.core.transcriber import Transcriber
from server.doors.core.unit_session import UnitSession
from server.doors.gpt_live.client_events import AnyEvent, read_event
from server.doors.gpt_live.server_events import GptLiveEventSender
from server.doors.gpt_live.session import GptLiveSession
from server.doors.model_names import ModelNames
from server.doors.voices import VoiceNames
from server.registry.voices import VoiceRegistry
from tests.server.doors.recorded_units import RecordedUnits
from tests.server.doors.stub_transcriber import StubTranscriber
from worker.protocol.messages import Prepare, Prepared, Result
from worker.protocol.wire import json_text

PREPARED = Prepared(prompt_length=3)
HISTORY = [{"role": "user", "content": [{"text": "Hi"}]}, {"role": "assistant", "content": [{"text": "Hello"}]}]


class Stage:
    """A session with a recorded worker. events: what the client gets."""

    def __init__(self, folder: Path):
        self.events: list[dict[str, Any]] = []
        self.worker = RecordedUnits()
        send, voices = GptLiveEventSender(self.events.append), VoiceNames(VoiceRegistry(folder), {})
        self.transcriber = StubTranscriber()
        transcriber = cast(Transcriber, self.transcriber)
        names, identity = ModelNames("m"), Identity()
        self.session = GptLiveSession(send, names, voices, identity, "sess", 0, lambda: 0.0, transcriber, 400)

    async def handle(self, kind: str, **fields: Any) -> None:
        await self.session.handle(event(kind, **fields))

    async def start(self, **session: Any) -> Prepare:
        """Start the session. Returns: the message that its worker has to answer."""
        await self.handle("session.start", event_id="start", session={"model": "m", **session})
        self.attach()
        return next(message for message in self.worker.sent if isinstance(message, Prepare))

    def attach(self) -> None:
        session = self.session
        session.lane.attach(cast(UnitSession, self.worker), session.prepare(), session.history())


def spoken(*, end_of_turn: bool) -> Result:
    """A unit that has spoken for a second."""
    times = {"cost_all_ms": 1.0, "server_send_ts": 0.0, "wall_clock_ms": 1.0}
    sound = tone("pcm16", 24_000)
    rows = {"current_time": 1, "kv_cache_length": 1}
    return Result(is_listen=False, text="So", audio_data=sound, end_of_turn=end_of_turn, **times, **rows)


def event(kind: str, **fields: Any) -> AnyEvent:
    return read_event(json_text({"type": kind, **fields}))


def staged(folder: Path, scenario: Callable[[Stage], Awaitable[None]]) -> Stage:
    stage = Stage(folder)

    async def whole() -> None:
        try:
            await scenario(stage)
        finally:
            stage.session.stop()

    asyncio.run(whole())
    return stage
