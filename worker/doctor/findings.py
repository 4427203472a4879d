"""The doctor's findings (level, observation, remedy), as a table and as JSON.

Imports nothing that may be missing on a broken machine.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum

MIB, GIB = 1 << 20, 1 << 30


class Level(StrEnum):
    OK = "ok"
    NOTE = "note"  # a warning; the programs run
    PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
    """The result of one check. remedy: what to do; empty if nothing needs to be done."""

    name: str
    level: Level
    found: str
    remedy: str = ""


def ok(name: str, found: str) -> Finding:
    return Finding(name, Level.OK, found)


def note(name: str, found: str, remedy: str = "") -> Finding:
    return Finding(name, Level.NOTE, found, remedy)


def problem(name: str, found: str, remedy: str) -> Finding:
    return Finding(name, Level.PROBLEM, found, remedy)


def size(n_bytes: int) -> str:
    """A number of bytes for people: 1.5 GiB, 12.0 MiB."""
    return f"{n_bytes / GIB:.1f} GiB" if n_bytes >= GIB else f"{n_bytes / MIB:.1f} MiB"


def table(findings: Sequence[Finding]) -> str:
    """One line for each finding, its remedy below it, and a last line with the counts."""
    width = max((len(one.name) for one in findings), default=0)
    lines = []
    for one in findings:
        lines.append(f"{one.level:<7}  {one.name:<{width}}  {_indented(one.found, width)}")
        if one.remedy:
            lines.append(f"{'':<7}  {'':<{width}}  -> {_indented(one.remedy, width + 3)}")
    counts = ", ".join(f"{sum(one.level is level for one in findings)} {level}" for level in reversed(Level))
    return "\n".join([*lines, counts])


def as_json(findings: Sequence[Finding]) -> str:
    """A JSON object: `ok`, true without problems, and `findings`, a list of objects."""
    return json.dumps({"ok": is_healthy(findings), "findings": [asdict(one) for one in findings]}, indent=2)


def is_healthy(findings: Sequence[Finding]) -> bool:
    """Whether no finding is a problem."""
    return all(one.level is not Level.PROBLEM for one in findings)


def _indented(text: str, width: int) -> str:
    return f"\n{'':<{width + 11}}".join(text.splitlines())
