"""Committed upper bounds of what a unit does, and what has risen above them."""

import json
from collections import Counter
from pathlib import Path

from benchmarks.gate.counters import Counts

FILE = Path(__file__).with_name("counts.json")
# Counts whose culprits are bounded one by one. Of the others the sum is bounded, so that code may move.
BY_NAME = frozenset({"regions", "messages"})
# Share that a sum may exceed its bound by: these depend a little on the interpreter and on other threads.
SLACK = {"python_calls": 0.1, "python_kib": 0.25}
N_CULPRITS = 5

Bounds = dict[str, dict[str, dict[str, int]]]  # kind of unit -> count -> culprit -> bound


def read_bounds(path: Path = FILE) -> Bounds:
    """The committed bounds."""
    bounds: Bounds = json.loads(path.read_text(encoding="utf-8"))
    return bounds


def write_bounds(counts: dict[str, Counts], path: Path = FILE) -> None:
    """Replace the bounds by these counts."""
    path.write_text(json.dumps(counts, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def rises(counts: dict[str, Counts], bounds: Bounds) -> list[str]:
    """One sentence for each count above its bound, with the culprits that rose; empty if there is none."""
    found = []
    for kind, of_kind in counts.items():
        for name, got in of_kind.items():
            bound = Counter(bounds.get(kind, {}).get(name, {}))
            rose = Counter({culprit: n - bound[culprit] for culprit, n in got.items() if n > bound[culprit]})
            limit = int(bound.total() * (1 + SLACK.get(name, 0.0)))
            if not rose or (name not in BY_NAME and got.total() <= limit):
                continue
            culprits = ", ".join(f"{one} {bound[one]} -> {got[one]}" for one, _ in rose.most_common(N_CULPRITS))
            found.append(f"{kind} unit, {name}: expected at most {limit}, got {got.total()}: {culprits}")
    return found


def falls(counts: dict[str, Counts], bounds: Bounds) -> list[str]:
    """The same for sums below their bounds, which may be lowered."""
    return [
        f"{kind} unit, {name}: {bound} -> {got.total()}"
        for kind, of_kind in counts.items()
        for name, got in of_kind.items()
        if got.total() < (bound := sum(bounds.get(kind, {}).get(name, {}).values())) and name not in SLACK
    ]
