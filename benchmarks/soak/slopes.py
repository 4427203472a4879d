"""Slopes of measurements over hours, their confidence intervals, and what they mean against a bound."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

import numpy as np

N_BLOCKS, MIN_BLOCKS = 20, 5
HOUR = 3600.0
Z = 1.959964  # two-sided 95 %


class BoundVerdict(StrEnum):
    """HOLDS: the whole interval is within the bound. FAILS: it is above. UNCLEAR: it has the bound inside."""

    HOLDS = "holds"
    FAILS = "fails"
    UNCLEAR = "unclear"


@dataclass(frozen=True)
class Slope:
    """A least-squares line through the means of equal spans of time.

    Consecutive samples resemble each other, so that single samples would make the interval too narrow; means of a
    twentieth of the run do so much less.

    Attributes:
        per_hour: change in an hour.
        low, high: 95 % confidence interval of it, by Student's t.
        mean: mean of all samples.
        n_blocks: number of means.
    """

    per_hour: float
    low: float
    high: float
    mean: float
    n_blocks: int

    @classmethod
    def of(cls, seconds: Sequence[float], values: Sequence[float]) -> "Slope | None":
        """The slope of samples at these times; None with too few of them."""
        if len(values) == 0:
            return None
        times, samples = np.asarray(seconds, float), np.asarray(values, float)
        span = (times[-1] - times[0]) / N_BLOCKS or 1.0
        block = np.minimum((times - times[0]) // span, N_BLOCKS - 1).astype(int)
        used = np.unique(block)
        if len(used) < MIN_BLOCKS:
            return None
        x = np.array([times[block == one].mean() for one in used]) / HOUR
        y = np.array([samples[block == one].mean() for one in used])
        slope, start = np.polyfit(x, y, 1)
        free = len(x) - 2
        error = np.sqrt(((y - start - slope * x) ** 2).sum() / free / ((x - x.mean()) ** 2).sum())
        half = _student(free) * error
        return cls(float(slope), float(slope - half), float(slope + half), float(samples.mean()), len(used))

    def verdict(self, bound: float) -> BoundVerdict:
        """The slope against the largest one that is allowed."""
        if self.low > bound:
            return BoundVerdict.FAILS
        return BoundVerdict.HOLDS if self.high < bound else BoundVerdict.UNCLEAR


def _student(free: int) -> float:
    """The 97.5 % quantile of Student's t, by the expansion of Cornish and Fisher: within 1 % from 3 degrees on."""
    return (
        Z
        + (Z**3 + Z) / (4 * free)
        + (5 * Z**5 + 16 * Z**3 + 3 * Z) / (96 * free**2)
        + (3 * Z**7 + 19 * Z**5 + 17 * Z**3 - 15 * Z) / (384 * free**3)
    )


def slope_row(name: str, unit: str, slope: Slope | None, bound: float | None) -> dict[str, Any]:
    """One line of the result. bound: per hour; None: no verdict."""
    row: dict[str, Any] = {"name": name, "unit": unit, "bound": bound, "verdict": None}
    if slope is None:
        return row | {"verdict": None if bound is None else BoundVerdict.UNCLEAR}
    return row | asdict(slope) | {"verdict": None if bound is None else slope.verdict(bound)}
