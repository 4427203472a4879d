"""Transcriptions by a scripted worker: what it is asked, whose the slots are, and what happens without one."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from websockets.asyncio.server import ServerConnection

from server.access.identity import Identity
from server.doors.core import spare_turn, transcriber
from server.doors.core.transcriber import SpokenInput, TranscriptEnd, Transcription, WholeTranscript
from server.doors.errors import ApiError
from tests.server.doors.stub_worker import (
    DONE,
    PREFILLED,
    TEXT,
    Step,
    chunk,
    forever,
    run,
    stub_gateway,
    until_idle,
)
from tests.server.live_gateway import RunningGateway, wait_until

SPEECH = np.linspace(-0.5, 0.5, 24_000, dtype=np.float32)
WRITTEN: list[Step] = [PREFILLED, chunk(" Hello "), chunk("there.\n"), {**DONE, "text": " Hello there.\n"}]
OWNER = Identity("me")


@dataclass
class Heard:
    """What a transcription reports."""

    texts: list[str] = field(default_factory=list)
    ends: list[TranscriptEnd] = field(default_factory=list)

    def begin(self, gateway: RunningGateway, recording: SpokenInput | None = None, session: str = "s") -> Transcription:
        """Begin a transcription."""
        recording = recording or SpokenInput(SPEECH)
        return gateway.gateway.transcriber.start(session, OWNER, recording, self.texts.append, self.ends.append)

    async def end(self) -> TranscriptEnd:
        """The only end."""
        await wait_until(lambda: self.ends, "the end of a transcription")
        [end] = self.ends
        return end


def code_of(end: TranscriptEnd) -> str | None:
    assert isinstance(end, ApiError), f"expected an error, got {end}"
    return end.fields()["code"]


def test_the_worker_is_asked_for_the_words_with_low_priority() -> None:
    async def scenario() -> None:
        async with stub_gateway(WRITTEN) as (gateway, worker):
            heard = Heard()
            heard.begin(gateway, SpokenInput(SPEECH, "de", "Duologue, H200"))
            assert await heard.end() == WholeTranscript(TEXT, 1.5)
            assert "".join(heard.texts) == TEXT and len(heard.texts) == 2
            [(path, request)] = worker.requests
            assert path == "/ws/chat" and request["priority"] == "low" and not request["generation"]["do_sample"]
            [message] = request["messages"]
            text, sound = message["content"]
            assert (
                "de" in text["text"] and "Duologue, H200" in text["text"] and len(sound["data"]) == 24_000 * 4 / 3 * 4
            )
            await until_idle(gateway, worker, 1.0)
            assert not gateway.gateway.live.all

    run(scenario)


def test_a_session_gets_the_slot_and_the_transcription_begins_again() -> None:
    async def scenario() -> None:
        begun = [PREFILLED, chunk("Hello"), forever]
        async with stub_gateway(begun, WRITTEN, slots=1) as (gateway, worker):
            heard, dispatcher = Heard(), gateway.gateway.dispatcher
            heard.begin(gateway)
            await wait_until(lambda: heard.texts == ["Hello"], "the first word")
            pending = dispatcher.submit("audio_duplex", "live")
            position = dispatcher.position_of(pending)
            assert position is not None and position.wait_s == 0, "expected no wait for a slot that is given back"
            await wait_until(lambda: pending.lease, "the session's slot", 1.0)
            assert not heard.ends and worker.n_open <= 1
            dispatcher.finish(pending)
            assert await heard.end() == WholeTranscript(TEXT, 1.5)
            assert "".join(heard.texts) == TEXT, "expected no word twice"

    run(scenario)


def test_without_a_slot_the_oldest_are_given_up_and_the_others_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spare_turn, "MAX_WAIT_S", 0.2)
    monkeypatch.setattr(transcriber, "MAX_WAITING", 5)

    async def scenario() -> None:
        async with stub_gateway(WRITTEN, slots=1) as (gateway, worker):
            pending = gateway.gateway.dispatcher.submit("audio_duplex", "live")
            own = [Heard() for _ in range(transcriber.MAX_WAITING_OF_SESSION + 1)]
            for one in own:
                one.begin(gateway)
            assert [len(one.ends) for one in own] == [1, 0, 0, 0, 0]
            assert code_of(own[0].ends[0]) == "too_many_transcriptions"
            others = [Heard(), Heard()]
            for one in others:
                one.begin(gateway, session="other")
            assert code_of(own[1].ends[0]) == "too_many_transcriptions", "expected the oldest of all to be given up"
            for one in (*own[2:], *others):
                assert code_of(await one.end()) == "no_free_slot"
            gateway.gateway.dispatcher.finish(pending)
            assert not worker.requests

    run(scenario)


def test_a_cancelled_one_reports_nothing_and_frees_its_slot() -> None:
    async def scenario() -> None:
        closed = asyncio.Event()

        async def until_closed(connection: ServerConnection) -> None:
            await connection.wait_closed()
            closed.set()

        async with stub_gateway([PREFILLED, until_closed]) as (gateway, worker):
            heard = Heard()
            one = heard.begin(gateway)
            await wait_until(lambda: worker.requests, "the request")
            one.cancel()
            async with asyncio.timeout(2):
                await closed.wait()
            await until_idle(gateway, worker, 1.0)
            assert not heard.texts and not heard.ends

    run(scenario)


def test_cancelling_again_and_again_leaves_nothing_behind() -> None:
    """As a session does that ends after it has given up its oldest transcription."""

    async def scenario() -> None:
        async def until_closed(connection: ServerConnection) -> None:
            await connection.wait_closed()

        async with stub_gateway([PREFILLED, until_closed]) as (gateway, worker):
            one = Heard().begin(gateway)
            await wait_until(lambda: worker.requests, "the request")
            for _ in range(10):
                one.cancel()
                await asyncio.sleep(0)
            await until_idle(gateway, worker, 1.0)
            assert not len(gateway.gateway.live), "expected no session in the list"

    run(scenario)


@pytest.mark.parametrize(
    ("seconds", "steps", "expected"),
    [
        (0.05, WRITTEN, WholeTranscript("", 0.05)),
        (transcriber.MAX_S + 1, WRITTEN, "audio_too_long"),
        (1.0, [{"type": "error", "error": "no", "code": "engine"}], "internal_error"),
    ],
)
def test_sound_without_a_transcript(seconds: float, steps: list[Step], expected: Any) -> None:
    async def scenario() -> None:
        async with stub_gateway(steps) as (gateway, _):
            heard = Heard()
            heard.begin(gateway, SpokenInput(np.zeros(round(16_000 * seconds), np.float32)))
            end = await heard.end()
            assert end == expected if isinstance(expected, WholeTranscript) else code_of(end) == expected

    run(scenario)
