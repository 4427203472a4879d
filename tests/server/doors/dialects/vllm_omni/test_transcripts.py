"""Transcripts of what the user of a vLLM-Omni session says: which sound they are of, and what they are good for."""

import asyncio
import base64
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from server.access.identity import Identity
from server.doors.core.request_fields import RequestFields
from server.doors.core.transcriber import Transcriber
from server.doors.core.unit_session import UnitSession
from server.doors.dialects.vllm_omni.events import OmniEvents
from server.doors.dialects.vllm_omni.session import OmniSession
from server.doors.dialects.vllm_omni.settings import OmniSettings
from server.doors.dialects.vllm_omni.transcripts import OmniTranscripts
from server.doors.errors import ApiError
from server.doors.live.sound.detector import SpeechHeard, SpeechOver
from server.doors.voices import VoiceNames
from server.registry.voices import VoiceRegistry
from tests.server.doors.recorded_units import RecordedUnits
from tests.server.doors.stub_transcriber import StubTranscriber
from worker.protocol.messages import Prepared

KIND = "conversation.item.input_audio_transcription"
DETECTOR = {"type": "server_vad"}


class Stage:
    """A session that has begun, and its transcriber. events: what the client gets."""

    def __init__(self, folder: Path):
        self.events: list[dict[str, Any]] = []
        self.transcriber = StubTranscriber()
        send = OmniEvents(lambda event, _: self.events.append(event), "me")
        transcripts = OmniTranscripts(send, cast(Transcriber, self.transcriber), Identity(), "me")
        voices = VoiceNames(VoiceRegistry(folder), {})
        settings = OmniSettings("m")
        self.session = OmniSession(send, settings, voices, lambda name: name, "me", lambda: 0.0, transcripts)
        self._n_sent = 0

    async def handle(self, kind: str, **fields: object) -> None:
        await self.session.handle(RequestFields({"type": kind, **fields}))

    async def begin(self, **session: object) -> None:
        await self.handle("session.update", session={"input_audio_transcription": {"model": "any"}, **session})
        worker = RecordedUnits()
        self.session.lane.attach(cast(UnitSession, worker), self.session.prepare(), self.session.history())
        self.session.lane.on_answer(worker.sent[0], Prepared(prompt_length=1))

    async def append(self, seconds: float) -> None:
        """Send sound whose samples count from the first one."""
        steps = np.arange(self._n_sent, self._n_sent + round(16_000 * seconds)).astype("<i2")
        self._n_sent += len(steps)
        await self.handle("input_audio_buffer.append", audio=base64.b64encode(steps.tobytes()).decode())

    def spans(self) -> list[tuple[int, int]]:
        """Where the transcribed sounds begin and how long they are, in samples."""
        sounds = [np.round(one.spoken.sound * 32768) for one in self.transcriber.begun]
        return [(int(sound[0]) % 65536, len(sound)) for sound in sounds]

    def found(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["type"] == f"{KIND}.{kind}"]


def test_a_commit_is_transcribed_from_the_commit_before(tmp_path: Path) -> None:
    async def scenario() -> None:
        stage = Stage(tmp_path)
        await stage.begin()
        for seconds in (0.5, 0.25):
            await stage.append(seconds)
            await stage.handle("input_audio_buffer.commit")
        assert stage.spans() == [(0, 8000), (8000, 4000)]
        stage.transcriber.begun[0].complete("Hello.")
        stage.transcriber.begun[1].end(ApiError(503, "slot: expected a free one", code="no_free_slot"))
        [completed], [failed] = stage.found("completed"), stage.found("failed")
        assert (completed["transcript"], completed["content_index"]) == ("Hello.", 0)
        assert completed["usage"] == {"type": "duration", "seconds": 0.5} and failed["error"]["code"] == "no_free_slot"
        await stage.handle("conversation.item.retrieve", item_id=completed["item_id"])
        assert stage.events[-1]["item"]["content"] == [{"type": "input_audio", "transcript": "Hello."}]
        assert [text.text for text in stage.session.history()] == ["Hello."], "expected it in another context"
        stage.session.lane.detach()

    asyncio.run(scenario())


def test_a_turn_is_transcribed_as_the_detector_says(tmp_path: Path) -> None:
    async def scenario() -> None:
        stage = Stage(tmp_path)
        await stage.begin(turn_detection=DETECTOR)
        await stage.append(1.0)
        stage.session.turns.on_heard(SpeechHeard(250, 100.0, 500.0))
        stage.session.turns.on_heard(SpeechOver(750))
        assert stage.spans() == [(4000, 8000)]
        stage.session.finish()
        assert stage.transcriber.begun[0].is_cancelled
        stage.session.lane.detach()

    asyncio.run(scenario())


def test_a_deleted_item_gets_no_transcript(tmp_path: Path) -> None:
    async def scenario() -> None:
        stage = Stage(tmp_path)
        await stage.begin()
        for _ in range(2):
            await stage.append(0.5)
            await stage.handle("input_audio_buffer.commit")
        ids = [event["item_id"] for event in stage.events if event["type"] == "input_audio_buffer.committed"]
        await stage.handle("conversation.item.delete", item_id=ids[0])
        assert [one.is_cancelled for one in stage.transcriber.begun] == [True, False]
        stage.session.lane.detach()

    asyncio.run(scenario())


@pytest.mark.parametrize("is_enabled", [False, True])
def test_transcripts_are_made_on_request_only(tmp_path: Path, *, is_enabled: bool) -> None:
    async def scenario() -> None:
        stage = Stage(tmp_path)
        stage.transcriber.is_enabled = is_enabled
        await stage.begin(**({"input_audio_transcription": None} if is_enabled else {}))
        assert stage.events[-1]["session"]["input_audio_transcription"] is None
        await stage.append(0.5)
        await stage.handle("input_audio_buffer.commit")
        assert not stage.transcriber.begun
        stage.session.lane.detach()

    asyncio.run(scenario())
