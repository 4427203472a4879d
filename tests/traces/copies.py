"""Copies of recorded sessions with changed or missing fields, in memory and as folders."""

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.traces.folder import Trace

GOLDEN = Path(__file__).parents[1] / "golden" / "duplex"
# A short trace whose units have sound, pictures, both or neither.
VARIED = "mixed_modes"


def altered(value: Any) -> Any:
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, float):
        return value + max(1.0, 0.02 * abs(value))
    if isinstance(value, int):
        return value + 1
    return value + "x" if isinstance(value, str) else [*value, 7]


def with_field(trace: Trace, path: tuple, change: Callable[[Any], Any]) -> Trace:
    def changed(held: Any, path: tuple) -> Any:
        """A copy that shares everything beside the path with the original."""
        if not path:
            return change(held)
        copied = copy.copy(held)
        copied[path[0]] = changed(held[path[0]], path[1:])
        return copied

    return replace(trace, expected=changed(trace.expected, path))


def make_folder(path: Path, name: str = VARIED, **files: Any) -> Path:
    """Copy the committed folder with one trace. `files` replaces files of that trace; None removes one."""
    (path / name).mkdir(parents=True)
    for shared in ("tiny", "inputs"):
        (path / shared).symlink_to(GOLDEN / shared)
    for file in (GOLDEN / name).iterdir():
        stem = file.name.split(".")[0]
        if stem not in files:
            (path / name / file.name).symlink_to(file)
        elif isinstance(files[stem], str):
            (path / name / f"{stem}.json").write_text(files[stem])
        elif files[stem] is not None:
            (path / name / f"{stem}.json").write_text(json.dumps(files[stem]))
    return path


def given_with(**changes: Any) -> dict[str, Any]:
    """The inputs of a trace with changes in the first unit or before it."""
    given = json.loads((GOLDEN / VARIED / "input.json").read_text())
    unit = {key: changes.pop(key) for key in ("audio", "frames", "before", "max_slice_nums") if key in changes}
    given["units"][0].update(unit)
    return given | changes


def without_units() -> dict[str, Any]:
    given = given_with()
    del given["units"]
    return given
