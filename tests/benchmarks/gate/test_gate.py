"""What a unit of the embedded checkpoint does stays below the committed bounds, and a rise names its culprit."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks.gate import times
from benchmarks.gate.bounds import BY_NAME, falls, read_bounds, rises
from benchmarks.gate.counters import counted
from benchmarks.gate.times import ratios, read_ratios, slower, write_ratios
from benchmarks.gate.units import KINDS, N_WARM, UnitDriver, driven
from worker.loop.finish_stage import FinishStage

BOUNDS = read_bounds()
REMEDY = "if it is worth it, `python -m benchmarks.gate --write` raises the bounds"


@pytest.fixture(scope="module")
def driver() -> Iterator[UnitDriver]:
    with driven() as made:
        yield made


def test_no_unit_does_more_than_its_bounds(driver: UnitDriver) -> None:
    counts = {kind: counted(driver, kind) for kind in KINDS}
    found = rises(counts, BOUNDS)
    assert not found, "\n".join([*found, REMEDY])
    assert counts["speak"]["regions"]["speech_step"] and counts["speak"]["messages"]["PartialResult"], counts["speak"]
    for kind, of_kind in counts.items():
        assert of_kind.keys() == BOUNDS[kind].keys() and all(of_kind.values()), (
            f"{kind}: expected every count, {of_kind}"
        )


def test_a_read_by_the_host_is_found_with_its_place(driver: UnitDriver) -> None:
    close = FinishStage._close

    def slow_close(stage: FinishStage, *given: Any) -> None:
        torch.ones(3).sum().item()
        close(stage, *given)

    with mock.patch.object(FinishStage, "_close", slow_close):
        found = rises({"listen": counted(driver, "listen")}, BOUNDS)
    names = {line.partition(", ")[2].partition(":")[0] for line in found}
    assert names >= {"host_waits", "tensors"}, found
    assert all("worker/loop/batch_runner.py:guard" in line for line in found if ", host_waits" in line), found


@pytest.mark.parametrize("name", ["regions", "tensors"])
def test_a_count_that_moves_is_a_rise_only_where_names_count(name: str) -> None:
    bounds = {"listen": {name: {"old": 2, "same": 1}}}
    moved = {"listen": {name: Counter({"new": 2, "same": 1})}}
    expected = ["listen unit, regions: expected at most 3, got 3: new 0 -> 2"] if name in BY_NAME else []
    assert rises(moved, bounds) == expected and falls(moved, bounds) == []
    more = {"listen": {name: Counter({"new": 3, "same": 1})}}
    assert rises(more, bounds) == [f"listen unit, {name}: expected at most 3, got 4: new 0 -> 3"]
    assert falls({"listen": {name: Counter(same=1)}}, bounds) == [f"listen unit, {name}: 3 -> 1"]


def test_times_are_ratios_that_are_recorded_by_device(
    driver: UnitDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(times, "SESSION_UNITS", 1)
    before = driver.n_units
    found = ratios(driver, 2)  # in two sessions, whose first units are not timed
    assert driver.n_units - before == len(KINDS) * (2 + N_WARM), f"expected a second session, got {driver.n_units}"
    assert found.keys() == set(KINDS) and all(ratio > 0 for ratio in found.values()), found
    path = tmp_path / "times.json"
    assert read_ratios("a GPU", path) is None
    write_ratios("a GPU", {"listen": 2.0, "speak": 10.0}, path)
    write_ratios("another", {"listen": 1.0}, path)
    recorded = read_ratios("a GPU", path)
    assert recorded == {"listen": 2.0, "speak": 10.0}
    assert slower({"listen": 2.1, "speak": 9.0}, recorded) == []
    [line] = slower({"listen": 2.3, "speak": 9.0}, recorded)
    assert "listen unit: expected at most 2.20 times the frozen kernel, got 2.30" in line
