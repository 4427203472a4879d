"""An engine on its thread, sessions that use it from other threads, and an observer that blocks it within a unit."""

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from tests.worker.loop.engines import ALOUD, QUIET, Director, make_config, make_parts, make_prompt, make_sound
from worker.config.session import WindowConfig
from worker.engine import Engine
from worker.loop.results import Event, Failure, UnitResult
from worker.loop.session_handle import SessionHandle

PATIENCE_S = 60.0  # every step takes less than a second on an idle machine
TIGHT = ALOUD.model_copy(update={"window": WindowConfig(mode="basic", high_tokens=40, low_tokens=20)})


class Turnstile(Director):
    """Blocks the engine thread within a session's unit."""

    def __init__(self) -> None:
        super().__init__(listen=0.0)
        self.name = ""
        self.reached, self.free = threading.Event(), threading.Event()

    def prefilled(self, session: str, logits: Any) -> None:
        super().prefilled(session, logits)
        if session == self.name:
            self.reached.set()
            assert self.free.wait(PATIENCE_S), "expected to be released"

    @contextmanager
    def holding(self, name: str, begin: Callable[[], object]) -> Iterator[None]:
        """Block the thread in the unit that `begin` sends until the context ends."""
        self.name = name
        self.reached.clear()
        self.free.clear()
        begin()
        try:
            assert self.reached.wait(PATIENCE_S), "expected the unit to begin"
            yield
        finally:
            self.name = ""
            self.free.set()


class Talker:
    """A session of a running engine and its events."""

    def __init__(self, engine: Engine, name: str, config: Any = QUIET, **prompt: Any):
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.handle: SessionHandle = engine.open(name, config, self.events.put).result(PATIENCE_S)
        self.handle.prepare(make_prompt(**prompt)).result(PATIENCE_S)

    def send(self, seed: int, **settings: Any) -> Future[None]:
        return self.handle.send(make_sound(seed), **settings)

    def wait(self, n: int = 1) -> list[Event]:
        """Events up to and including the n-th outcome."""
        events: list[Event] = []
        while sum(isinstance(event, UnitResult | Failure) for event in events) < n:
            events.append(self.events.get(timeout=PATIENCE_S))
        return events

    def leave(self) -> None:
        self.handle.close().result(PATIENCE_S)


def make_engine(observer: Director | None = None) -> Engine:
    config = make_config(session=QUIET)
    return Engine(make_parts(config), config, observer=observer)
