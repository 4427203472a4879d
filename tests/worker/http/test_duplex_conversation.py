"""`DuplexConversation` without a socket and a model: engine failures, timeouts, limits."""

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from worker.config.service import Config
from worker.config.session import SessionConfig
from worker.engine import EngineError
from worker.http.duplex_conversation import MAX_UNSENT, DuplexConversation
from worker.http.inbox import MAX_FRAMES
from worker.http.metrics import WorkerMetrics
from worker.http.socket_conversation import ConversationEnd
from worker.loop.results import Failure, PartialResult, UnitResult
from worker.loop.session import OrderError
from worker.protocol.codes import CloseCode
from worker.protocol.messages import (
    AudioChunk,
    Error,
    Interrupt,
    Interrupted,
    Prepare,
    Prepared,
    Result,
    ServerMessage,
    Spec,
    Stop,
    Timeout,
    VideoFrame,
)
from worker.protocol.wire import Sound
from worker.serving import worker_settings
from worker.slots import SlotUse

PATIENCE_S = 20.0
SETTINGS = worker_settings(Config())
CHUNK = AudioChunk(audio_base64=Sound(np.zeros(16_000, np.float32)))


def done(value: Any = None) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


class Handle:
    """A fake engine session, controlled by the test. calls: the calls that were made."""

    is_live, max_waiting_units, context_len = True, 16, 0

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.sending: Future[None] | None = None  # the result of `send`; None: a completed future

    def prepare(self, prompt: Any, config: SessionConfig) -> Future[int]:
        return done(10)

    def send(self, *given: Any, **options: Any) -> Future[None]:
        self.calls.append("send")
        return self.sending or done()

    def break_speech(self) -> Future[None]:
        self.calls.append("break")
        return done()

    def clear_break(self) -> Future[None]:
        self.calls.append("clear")
        return done()


class Stage:
    """A running conversation and its fake engine."""

    def __init__(self, **settings: Any):
        self.handle = Handle()

        async def lease(name: str, use: SlotUse) -> Any:
            return SimpleNamespace(open=self.open, close=lambda: None)

        service = SimpleNamespace(
            lease=lease,
            settings=replace(SETTINGS, **settings),
            session_config=lambda given: (SessionConfig(), []),
            check_prompt=lambda text: None,
            preparing=asyncio.Semaphore(),
            reference=lambda **given: None,
        )
        self.conversation = DuplexConversation(service, WorkerMetrics(), "c")
        self.running = asyncio.create_task(self.run())
        self.n_units = 0

    async def open(self, emit: Any) -> Handle:
        return self.handle

    async def run(self) -> ConversationEnd:
        await self.conversation.start()
        return await self.conversation.run()

    async def say(self, *messages: Any) -> None:
        for message in messages:
            await self.conversation.receive(message, 100, 0.0)

    async def hear(self) -> ServerMessage:
        async with asyncio.timeout(PATIENCE_S):
            message, _ = await self.conversation.outbox.get()
        self.conversation.outbox.task_done()
        return message

    async def sent(self, n: int) -> None:
        """Wait until `n` units have reached the engine."""
        async with asyncio.timeout(PATIENCE_S):
            while self.handle.calls.count("send") < n or len(self.conversation._in_flight) < 1:
                await asyncio.sleep(0.001)

    def answer(self, *, is_listen: bool = False, end_of_turn: bool = False) -> None:
        """Emit the result of a unit."""
        self.n_units += 1
        self.conversation.emit(UnitResult("c", self.n_units, is_listen, "", end_of_turn))

    async def end(self) -> ConversationEnd:
        async with asyncio.timeout(PATIENCE_S):
            return await self.running


def staged(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Run a test's coroutine, then cancel its conversation."""

    def run() -> None:
        async def whole() -> None:
            await test()
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()

        asyncio.run(whole())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@staged
async def test_idle_timeout_ends_session() -> None:
    """The timeout counts from the last message."""
    stage = Stage(idle_timeout=1.0)
    for _ in range(4):
        await asyncio.sleep(0.3)
        await stage.say(Interrupt())
        assert isinstance(await stage.hear(), Interrupted)
    timeout = await stage.hear()
    assert isinstance(timeout, Timeout), f"expected a timeout, got {timeout!r}"
    assert timeout.reason == "Idle timeout (1.0s)", f"expected the reason, got {timeout!r}"
    end = await stage.end()
    assert end.code == CloseCode.NORMAL, f"expected close code {CloseCode.NORMAL}, got {end}"


@staged
async def test_engine_failure_ends_session() -> None:
    """One error, then close code 1011."""
    stage = Stage()
    await stage.say(Prepare())
    assert isinstance(await stage.hear(), Prepared)
    stage.conversation.emit(Failure("c", 0, EngineError("engine", expected="one that runs", got="none")))
    error = await stage.hear()
    assert isinstance(error, Error) and error.code == "engine", f"expected the engine's error, got {error!r}"
    end = await stage.end()
    assert end.code == CloseCode.INTERNAL_ERROR and stage.conversation.outbox.empty(), (
        f"expected {CloseCode.INTERNAL_ERROR} and no more, got {end}"
    )


@staged
async def test_engine_failure_during_unit_ends_session() -> None:
    stage = Stage()
    await stage.say(Prepare(), CHUNK, CHUNK)
    assert isinstance(await stage.hear(), Prepared)
    await stage.sent(1)
    stage.conversation.emit(Failure("c", 0, EngineError("engine", expected="one that runs", got="none")))
    error = await stage.hear()
    assert isinstance(error, Error) and error.code == "engine", f"expected the engine's error, got {error!r}"
    end = await stage.end()
    assert end.code == CloseCode.INTERNAL_ERROR, f"expected close code {CloseCode.INTERNAL_ERROR}, got {end}"
    assert stage.handle.calls == ["send"], f"expected no more units, got {stage.handle.calls}"


@staged
async def test_engine_failure_before_unit_is_accepted() -> None:
    """The engine emits a failure and refuses the unit; both errors have the code of the engine."""
    stage = Stage()
    stage.handle.sending = Future()
    await stage.say(Prepare(), CHUNK)
    assert isinstance(await stage.hear(), Prepared)
    await stage.sent(1)
    error = EngineError("engine", expected="one that runs", got="none")
    stage.conversation.emit(Failure("c", 0, error))
    stage.handle.sending.set_exception(error)
    reported = [await stage.hear()]
    end = await stage.end()
    while not stage.conversation.outbox.empty():
        reported.append(await stage.hear())
    codes = {one.code for one in reported}
    assert end.code == CloseCode.INTERNAL_ERROR and codes == {"engine"}, (
        f"expected the engine's errors alone, got {reported}"
    )


@staged
async def test_failed_unit_gets_error_as_answer() -> None:
    stage = Stage()
    await stage.say(Prepare(), CHUNK, CHUNK)
    assert isinstance(await stage.hear(), Prepared)
    await stage.sent(1)
    stage.conversation.emit(Failure("c", 0, OrderError("unit", expected="its turn", got="none")))
    assert isinstance(await stage.hear(), Error)
    await stage.sent(2)
    stage.answer()
    assert isinstance(await stage.hear(), Result)


@staged
async def test_sends_partial_results_only_on_request() -> None:
    for spec, n in ((Spec(), 0), (Spec(partial_results=True), 2)):
        stage = Stage()
        await stage.say(Prepare(spec=spec), CHUNK)
        assert isinstance(await stage.hear(), Prepared)
        await stage.sent(1)
        for text in "ab":
            stage.conversation.emit(PartialResult("c", 1, text))
        stage.answer()
        parts = [await stage.hear() for _ in range(n)]
        result = await stage.hear()
        got = [part.text for part in parts]
        assert got == ["a", "b"][:n] and result.n_parts == n, f"expected {n} parts, got {got}, {result!r}"


@staged
async def test_late_interrupt_does_not_affect_next_turn() -> None:
    """The unit in flight had already decided to listen."""
    stage = Stage()
    await stage.say(Prepare(), CHUNK)
    assert isinstance(await stage.hear(), Prepared)
    await stage.sent(1)
    await stage.say(Interrupt())
    stage.answer(is_listen=True)
    assert isinstance(await stage.hear(), Result) and isinstance(await stage.hear(), Interrupted)
    assert stage.handle.calls == ["send", "break", "clear"], f"expected it taken back, got {stage.handle.calls}"


@staged
async def test_interrupt_between_units_ends_the_turn() -> None:
    """It stays in force until the turn ends; an end without a turn is not reported."""
    stage = Stage()
    await stage.say(Prepare(), CHUNK)
    assert isinstance(await stage.hear(), Prepared)
    await stage.sent(1)
    stage.answer()
    assert not (await stage.hear()).is_listen
    await stage.say(Interrupt(), CHUNK)
    assert isinstance(await stage.hear(), Interrupted)
    await stage.sent(2)
    assert stage.handle.calls == ["send", "break", "send"], f"expected the break to stand, got {stage.handle.calls}"
    stage.answer(is_listen=True, end_of_turn=True)
    assert (await stage.hear()).end_of_turn, "expected the open turn to end"
    await stage.say(CHUNK)
    await stage.sent(3)
    stage.answer(is_listen=True, end_of_turn=True)
    assert not (await stage.hear()).end_of_turn, "expected no end of a turn that never was"


@staged
async def test_notes_that_deferred_finalize_has_no_effect() -> None:
    stage = Stage()
    await stage.say(Prepare(), Prepare(deferred_finalize=False))
    assert (await stage.hear()).notes == []
    [note] = (await stage.hear()).notes
    assert note.startswith("setting deferred_finalize has no effect: "), note


@staged
async def test_refuses_too_many_frames() -> None:
    stage = Stage()
    await stage.say(*[VideoFrame(frame="AAAA")] * (MAX_FRAMES + 2))
    for _ in range(2):
        error = await stage.hear()
        assert isinstance(error, Error) and error.code == "backlog_full", f"expected a limit, got {error!r}"


@staged
async def test_pauses_for_client_that_does_not_read() -> None:
    stage = Stage()
    await stage.say(*[Interrupt()] * 100)
    await asyncio.sleep(0.05)
    waiting = stage.conversation.outbox.qsize()
    assert waiting == MAX_UNSENT + 1, f"expected {MAX_UNSENT + 1} unsent messages, got {waiting}"
    for _ in range(100):
        assert isinstance(await stage.hear(), Interrupted)
    await stage.say(Stop())
    await stage.hear()
    assert (await stage.end()).code == CloseCode.NORMAL


@pytest.mark.parametrize("n_bytes", [1, 100_000])
def test_inbox_is_bounded(n_bytes: int) -> None:
    """By bytes, or by count for tiny messages."""

    async def fill() -> int:
        stage = Stage(max_backlog=2_000_000)
        stage.running.cancel()
        with suppress(TimeoutError):
            async with asyncio.timeout(1):
                for _ in range(10_000):
                    await stage.conversation.receive(Interrupt(), n_bytes, 0.0)
        return len(stage.conversation._inbox)

    n = asyncio.run(fill())
    expected = 21 if n_bytes > 1024 else 2_000_000 // 1024 + 1
    assert n == expected, f"expected {expected} messages to be taken, got {n}"
