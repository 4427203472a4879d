"""Whether the engine thread has time for a unit that may be in vain. Torch-free.

A trial delays every unit in flight by at most its own time. It is allowed if these add up to at most `MAX_BUSY_MS`: the
slowest unit of the last ten seconds, or the oldest one in flight if that is slower; all trials of the last second; the
expected time of this trial. While no unit is measured, the times of the warm-up count, as if the units of all sessions
started together and spoke.
"""

from collections import deque
from collections.abc import Callable

HISTORY_S = 10  # seconds whose slowest unit counts
MAX_BUSY_MS = 900.0  # most of a second that a unit and trials may take; the rest is a reserve
FORGETTING = 0.9  # of the cost that a slow trial has left, per trial


class Headroom:
    """Times of units and trials on one engine thread. All clock readings are in seconds, all other times in ms.

    is_on: units are measured; `turn_on` starts it.
    """

    def __init__(self) -> None:
        self.is_on = False
        self._slowest: deque[tuple[int, float]] = deque(maxlen=HISTORY_S)  # second, slowest unit that ended in it
        self._spent: deque[tuple[float, float]] = deque()  # end and time of each trial of the last second
        self._cost_ms: float | None = None  # of a trial
        self._expected: Callable[[int], float] | None = None  # s of units that start together, by their number

    def turn_on(self) -> None:
        """Measure units from now on: a session may run units early."""
        self.is_on = True

    def expect(self, seconds: Callable[[int], float]) -> None:
        """Use these times while no unit is measured: until `n` units that start together are answered, by `n`."""
        self._expected = seconds

    def count_unit(self, ms: float, now: float) -> None:
        """Count a unit that took `ms` from its arrival to its result."""
        second = int(now)
        if self._slowest and self._slowest[-1][0] == second:
            ms = max(ms, self._slowest.pop()[1])
        self._slowest.append((second, ms))

    def count_trial(self, ms: float, now: float) -> None:
        """Count a trial that has taken `ms` of the engine thread."""
        self._spent.append((now, ms))
        while self._spent[0][0] <= now - 1:
            self._spent.popleft()
        self._cost_ms = ms if self._cost_ms is None else max(ms, FORGETTING * self._cost_ms + (1 - FORGETTING) * ms)

    def allows(self, now: float, oldest_ms: float, n_sessions: int) -> bool:
        """Whether a trial may run now; without `expect` not before a unit was measured.

        Args:
            oldest_ms: age of the oldest unit in flight.
            n_sessions: open sessions.
        """
        units = [ms for second, ms in self._slowest if second > now - HISTORY_S - 1]
        if units:
            slowest = first = max(units)
        elif self._expected is not None:
            slowest, first = 1000 * self._expected(n_sessions), 1000 * self._expected(1)
        else:
            return False
        spent = sum(ms for end, ms in self._spent if end > now - 1)
        cost = first if self._cost_ms is None else self._cost_ms
        return max(slowest, oldest_ms) + spent + cost <= MAX_BUSY_MS
