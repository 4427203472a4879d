"""The arithmetic of the turns benchmark: which turn answers which question, and how its wait is made up. Torch-free."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.turns.questions import KINDS, RATE

PARTS = ("alignment", "model", "vocoder", "transport")


@dataclass(frozen=True)
class Outcome:
    """What came of one question. Times in ms.

    Attributes:
        is_false_start: the model began to speak before the question had ended.
        wait: from the end of the question to the first sound; None for a false start and without an answer.
        parts: of `wait`, by name in `PARTS`.
        saved: silence of an early unit that did not have to be waited for.
        early: whether the first unit of the answer, or of the false start, was an early one.
        playback: delay with which a player of the answer has no gap; not part of `wait`.
    """

    is_false_start: bool
    kind: str
    wait: float | None = None
    parts: dict[str, float] = field(default_factory=dict)
    saved: float = 0.0
    early: bool = False
    playback: float = 0.0


def outcomes(run: dict[str, Any]) -> tuple[list[Outcome], int]:
    """One session's outcomes, and its turns that belong to no question. run: a `SessionRun` as JSON."""
    turns, found, n_used = run["turns"], [], 0
    for question in run["questions"]:
        own = [one for one in turns if question["begin"] < one["position"] <= question["until"]]
        n_used += len(own)
        found.append(_outcome(question, own))
    return found, len(turns) - n_used


def _outcome(question: dict[str, Any], turns: Sequence[dict[str, Any]]) -> Outcome:
    kind = str(question["kind"])
    if (false := next((one for one in turns if one["position"] <= question["end"]), None)) is not None:
        return Outcome(is_false_start=True, kind=kind, early=false["early"])
    first = next((one for one in turns if one["sound_at"] is not None), None)
    if first is None:
        return Outcome(is_false_start=False, kind=kind)
    end_ms = 1000 * question["end"] / RATE
    wait = first["sound_at"] - end_ms
    alignment = 1000 * first["position"] / RATE - end_ms
    model, vocoder = first["model"] or 0.0, first["vocoder"] or 0.0
    parts = dict(zip(PARTS, (alignment, model, vocoder, wait - alignment - model - vocoder), strict=True))
    return Outcome(False, kind, wait, parts, first["shift_ms"], first["early"], first["playback"])


def figures(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures of one row. runs: each a `SessionRun` as JSON. Shares are from 0 to 1; None without questions."""
    per_session = [outcomes(run) for run in runs]
    all_of = [one for found, _ in per_session for one in found]
    answered = [one for one in all_of if one.wait is not None]
    return {
        **_counts(all_of),
        "kinds": {kind: _counts(found) for kind in KINDS if (found := [one for one in all_of if one.kind == kind])},
        **{f"{name}_ms": percentiles([one.parts[name] for one in answered]) for name in PARTS},
        "playback_ms": percentiles([one.playback for one in answered]),
        "saved_ms": percentiles([one.saved for one in answered if one.early]),
        "early_rate": _share(sum(one.early for one in answered), len(answered)),
        "strays": sum(n for _, n in per_session),
        "units": sum(run["n_units"] for run in runs),
        "late_units": sum(run["n_late"] for run in runs),
        "errors": sorted({error for run in runs for error in run["errors"]})[:5],
        "late_sends_ms": percentiles([ms for run in runs for ms in run["late_sends_ms"]]),
    }


def _counts(found: Sequence[Outcome]) -> dict[str, Any]:
    """Waits and shares of some questions."""
    waits, false = [one.wait for one in found if one.wait is not None], [one for one in found if one.is_false_start]
    return {
        "questions": len(found),
        "answered": len(waits),
        "turn_ms": percentiles(waits),
        "false_starts": _share(len(false), len(found)),
        "false_starts_early": _share(sum(one.early for one in false), len(found)),
        "missed": _share(len(found) - len(waits) - len(false), len(found)),
    }


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """p50, p95 and the maximum; None without values."""
    if not values:
        return None
    p50, p95 = np.percentile(values, (50, 95))
    return {"p50": round(float(p50), 1), "p95": round(float(p95), 1), "max": round(float(max(values)), 1)}


def _share(n: int, of: int) -> float | None:
    return round(n / of, 4) if of else None


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The keys of the result's first level: of the fewest sessions with early units, or else of those without."""
    of = min(rows, key=lambda row: (row["early_unit"] != "auto", row["sessions"]), default=None)
    wait = None if of is None else of["turn_ms"]
    return {
        "turn_p50_ms": None if wait is None else wait["p50"],
        "turn_p95_ms": None if wait is None else wait["p95"],
        "false_starts": None if of is None else of["false_starts"],
        "missed": None if of is None else of["missed"],
        "early_rate": None if of is None else of["early_rate"],
    }
