"""How long the engine thread can do other work while units are in flight. Torch-free.

A unit's result is due a second after its arrival. What other models may take of that second is what the slowest unit of
the last seconds leaves of it. Contains no clock.
"""

from collections import deque
from collections.abc import Hashable, Mapping

DUE_S = 1.0  # after the arrival of a unit
MARGIN_S = 0.1  # of a second, for decoding and sending
UNMEASURED_S = 0.6  # of a unit, before one was measured
HISTORY_S = 10  # seconds whose slowest unit counts


class UnitDeadlines:
    """Units in flight and what other work has taken from each. All clock readings are in seconds."""

    def __init__(self) -> None:
        self._other_s = 0.0  # of other work in all
        self._before: dict[Hashable, tuple[float, float]] = {}  # unit -> its arrival, other work until it began
        self._slowest: deque[tuple[int, float]] = deque(maxlen=HISTORY_S)  # second, slowest unit that ended in it

    def count_other(self, seconds: float) -> None:
        """Count time that the thread spent on other work."""
        self._other_s += seconds

    def watch(self, arrivals: Mapping[Hashable, float], now: float) -> None:
        """Take note of the units in flight, of which new ones begin and missing ones are over.

        arrivals: unit -> clock reading when it arrived.
        """
        for unit in [unit for unit in self._before if unit not in arrivals]:
            arrived, other_s = self._before.pop(unit)
            self._count_unit(now - arrived - (self._other_s - other_s), now)
        for unit, arrived in arrivals.items():
            self._before.setdefault(unit, (arrived, self._other_s))

    def slack_s(self, now: float) -> float:
        """Seconds that other work may take now without making a unit late; `inf` without units in flight."""
        cost = self._cost_s(now)
        slack = float("inf")
        for arrived, other_s in self._before.values():
            taken = self._other_s - other_s
            own = now - arrived - taken
            slack = min(slack, DUE_S - MARGIN_S - max(cost, own) - taken)
        return slack

    def _count_unit(self, seconds: float, now: float) -> None:
        second = int(now)
        if self._slowest and self._slowest[-1][0] == second:
            seconds = max(seconds, self._slowest.pop()[1])
        self._slowest.append((second, seconds))

    def _cost_s(self, now: float) -> float:
        """Time of a unit without other work."""
        return max((cost for second, cost in self._slowest if second > now - HISTORY_S - 1), default=UNMEASURED_S)
