"""One conversation at full speed: each unit is submitted after the previous one is finished.

Contains no files and no tables.
"""

import queue
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np

from models.errors import ModelError
from models.inputs.audio_sizes import UNIT_SAMPLES
from worker.config.session import SessionConfig
from worker.engine import Engine
from worker.loop.prompt.system_prompt import SystemPrompt
from worker.loop.results import Event, Failure, UnitResult
from worker.loop.session import Session
from worker.media import MediaUnits
from worker.offline.reply import OfflineState, UnitOutcome

NAME = "offline"


class OfflineSession:
    """A session of an engine that processes one unit at a time."""

    def __init__(self, engine: Engine, config: SessionConfig, prompt: SystemPrompt):
        """Open and prepare the session. Raises: as `Sessions.open` and `Sessions.prepare`; EngineError."""
        self._engine, self._prompt = engine, prompt
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._handle = engine.open(NAME, config, self._events.put).result()
        self._n_units = 0
        self._state = self._prepare()

    def hear(self, units: MediaUnits, tail: int) -> Iterator[UnitOutcome]:
        """The outcomes of all units, then of up to `tail` silent ones while a turn goes on.

        A unit that fails is an outcome too. Raises: what iterating over the units raises; EngineError.
        """
        with closing(iter(units)) as iterator:  # closing it ends the decoding processes
            for unit in iterator:
                yield self._run_unit(unit.sound, unit.frames)
        for _ in range(tail):
            if not self._state.is_speaking:
                return
            yield self._run_unit(np.zeros(UNIT_SAMPLES, np.float32), [])

    def _run_unit(self, sound: np.ndarray, frames: list[Any]) -> UnitOutcome:
        before, index = self._state, self._n_units
        self._n_units += 1
        event: UnitResult | Failure
        try:
            self._handle.send(sound, frames).result()
            event = self._outcome()
        except ModelError as error:  # refused before the unit was submitted
            event = Failure(NAME, index, error)
        # The engine answers this after the unit is finalized: its times are complete, and a later Failure is queued.
        self._state = self._engine.query_session(NAME, _state_of).result()
        while not self._events.empty():
            later = self._events.get()
            if isinstance(later, UnitResult | Failure):
                event = later
        if not self._state.is_live:
            self._state = self._prepare()
        return UnitOutcome(index, event, before, self._state)

    def _prepare(self) -> OfflineState:
        self._handle.prepare(self._prompt).result()
        return OfflineState(True, False, False)

    def _outcome(self) -> UnitResult | Failure:
        while True:
            event = self._events.get()
            if isinstance(event, UnitResult | Failure):
                return event


def _state_of(session: Session) -> OfflineState:
    return OfflineState(session.is_live, session.turn_open, session.speech.draining)
