"""A session of the warm-up: sends units, and waits for their results."""

import queue
import time
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from worker.config.session import SessionConfig
from worker.engine import Engine
from worker.loop.prompt.system_prompt import SystemPrompt
from worker.loop.results import Event, Failure, PartialResult, UnitResult


@dataclass(frozen=True, eq=False)
class WarmUpUnit:
    """One second. sound: [16000] float32 at 16 kHz. picture: a JPEG file."""

    sound: np.ndarray
    picture: bytes


class WarmUpSession:
    """One session of the warm-up."""

    def __init__(self, engine: Engine, name: str, config: SessionConfig, prompt: SystemPrompt):
        self._engine, self._events, self._prompt = engine, queue.SimpleQueue[Event](), prompt
        self._max_rows = engine.max_context_len - config.unit_rows
        self.handle = engine.open(name, config, self._events.put).result()

    def begin_preparing(self) -> Future[int]:
        """Feed the prompt. Returns: its context rows, once units may be sent."""
        return self.handle.prepare(self._prompt)

    def prepare(self) -> None:
        self.begin_preparing().result()

    def send(self, unit: WarmUpUnit, *, has_picture: bool = True, speaks: bool | None = None) -> float:
        """Send a unit. Returns: ms on this thread until the engine has it.

        has_picture: with its picture. speaks: whether it has to speak; None: the model decides.
        """
        if self.handle.context_len > self._max_rows:
            self.prepare()  # the context is full: units do not leave it, and the file has more seconds
        start = time.perf_counter()
        taken = self.handle.send(
            unit.sound,
            [unit.picture] if has_picture else [],
            force_listen=speaks is False,
            force_speak=speaks is True,
        )
        spent = 1000 * (time.perf_counter() - start)
        taken.result()
        return spent

    def result(self) -> UnitResult:
        """The next result. Raises: the error of a failed unit."""
        while isinstance(event := self._events.get(), PartialResult):
            pass
        # This call runs after the unit is closed; a failure of closing it is in the queue by then.
        self._engine.submit(lambda: None).result()
        while not self._events.empty():
            event = self._events.get()
        if isinstance(event, Failure):
            raise event.error
        assert isinstance(event, UnitResult), event
        return event
