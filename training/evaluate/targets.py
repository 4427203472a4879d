"""What the talker must reach and aims at, the table of a result, and the gate: committed bounds of figures."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from training.evaluate.figures import Measured

Unit = Literal["%", "ms", "s", "points", ""]


@dataclass(frozen=True)
class Goal:
    """Of one figure. Shares are numbers from 0 to 1. gated: it depends on the model and not on the machine."""

    must: float
    aim: float
    unit: Unit = "%"
    at_least: bool = True
    gated: bool = True

    def is_met(self, value: float, goal: float) -> bool:
        return value >= goal if self.at_least else value <= goal

    def text(self, value: float) -> str:
        if self.unit == "%":
            return f"{100 * value:.1f} %"
        if self.unit == "points":
            return f"{100 * value:.1f} points"
        return f"{value:.3g}" if not self.unit else f"{value:.{0 if self.unit == 'ms' else 1}f} {self.unit}"


GOALS = {
    "answers, training voices": Goal(0.90, 0.97),
    "answers, unseen voice": Goal(0.75, 0.90),
    "answers, 15 dB noise": Goal(0.75, 0.90),
    "scenes": Goal(0.92, 0.98),
    "watch, in time": Goal(0.90, 0.98),
    "watch, false alarms": Goal(1, 0, "", at_least=False),
    "starts in time": Goal(0.90, 0.97),
    "speaks over the user": Goal(0.05, 0.01, at_least=False),
    "silent in time": Goal(0.95, 0.99),
    "word errors above the voice": Goal(0.10, 0.03, "points", at_least=False),
    "SPEAK unit, p95": Goal(600, 350, "ms", at_least=False, gated=False),
    "LISTEN unit, p95": Goal(150, 80, "ms", at_least=False, gated=False),
    "start to ready": Goal(15, 8, "s", at_least=False, gated=False),
    "late units": Goal(0, 0, "", at_least=False, gated=False),
    "voice, first and last minute": Goal(0.80, 0.90, ""),
    "loops": Goal(0, 0, "", at_least=False),
}
Figures = Mapping[str, Measured | None]


def table(figures: Figures) -> str:
    """The figures as a Markdown table."""
    lines = ["| figure | measured | 95 % interval | n | must | aim | |", "|---|---|---|---|---|---|---|"]
    for name, goal in GOALS.items():
        sign = "≥" if goal.at_least else "≤"
        must, aim = (f"{sign} {goal.text(one)}" for one in (goal.must, goal.aim))
        if (found := figures.get(name)) is None:
            lines.append(f"| {name} | - | - | 0 | {must} | {aim} | not measured |")
            continue
        is_aim, is_must = goal.is_met(found.value, goal.aim), goal.is_met(found.value, goal.must)
        verdict = "aim" if is_aim else "must" if is_must else "missed"
        interval = f"{goal.text(found.low)} to {goal.text(found.high)}"
        lines.append(f"| {name} | {goal.text(found.value)} | {interval} | {found.n} | {must} | {aim} | {verdict} |")
    return "\n".join(lines)


def as_json(figures: Figures) -> dict[str, Any]:
    """The figures with their goals."""
    return {
        name: {"measured": None if (found := figures.get(name)) is None else asdict(found), **asdict(goal)}
        for name, goal in GOALS.items()
    }


def bounds_of(figures: Figures) -> dict[str, float]:
    """Bounds for later runs: the worse end of each measured figure's interval. Times are left out."""
    return {
        name: round(found.low if goal.at_least else found.high, 4)
        for name, goal in GOALS.items()
        if goal.gated and (found := figures.get(name)) is not None
    }


def failures(figures: Figures, bounds: Mapping[str, float]) -> list[str]:
    """What is worse than its bound, or not measured. Raises: ValueError for a bound of an unknown figure."""
    if unknown := bounds.keys() - GOALS.keys():
        raise ValueError(f"bounds: expected {', '.join(GOALS)}, got {', '.join(sorted(unknown))}")
    found = []
    for name, bound in bounds.items():
        goal, measured = GOALS[name], figures.get(name)
        got = "nothing" if measured is None else goal.text(measured.value)
        if measured is None or not goal.is_met(measured.value, bound):
            side = "at least" if goal.at_least else "at most"
            found.append(f"bound of {name}: expected {side} {goal.text(bound)}, got {got}")
    return found


def read_bounds(file: Path) -> dict[str, float]:
    """The bounds of a file that `bounds_of` was written to."""
    bounds: dict[str, float] = json.loads(file.read_text(encoding="utf-8"))
    return bounds
