"""The first differences between two traces of the same session, unit by unit and stage by stage."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from worker.trace.records import Record

# Stages in the order in which a unit is computed. Rows may differ by rounding on another kind of device.
ROWS = {"sound rows": "sound", "picture rows": "pictures", "hidden rows": "hidden"}
VALUES = {
    "decision": ("decision", "end_of_turn"),
    "text ids": ("ids",),
    "speech tokens": ("speech_tokens", "n_speech_tokens"),
}
STAGES = (*ROWS, *VALUES, "sound")
MAX_LEVEL_ERROR = 1e-3  # of the RMS of 10 ms


class Difference(NamedTuple):
    """One stage of one unit. unit: its number in the trace, from 1."""

    unit: int
    stage: str
    expected: Any
    got: Any

    @property
    def is_rounding(self) -> bool:
        """Whether the stage has rows only, which may differ on another kind of device."""
        return self.stage in ROWS

    def __str__(self) -> str:
        return f"unit {self.unit}, {self.stage}: expected {self.expected}, got {self.got}"


def differences(recorded: Sequence[Record], replayed: Sequence[Record]) -> list[Difference]:
    """All differences, in the order of units and stages. The arguments are outcomes of `Trace`."""
    found = [
        difference
        for number, (expected, got) in enumerate(zip(recorded, replayed, strict=False), 1)
        for difference in _of_unit(number, expected, got)
    ]
    if len(recorded) != len(replayed):
        number = min(len(recorded), len(replayed)) + 1
        found.append(Difference(number, "decision", f"{len(recorded)} units", f"{len(replayed)}"))
    return found


def first_of_each_stage(found: Sequence[Difference]) -> list[Difference]:
    """The first difference of each stage, in the order of stages."""
    by_stage = {stage: [one for one in found if one.stage == stage] for stage in STAGES}
    return [ones[0] for ones in by_stage.values() if ones]


def _of_unit(number: int, expected: Record, got: Record) -> Iterator[Difference]:
    if expected["kind"] != got["kind"] or "failure" in (expected["kind"], got["kind"]):
        shown = [one.get("error", one["kind"]) for one in (expected, got)]
        if shown[0] != shown[1]:
            yield Difference(number, "decision", *shown)
        return
    if expected["kind"] == "inserted":
        if expected["n_rows"] != got["n_rows"]:
            yield Difference(number, "text ids", f"{expected['n_rows']} inserted rows", got["n_rows"])
        return
    for stage, name in ROWS.items():
        if expected["rows"][name] != got["rows"][name]:
            shown = [one["top"] if name == "hidden" else one["rows"][name] for one in (expected, got)]
            yield Difference(number, stage, *shown)
    for stage, names in VALUES.items():
        if any(expected[name] != got[name] for name in names):
            yield Difference(number, stage, *([one[name] for name in names] for one in (expected, got)))
    if expected["samples"] != got["samples"] and (distance := _distance(expected, got)) > MAX_LEVEL_ERROR:
        yield Difference(number, "sound", f"levels within {MAX_LEVEL_ERROR}", f"off by {distance:.5f}")


def _distance(expected: Record, got: Record) -> float:
    """Largest difference of the levels; infinite for sounds of different length."""
    if expected["n_samples"] != got["n_samples"]:
        return float("inf")
    return max((abs(a - b) for a, b in zip(expected["levels"], got["levels"], strict=True)), default=0.0)
