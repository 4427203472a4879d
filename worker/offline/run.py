"""One conversation at full speed: unit after unit into the engine, the next one when the last one is through.

Knows one session of an engine. Does not know files, tables nor what becomes of the outcomes.
"""

import queue
from collections.abc import Iterable, Iterator
from contextlib import closing
from typing import Any

import numpy as np

from models.errors import ModelError
from models.inputs.audio_sizes import UNIT_SAMPLES
from worker.config.session import SessionConfig
from worker.engine import Engine
from worker.loop.results import Event, Failure, PartialResult, UnitResult
from worker.loop.sessions import Sessions, SystemPrompt
from worker.media import MediaUnit
from worker.offline.reply import OfflineState, UnitOutcome

NAME = "offline"


class OfflineSession:
    """A session that hears one unit at a time."""

    def __init__(self, engine: Engine, config: SessionConfig, prompt: SystemPrompt):
        """Open and prepare the session. Raises: as `Sessions.open` and `Sessions.prepare`; EngineError."""
        self._engine, self._prompt = engine, prompt
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._handle = engine.open(NAME, config, self._events.put).result()
        self._prepare()
        self._n_heard = 0

    def hear(self, units: Iterable[MediaUnit], tail: int) -> Iterator[UnitOutcome]:
        """All units, then up to `tail` of silence while a turn goes on.

        Raises: what reading the units raises; EngineError. A unit that fails is an outcome like others.
        """
        with closing(iter(units)) as each:
            for unit in each:
                yield self._say(unit.sound, unit.frames)
        for _ in range(tail):
            if not self._standing.is_speaking:
                return
            yield self._say(np.zeros(UNIT_SAMPLES, np.float32), [])

    def _say(self, sound: np.ndarray, frames: list[Any]) -> UnitOutcome:
        before, index = self._standing, self._n_heard
        self._n_heard += 1
        try:
            self._handle.send(sound, frames).result()
            event = self._wait()
        except ModelError as error:  # refused before it was taken
            event = Failure(NAME, index, error)
        # Asked behind the unit, so it is closed by then: its times are whole, and a failure to close it is known.
        self._standing = self._engine.ask(_standing).result()
        while not self._events.empty():
            event = self._events.get()
        if not self._standing.is_live:
            self._prepare()
        return UnitOutcome(index, event, before, self._standing)

    def _prepare(self) -> None:
        self._handle.prepare(self._prompt).result()
        self._standing = OfflineState(True, False, False)

    def _wait(self) -> UnitResult | Failure:
        while isinstance(event := self._events.get(), PartialResult):
            pass
        return event


def _standing(sessions: Sessions) -> OfflineState:
    session = sessions.get(NAME)
    return OfflineState(session.is_live, session.turn_open, session.voice.draining)
