"""What one kind of step is expected to take, from the steps before it. Contains no clock."""

import math
from dataclasses import dataclass

UNMEASURED_S = 0.1  # of a kind of step before its first one
AVERAGED = 0.1  # share of the newest step in the mean of a kind
HALF_LIFE_S = 5.0  # of what a slow step took above the mean, so that it does not hold back later ones for ever


@dataclass
class StepCost:
    """Seconds that one kind of step takes: their mean, or more for some seconds after a slow one."""

    _mean: float = 0.0
    _slow: float = 0.0
    _at: float | None = None  # clock reading of `_slow`

    def count(self, seconds: float, now: float) -> None:
        """Count a step that has ended now."""
        slow = 0.0 if self._at is None else self.seconds(now)
        self._mean += AVERAGED * (seconds - self._mean)
        self._slow, self._at = max(seconds, slow), now

    def seconds(self, now: float) -> float:
        """What a step is expected to take."""
        if self._at is None:
            return UNMEASURED_S
        return self._mean + max(0.0, self._slow - self._mean) * math.exp2((self._at - now) / HALF_LIFE_S)
