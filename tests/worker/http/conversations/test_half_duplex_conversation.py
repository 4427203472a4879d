"""`HalfDuplexConversation` without a socket and a model: failures, timeouts, events of a former context."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.worker.http.conversations.duplex_stage import PATIENCE_S, SETTINGS, staged
from worker.decoding import DecodingThreads
from worker.engine import EngineError
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
from worker.protocol.messages import Error, Stop, Stopped
from worker.protocol.wire import Sound

CHUNK = SpeechChunk(audio_base64=Sound(np.zeros(8_000, np.float32)))


class Talk:
    """A fake conversation of the engine. pushed: the lengths of the sounds. n_resumed: calls of `answer_waiting`."""

    context_len = 7

    def __init__(self, emit: Callable[[Event], None]):
        self.emit = emit
        self.pushed: list[int] = []
        self.n_resumed = 0

    def push(self, samples: np.ndarray) -> None:
        self.pushed.append(len(samples))

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
            check_prompt=lambda text: None,
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
    talk.emit(Generating("c", 1234.6))
    talk.emit(PartialResult("c", 1, "Hi"))
    talk.emit(PartialResult("c", 1, "", np.zeros(2_400, np.float32)))
    talk.emit(ReplyResult("c", "Hi", "stop", 1))
    got = [await stage.hear() for _ in range(7)]
    assert got[:4] == [
        VadState(speaking=True),
        VadState(speaking=False),
        TurnHeard(speech_duration_ms=1235),
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
async def test_idle_timeout_ends_session() -> None:
    stage = Stage(idle_timeout=0.3)
    await stage.prepare()
    for _ in range(3):
        await asyncio.sleep(0.1)
        await stage.say(CHUNK)
    timeout = await stage.hear()
    assert isinstance(timeout, TurnTimeout) and timeout.reason == "Idle timeout (0.3s)" and timeout.elapsed_s >= 0.6
    assert (await stage.end()).code == CloseCode.NORMAL


@pytest.mark.parametrize("ends", [False, True])
def test_answer_in_flight_delays_the_timeout(monkeypatch: pytest.MonkeyPatch, ends: bool) -> None:
    """Until it ends, or until the grace is over."""
    monkeypatch.setattr(half_duplex_conversation, "GRACE_S", 2 * PATIENCE_S if ends else 0.6)

    @staged
    async def test() -> None:
        stage = Stage()
        talk = await stage.prepare(timeout_s=1.0)
        talk.emit(Generating("c", 1000))
        assert isinstance(await stage.hear(), TurnHeard)
        if ends:
            await asyncio.sleep(1.2)
            talk.emit(ReplyResult("c", "", "stop", 1))
            assert [type(await stage.hear()) for _ in range(2)] == [TurnChunk, TurnDone]
        timeout = await stage.hear()
        assert isinstance(timeout, TurnTimeout) and timeout.reason == "Session timeout (1.0s)"
        assert timeout.elapsed_s >= (1.2 if ends else 1.6), f"got {timeout}"
        assert (await stage.end()).code == CloseCode.NORMAL

    test()
