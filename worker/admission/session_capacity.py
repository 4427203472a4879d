"""How many sessions a worker serves in time: the warm-up's measurement, corrected by recent units. Torch-free.

A unit during which n units share the engine on average takes at most the time of n units that start together, which
the warm-up has measured. The ratio of both times, over recent units, is the slowdown since then: more than 1 if other
programs use it or units have more to do, less if the warm-up was disturbed. The capacity is the number of sessions
whose units, all started together, end before the target time under this slowdown.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

from worker.admission.unit_cost import UnitCost
from worker.loop.results import UnitLoad

TARGET_S = 0.9  # of the second, for units that start together; the rest is for what the ratio has not seen yet
QUANTILE = 0.99
RECENT, RECENT_SPOKEN = 256, 64  # units; units that spoke count longer, since sessions that listen cost little
MIN_UNITS = 8  # fewer do not change the warm-up's result
TRUSTED_UNITS = 64  # fewer do not raise the capacity above that of the warm-up
MIN_SLOWDOWN = 0.25
MAX_AGE_S = 300.0

Mode = Literal["measured", "fixed"]


class RecentUnit(NamedTuple):
    """A unit. at: clock reading of its end, s. seconds: its time. slowdown: its time relative to the warm-up's."""

    at: float
    seconds: float
    slowdown: float


@dataclass(frozen=True)
class AdmissionReport:
    """What limits the number of sessions, for /health.

    Attributes:
        mode: `fixed`: the number of slots limits them; `measured`: units that are answered in time as well.
        allocated: slots in memory.
        capacity: sessions that are admitted.
        excess: open sessions above the capacity; as many have to end before another one is admitted.
        target_ms: time in which the units of all sessions have to be answered.
        p99_ms: 99th percentile of the times of recent units; None before the first.
        slowdown: of recent units, relative to the warm-up.
        n_units: recent units.
    """

    mode: Mode
    allocated: int
    capacity: int
    excess: int
    target_ms: float
    p99_ms: float | None
    slowdown: float
    n_units: int

    def body(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


class SessionCapacity:
    """The capacity of one worker. For one event loop.

    Args:
        n_slots: slots in memory.
        cost: time of units, as the warm-up has measured it; None: the number of slots is the capacity.
        clock: monotonic s.
        target_s: time in which the units of all sessions have to be answered.
    """

    def __init__(
        self,
        n_slots: int,
        cost: UnitCost | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        target_s: float = TARGET_S,
    ):
        self._n_slots, self._cost, self._clock, self._target_s = n_slots, cost, clock, target_s
        self._recent: deque[RecentUnit] = deque(maxlen=RECENT)
        self._spoken: deque[RecentUnit] = deque(maxlen=RECENT_SPOKEN)

    def record(self, load: UnitLoad, *, spoke: bool) -> None:
        """Count an answered unit."""
        slowdown = 1.0 if self._cost is None else load.seconds / self._cost.seconds(load.n_jobs)
        unit = RecentUnit(self._clock(), load.seconds, slowdown)
        self._recent.append(unit)
        if spoke:
            self._spoken.append(unit)

    @property
    def slowdown(self) -> float:
        """Time of recent units relative to that of the warm-up, 99th percentile; 1 before there are enough."""
        self._forget()
        first = self._recent[0].at if self._recent else 0.0
        units = [*(unit for unit in self._spoken if unit.at < first), *self._recent]
        if len(units) < MIN_UNITS:
            return 1.0
        found = max(quantile(unit.slowdown for unit in units), MIN_SLOWDOWN)
        return found if len(units) >= TRUSTED_UNITS else max(found, 1.0)

    @property
    def capacity(self) -> int:
        """Sessions that are served in time: at least 1, at most the number of slots."""
        if self._cost is None:
            return self._n_slots
        return min(max(1, self._cost.most(self._target_s / self.slowdown)), self._n_slots)

    def report(self, n_open: int) -> AdmissionReport:
        """The state for /health. n_open: sessions."""
        capacity, slowdown = self.capacity, self.slowdown
        return AdmissionReport(
            mode="fixed" if self._cost is None else "measured",
            allocated=self._n_slots,
            capacity=capacity,
            excess=max(0, n_open - capacity),
            target_ms=round(1000 * self._target_s, 1),
            p99_ms=round(1000 * quantile(unit.seconds for unit in self._recent), 1) if self._recent else None,
            slowdown=round(slowdown, 3),
            n_units=len(self._recent),
        )

    def _forget(self) -> None:
        oldest = self._clock() - MAX_AGE_S
        for units in (self._recent, self._spoken):
            while units and units[0].at < oldest:
                units.popleft()


def quantile(values: Iterable[float]) -> float:
    """The 99th percentile of at least one value; of fewer than a hundred values the second largest.

    A single value that is far above the others is a disturbance.
    """
    ordered = sorted(values)
    return ordered[max(0, min(math.ceil(QUANTILE * len(ordered)) - 1, len(ordered) - 2))]
