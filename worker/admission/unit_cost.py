"""How long units take that run at the same time, from the units of a warm-up. Torch-free."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from worker.loop.results import UnitLoad

# Least part of a burst's time that grows with its size: a slow lone unit must not make further units look free.
MIN_SHARE = 0.25


@dataclass(frozen=True)
class Burst:
    """Units that started together. n: how many. seconds: of the slowest. n_spoken: how many of them spoke."""

    n: int
    seconds: float
    n_spoken: int


@dataclass(frozen=True)
class UnitCost:
    """Seconds until `n` speaking units that start together are answered: `base_s` + `n` * `each_s`.

    alone_s: of a unit, if units that start at different times share no call and follow each other; 0: they share calls.
    """

    base_s: float
    each_s: float
    alone_s: float = 0.0

    def seconds(self, n: float) -> float:
        """The time of `n` units, in s."""
        return self.base_s + n * self.each_s

    def most(self, limit_s: float) -> int:
        """The largest number of units that take at most `limit_s`, whenever they start; 0 if not even one does."""
        n = (limit_s - self.base_s) / self.each_s
        if self.alone_s:
            n = min(n, limit_s / self.alone_s)
        return max(0, math.floor(n + 1e-9))

    @classmethod
    def fitted(cls, lone_s: float, burst: Burst | None, *, shares_calls: bool = True) -> Self:
        """The cost that one unit alone and a burst have measured; it is exact for the burst.

        Args:
            lone_s: time of a unit alone, s.
            burst: at least two units; None: the cost is taken as proportional to the number of units.
            shares_calls: units that start at different times share calls, as on a GPU.
        """
        alone_s = 0.0 if shares_calls else lone_s
        if burst is None:
            return cls(0.0, lone_s, alone_s)
        proportional = burst.seconds / burst.n
        slope = (burst.seconds - lone_s) / (burst.n - 1)
        each_s = min(max(slope, MIN_SHARE * proportional), proportional)
        return cls(burst.seconds - burst.n * each_s, each_s, alone_s)


def measured_cost(lone: Sequence[tuple[UnitLoad, bool]], bursts: Sequence[Burst]) -> UnitCost | None:
    """The cost of speaking units, from the units of a warm-up; None without any.

    The first unit of a kind is left out if there is another one, because it includes what a first use costs. A burst in
    which some units only listened counts with the time that it would take if all spoke, in the ratio of lone units.

    Args:
        lone: units of one session, and whether each spoke, in their order.
        bursts: in their order; the last one counts.
    """
    spoken, listened = ([load.seconds for load, spoke in lone if spoke is kind] for kind in (True, False))
    speak_s, listen_s = (max(kind[1:] or kind, default=None) for kind in (spoken, listened))
    lone_s = speak_s if speak_s is not None else listen_s
    burst = bursts[-1] if bursts and bursts[-1].n > 1 else None
    if lone_s is None:
        return None if burst is None else UnitCost.fitted(burst.seconds / burst.n, burst)
    if burst is not None and listen_s is not None and listen_s < lone_s:
        share = (burst.n_spoken * lone_s + (burst.n - burst.n_spoken) * listen_s) / (burst.n * lone_s)
        burst = Burst(burst.n, burst.seconds / share, burst.n)
    return UnitCost.fitted(lone_s, burst)
