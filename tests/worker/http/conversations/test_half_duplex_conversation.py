"""`HalfDuplexConversation` without a socket and a model: failures, timeouts, events of a former context."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from models.inputs.image import EncodedImage
from tests.worker.http.client_scripts import jpeg
from tests.worker.http.conversations.duplex_stage import PATIENCE_S, SETTINGS, MovableClock, staged
from worker.decoding import DecodingThreads
from worker.engine_thread import EngineError
from worker.http import half_duplex_conversation
from worker.http.half_duplex_conversation import HalfDuplexConversation
from worker.http.metrics import WorkerMetrics
from worker.http.socket_conversation import ConversationEnd
from worker.loop.results import Event, Failure, Generating, PartialResult, ReplyResult, VoiceState
from worker.loop.session import OrderError
from worker.protocol.codec import Message
from worker.protocol.codes import CloseCode
from worker.protocol.half_duplex_messages import (
    HalfDuplexPrepare,
    HalfDuplexSettings,
    LengthFields,
    SpeechChunk,
    TurnChunk,
    TurnDone,
    TurnHeard,
    TurnPrepared,
    TurnTimeout,
    VadState,
)
from worker.protocol.messages import MAX_UNIT_PICTURES, Error, Stop, Stopped
from worker.protocol.wire import Sound

CHUNK = SpeechChunk(audio_base64=Sound(np.zeros(8_000, np.float32)))


class Talk:
    """A fake conversation of the engine. pushed: the lengths of the sounds. n_resumed: calls of `answer_waiting`."""

    context_len, n_pixels = 7, 0

    def __init__(self, emit: Callable[[Event], None]):
        self.emit = emit
        self.pushed: list[int] = []
        self.pictures: list[EncodedImage] = []
        self.n_resumed = 0

    def push(self, samples: np.ndarray, pictures: Sequence[EncodedImage]) -> None:
        self.pushed.append(len(samples))
        self.pictures += pictures

    def answer_waiting(self) -> None:
        self.n_resumed += 1

    def interrupt(self) -> bool:
        return False

    def close(self) -> Future[None]:
        raise AssertionError("expected the lease to close the session")


class Stage:
    """A running conversation and its fake engine. talks: one for each `prepare`."""

    def __init__(self, **settings: Any):
        self.talks: list[Talk] = []
        service = SimpleNamespace(
            lease=self.lease,
            settings=replace(SETTINGS, **settings),
            omni=SimpleNamespace(check_prompt=lambda text: None),
            preparing=asyncio.Semaphore(),
            decoders=DecodingThreads(),
            reference=lambda **given: None,
        )
        self.conversation = HalfDuplexConversation(service, WorkerMetrics(), "c")
        self.running = asyncio.create_task(self.run())

    async def lease(self, name: str, use: Any) -> Any:
        return SimpleNamespace(converse=self.converse, close=lambda: None)

    async def converse(self, system: Any, config: Any, emit: Callable[[Event], None], *, voice: Any) -> Talk:
        self.talks.append(Talk(emit))
        return self.talks[-1]

    async def run(self) -> ConversationEnd:
        await self.conversation.start()
        return await self.conversation.run()

    async def say(self, *messages: Any) -> None:
        for message in messages:
            await self.conversation.receive(message, 100, 0.0)

    async def hear(self) -> Message:
        async with asyncio.timeout(PATIENCE_S):
            message, _ = await self.conversation.outbox.get()
        self.conversation.outbox.task_done()
        return message

    async def pushed(self, talk: Talk, n: int) -> None:
        """Wait until `n` sounds have reached the engine."""
        async with asyncio.timeout(PATIENCE_S):
            while len(talk.pushed) < n or self.conversation._inbox:
                await asyncio.sleep(0.001)

    async def prepare(self, timeout_s: float = 300.0) -> Talk:
        config = HalfDuplexSettings(session=LengthFields(timeout_s=timeout_s))
        await self.say(HalfDuplexPrepare(config=config))
        prepared = await self.hear()
        assert prepared == TurnPrepared(session_id="c", timeout_s=timeout_s), f"got {prepared!r}"
        return self.talks[-1]

    async def end(self) -> ConversationEnd:
        async with asyncio.timeout(PATIENCE_S):
            return await self.running


@staged
async def test_answer_becomes_messages() -> None:
    stage = Stage()
    talk = await stage.prepare()
    talk.emit(VoiceState("c", True))
    talk.emit(VoiceState("c", False))
    talk.emit(Generating("c", 1234.6, n_pictures=2))
    talk.emit(PartialResult("c", 1, "Hi"))
    talk.emit(PartialResult("c", 1, "", np.zeros(2_400, np.float32)))
    talk.emit(ReplyResult("c", "Hi", "stop", 1))
    got = [await stage.hear() for _ in range(7)]
    assert got[:4] == [
        VadState(speaking=True),
        VadState(speaking=False),
        TurnHeard(speech_duration_ms=1235, video_frames=2),
        TurnChunk(chunk_index=0, text_delta="Hi"),
    ]
    sound = got[4]
    assert (sound.chunk_index, sound.text_delta, sound.duration_ms, bool(sound.audio_data)) == (1, None, 100.0, True)
    assert got[5:] == [TurnChunk(chunk_index=2, is_final=True), TurnDone(turn_index=1, text="Hi")]
    assert stage.conversation.n_units == 1
    await stage.say(Stop())
    assert isinstance(await stage.hear(), Stopped)
    assert talk.n_resumed == 1, "expected a turn that waits to be answered after the answer"


@staged
async def test_pictures_reach_the_turn_and_invalid_ones_end_nothing() -> None:
    stage = Stage()
    talk = await stage.prepare()
    sound, valid = CHUNK.audio_base64, jpeg(Image.new("RGB", (60, 40)))
    for frames in ([b"no picture"], [valid] * (MAX_UNIT_PICTURES + 1)):
        await stage.say(SpeechChunk(audio_base64=sound, frame_base64_list=frames))
        assert isinstance(await stage.hear(), Error)
    await stage.say(SpeechChunk(audio_base64=sound, frame_base64_list=[valid]), Stop())
    assert isinstance(await stage.hear(), Stopped)
    assert talk.pushed == [8_000] and [one.size for one in talk.pictures] == [(60, 40)]


@staged
async def test_failed_answer_ends_its_turn() -> None:
    stage = Stage()
    talk = await stage.prepare()
    talk.emit(Generating("c", 1000))
    talk.emit(PartialResult("c", 1, "Hi"))
    talk.emit(Failure("c", 1, OrderError("answer", expected="room", got="none")))
    got = [await stage.hear() for _ in range(5)]
    assert isinstance(got[2], Error) and got[3].is_final
    assert got[4] == TurnDone(turn_index=1, text="Hi", stopped="failed")
    await stage.say(CHUNK, Stop())
    assert isinstance(await stage.hear(), Stopped) and talk.pushed == [8_000]


@pytest.mark.parametrize("is_answering", [False, True])
def test_engine_failure_ends_session(is_answering: bool) -> None:
    @staged
    async def test() -> None:
        stage = Stage()
        talk = await stage.prepare()
        if is_answering:
            talk.emit(Generating("c", 1000))
            await stage.hear()
        talk.emit(Failure("c", 0, EngineError("engine", expected="one that runs", got="none")))
        error = await stage.hear()
        assert isinstance(error, Error) and error.code == "engine", f"expected the engine's error, got {error!r}"
        assert (await stage.end()).code == CloseCode.INTERNAL_ERROR

    test()


@staged
async def test_events_of_a_former_context_are_dropped() -> None:
    stage = Stage()
    former = await stage.prepare()
    former.emit(Generating("c", 1000))
    assert isinstance(await stage.hear(), TurnHeard)
    await stage.prepare()
    former.emit(PartialResult("c", 1, "late"))
    await stage.say(Stop())
    assert isinstance(await stage.hear(), Stopped)


@staged
async def test_nothing_follows_the_answer_to_a_stop() -> None:
    """Events of the answer that is made still arrive until the slot is free."""
    stage = Stage()
    talk = await stage.prepare()
    talk.emit(Generating("c", 1000))
    assert isinstance(await stage.hear(), TurnHeard)
    await stage.say(Stop())
    assert isinstance(await stage.hear(), Stopped)
    talk.emit(PartialResult("c", 1, "late"))
    assert (await stage.end()).code == CloseCode.NORMAL
    await asyncio.sleep(0)  # until the event has been handled
    assert stage.conversation.outbox.empty(), f"expected no message, got {await stage.hear()}"


@staged
async def test_idle_timeout_ends_session() -> None:
    clock = MovableClock()
    stage = Stage(idle_timeout=60.0)
    talk = await stage.prepare()
    for number in range(3):
        await clock.move(50)
        await stage.say(CHUNK)
        await stage.pushed(talk, number + 1)
    assert stage.conversation.outbox.empty(), "expected each chunk to extend the time"
    await clock.move(60)
    timeout = await stage.hear()
    assert isinstance(timeout, TurnTimeout) and timeout.reason == "Idle timeout (60.0s)" and timeout.elapsed_s >= 210
    assert (await stage.end()).code == CloseCode.NORMAL


@pytest.mark.parametrize("ends", [False, True])
def test_answer_in_flight_delays_the_timeout(monkeypatch: pytest.MonkeyPatch, ends: bool) -> None:
    """Until it ends, or until the grace is over."""
    monkeypatch.setattr(half_duplex_conversation, "GRACE_S", 60.0)

    @staged
    async def test() -> None:
        clock = MovableClock()
        stage = Stage()
        talk = await stage.prepare(timeout_s=100.0)
        talk.emit(Generating("c", 1000))
        assert isinstance(await stage.hear(), TurnHeard)
        await clock.move(120)
        assert stage.conversation.outbox.empty(), "expected the answer to delay the timeout"
        if ends:
            talk.emit(ReplyResult("c", "", "stop", 1))
            assert [type(await stage.hear()) for _ in range(2)] == [TurnChunk, TurnDone]
        else:
            await clock.move(40)
        timeout = await stage.hear()
        assert isinstance(timeout, TurnTimeout) and timeout.reason == "Session timeout (100.0s)"
        assert timeout.elapsed_s >= (120 if ends else 160), f"got {timeout}"
        assert (await stage.end()).code == CloseCode.NORMAL

    test()
