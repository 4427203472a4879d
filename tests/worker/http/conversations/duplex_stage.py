"""A running `DuplexConversation` without a socket and a model, whose engine session the test controls."""

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from worker.config.service import Config
from worker.config.session import SessionConfig
from worker.decoding import DecodingThreads
from worker.http.duplex_conversation import DuplexConversation
from worker.http.metrics import WorkerMetrics
from worker.http.socket_conversation import ConversationEnd
from worker.loop.results import UnitResult
from worker.protocol.messages import AudioChunk, ServerMessage
from worker.protocol.wire import Sound
from worker.serving import worker_settings
from worker.slots import SlotUse

PATIENCE_S = 20.0
SETTINGS = worker_settings(Config())
CHUNK = AudioChunk(audio_base64=Sound(np.zeros(16_000, np.float32)))


class MovableClock:
    """The clock of the running event loop, moved forward by the test: timers that are due by then fire at once.

    Made before the conversation, which takes the clock of its loop.
    """

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self._time, self._ahead_s = loop.time, 0.0
        loop.time = lambda: self._time() + self._ahead_s

    async def move(self, seconds: float) -> None:
        """Move the clock and run what is due."""
        self._ahead_s += seconds
        for _ in range(5):
            await asyncio.sleep(0)


async def until(holds: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    async with asyncio.timeout(PATIENCE_S):
        while not holds():
            await asyncio.sleep(0.001)


def done(value: Any = None) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


class Handle:
    """A fake engine session, controlled by the test. calls: the calls that were made.

    n_to_unit: 0, so that it gets each piece of a unit.
    """

    name, is_live, max_waiting_units, context_len, n_to_unit, n_units = "c#1", True, 16, 0, 0, 0

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.sending: Future[None] | None = None  # the result of `send`; None: a completed future

    def prepare(self, prompt: Any, config: SessionConfig) -> Future[int]:
        return done(10)

    def slice_limits(self, n_frames: int, given: Any) -> list[int]:
        return [1] * n_frames

    def cut(self, image: Any, max_slices: int) -> list[Any]:
        self.calls.append("cut")
        return []

    def send(self, *given: Any, **options: Any) -> Future[None]:
        self.calls.append("send")
        return self.sending or done()

    def insert_text(self, role: str, text: str) -> Future[None]:
        self.calls.append(f"{role}: {text}")
        return self.sending or done()

    def forget_ahead(self) -> Future[None]:
        self.calls.append("forget")
        return done()

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
            omni=SimpleNamespace(check_prompt=lambda text: None),
            count_unit=lambda event, arrived: None,
            start_after_ms=lambda session: None,
            preparing=asyncio.Semaphore(),
            decoders=DecodingThreads(),
            reference=lambda **given: None,
            loaded=None,
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
        await until(lambda: self.handle.calls.count("send") >= n and len(self.conversation._in_flight) > 0)

    def answer(self, *, is_listen: bool = False, end_of_turn: bool = False, is_incomplete: bool = False) -> None:
        """Emit the result of a unit."""
        self.n_units += not is_incomplete
        result = UnitResult("c", self.n_units, is_listen, "", end_of_turn, is_incomplete=is_incomplete)
        self.conversation.emit(result)

    async def called(self, call: str) -> None:
        """Wait until a call has reached the engine."""
        await until(lambda: call in self.handle.calls)

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
