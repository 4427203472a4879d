"""A worker's state and the progress of its start, for health, logs and metrics. Torch-free and thread-safe."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum

from models.errors import ModelError


class State(StrEnum):
    LOADING = "LOADING"
    COMPILING = "COMPILING"
    WARMING_UP = "WARMING_UP"
    IDLE = "IDLE"
    BUSY = "BUSY"
    UNLOADED = "UNLOADED"
    DRAINING = "DRAINING"
    FAILED = "FAILED"


S = State
# State -> its legal successors.
LEGAL: dict[State, frozenset[State]] = {
    S.LOADING: frozenset({S.COMPILING, S.WARMING_UP, S.IDLE, S.FAILED, S.DRAINING}),
    S.COMPILING: frozenset({S.WARMING_UP, S.FAILED, S.DRAINING}),
    S.WARMING_UP: frozenset({S.IDLE, S.FAILED, S.DRAINING}),
    S.IDLE: frozenset({S.BUSY, S.LOADING, S.UNLOADED, S.DRAINING, S.FAILED}),
    S.BUSY: frozenset({S.IDLE, S.DRAINING, S.FAILED}),
    S.UNLOADED: frozenset({S.LOADING, S.DRAINING, S.FAILED}),
    S.DRAINING: frozenset(),
    S.FAILED: frozenset({S.UNLOADED, S.DRAINING}),
}
START = (S.LOADING, S.COMPILING, S.WARMING_UP)
# State -> status name of the public implementation's gateway.
WIRE_NAMES = {
    S.LOADING: "loading",
    S.COMPILING: "loading",
    S.WARMING_UP: "loading",
    S.IDLE: "idle",
    S.BUSY: "duplex_active",
    S.UNLOADED: "loading",
    S.DRAINING: "duplex_active",  # accepts no session
    S.FAILED: "error",
}


class StateError(ModelError, RuntimeError):
    """The operation is not possible in the worker's state."""


@dataclass(frozen=True)
class StageProgress:
    """Progress within a stage. what: a few words. total: 0 if unknown."""

    what: str = ""
    done: int = 0
    total: int = 0


@dataclass(frozen=True)
class StatusSnapshot:
    """A status at one moment. since: monotonic seconds when the state began."""

    state: State
    since: float
    progress: StageProgress = StageProgress()
    error: str | None = None


class Status:
    """A worker's state and its legal transitions."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._lock = threading.Lock()
        self._clock = clock
        self._standing = StatusSnapshot(State.LOADING, clock())
        self.start_seconds: dict[State, float] = {}  # of finished stages of the latest start

    @property
    def now(self) -> StatusSnapshot:
        return self._standing

    @property
    def state(self) -> State:
        return self._standing.state

    def move(self, state: State, error: str | None = None) -> None:
        """Change the state. Raises: StateError for a transition that is not in `LEGAL`."""
        with self._lock:
            before, now = self._standing, self._clock()
            if state not in LEGAL[before.state]:
                expected = " or ".join(sorted(LEGAL[before.state])) or "no further state"
                raise StateError(f"worker after {before.state}", expected=expected, got=state)
            if state is State.LOADING:
                self.start_seconds = {}
            elif before.state in START:
                self.start_seconds[before.state] = now - before.since
            self._standing = StatusSnapshot(state, now, error=error)

    def progress(self, what: str, done: int = 0, total: int = 0) -> None:
        """Set the progress within the stage."""
        with self._lock:
            self._standing = replace(self._standing, progress=StageProgress(what, done, total))

    def count_sessions(self, n: int) -> None:
        """Switch between IDLE and BUSY by the number of open sessions; other states stay."""
        wanted = State.BUSY if n else State.IDLE
        if self.state in (State.IDLE, State.BUSY) and self.state is not wanted:
            self.move(wanted)
