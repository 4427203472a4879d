"""Spaces the calls of a stage while many jobs are in flight, so that each call serves more of them.

A prefill or a run of the vocoder for two jobs takes little more than for one. With few jobs in flight a job never waits
for others. Waiting changes when a job runs, not its results.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

from models.graphs.shape_table import ShapeTable

LOADED_JOBS = 12  # units in flight; 64 sessions, half of them speaking, have about 16 on one H200
ENOUGH = 8  # jobs for which a call does not wait for more
CROWDED_JOBS = 36  # in flight, with which calls wait for twice as many; 96 sessions have about 26 while none is late
CROWDED_SPACING_S = 0.16
Item = TypeVar("Item")


class Gathering:
    """The calls of one stage.

    Args:
        clock: monotonic s.
        spacing_s: from the begin of a call to that of the next one for fewer jobs than `ENOUGH`; with
            `CROWDED_JOBS` in flight at least `CROWDED_SPACING_S`, for fewer than twice as many.
    """

    def __init__(self, clock: Callable[[], float], spacing_s: float):
        self._clock, self._spacing_s, self._last = clock, spacing_s, float("-inf")

    @staticmethod
    def is_loaded(n_in_flight: int) -> bool:
        """Whether so many jobs are in flight that calls are spaced."""
        return n_in_flight >= LOADED_JOBS

    def is_due(self, n_ready: int, n_in_flight: int) -> bool:
        """Whether a call for `n_ready` jobs begins now; if so, it counts as the latest one."""
        now, enough, spacing_s = self._clock(), ENOUGH, self._spacing_s
        if n_in_flight >= CROWDED_JOBS:
            enough, spacing_s = 2 * ENOUGH, max(CROWDED_SPACING_S, spacing_s)
        if self.is_loaded(n_in_flight) and n_ready < enough and now - self._last < spacing_s:
            return False
        self._last = now
        return True


def whole_batch(jobs: Sequence[Item], shapes: ShapeTable) -> list[Item]:
    """The first of one or more jobs, as many as one call takes without much padding."""
    return list(jobs[: shapes.parts("batch", len(jobs), shapes.batch[-1])[0]])
