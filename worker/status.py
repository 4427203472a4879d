"""Where a worker is in its life, for health, logs and metrics. Torch-free; any thread may tell or ask."""

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
# State -> what may come next; the whole law.
LEGAL: dict[State, frozenset[State]] = {
    S.LOADING: frozenset({S.COMPILING, S.WARMING_UP, S.FAILED, S.DRAINING}),
    S.COMPILING: frozenset({S.WARMING_UP, S.FAILED, S.DRAINING}),
    S.WARMING_UP: frozenset({S.IDLE, S.FAILED, S.DRAINING}),
    S.IDLE: frozenset({S.BUSY, S.UNLOADED, S.DRAINING, S.FAILED}),
    S.BUSY: frozenset({S.IDLE, S.DRAINING, S.FAILED}),
    S.UNLOADED: frozenset({S.LOADING, S.DRAINING}),
    S.DRAINING: frozenset(),
    S.FAILED: frozenset({S.UNLOADED, S.DRAINING}),
}
START = (S.LOADING, S.COMPILING, S.WARMING_UP)
# What the public implementation's gateway understands.
WIRE_NAMES = {
    S.LOADING: "loading",
    S.COMPILING: "loading",
    S.WARMING_UP: "loading",
    S.IDLE: "idle",
    S.BUSY: "duplex_active",
    S.UNLOADED: "loading",
    S.DRAINING: "duplex_active",  # takes nothing new
    S.FAILED: "error",
}


class StateError(ModelError, RuntimeError):
    """The worker is not in a state for what was asked."""


@dataclass(frozen=True)
class StageProgress:
    """How far the stage is. what: a few words. total: 0 if nobody knows."""

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
    """The one place that knows a worker's state."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._lock = threading.Lock()
        self._clock = clock
        self._standing = StatusSnapshot(State.LOADING, clock())
        self.start_seconds: dict[State, float] = {}  # of the stages of the last start that are over

    @property
    def now(self) -> StatusSnapshot:
        return self._standing

    @property
    def state(self) -> State:
        return self._standing.state

    def move(self, state: State, error: str | None = None) -> None:
        """Raises: StateError for a step that the table does not have."""
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
        """Tell how far the stage is."""
        with self._lock:
            self._standing = replace(self._standing, progress=StageProgress(what, done, total))

    def count_sessions(self, n: int) -> None:
        """IDLE and BUSY follow the number of open sessions; other states do not care."""
        wanted = State.BUSY if n else State.IDLE
        if self.state in (State.IDLE, State.BUSY) and self.state is not wanted:
            self.move(wanted)
