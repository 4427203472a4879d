"""Region errors: the calls they cover, and the errors of a plain engine in the served dtype."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.duplex import correctness
from benchmarks.duplex.bench_sessions import DecisionScript
from benchmarks.duplex.correctness import compare_regions
from benchmarks.duplex.engine import EngineSpec, RunningEngine, Weights, start
from benchmarks.duplex.region_errors import NarrowTwin, _ComparedRegions, compare_calls
from benchmarks.duplex.region_slots import SlotTensors
from benchmarks.duplex.tables import format_process
from benchmarks.duplex.verdicts import format_verdicts, verdicts

NARROW = torch.bfloat16
SPEC = EngineSpec(way="eager", slots=1, llm_len=768, steps=1, dtype="bfloat16", warms_up=False)


@pytest.fixture(scope="module")
def weights() -> Weights:
    return Weights.create(SPEC)


@pytest.fixture(scope="module")
def running(weights: Weights, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    torch.set_num_threads(1)
    running = start(SPEC, 0.0, tmp_path_factory.mktemp("cache"), observer=DecisionScript(2), weights=weights)
    with running.engine:
        yield running


@pytest.fixture
def copying(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Weights], None]], None]:
    """Decorator: change the weights that are copied in the served dtype."""

    def decorate(change: Callable[[Weights], None]) -> None:
        copied = Weights.copy_as

        def copy_and_change(self: Weights, dtype: torch.dtype) -> Weights:
            made = copied(self, dtype)
            if dtype == NARROW:
                change(made)
            return made

        monkeypatch.setattr(Weights, "copy_as", copy_and_change)

    return decorate


def tables_and_verdicts(
    found: dict[str, Any], settings: dict[str, Any] | None = None
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Regions by name, and the lines of all verdicts."""
    result = {"processes": {"correctness": found}, "command": ["x"], "environment": {"date": "d", "torch": "t"}}
    (tables,) = found["regions"].values()
    return {**tables["omni"], **tables["vocoder"]}, format_verdicts({**result, "settings": settings or {}})


def test_changed_weights_raise_only_the_narrow_twins_errors(
    running: RunningEngine, weights: Weights, copying: Any
) -> None:
    @copying
    def change(copied: Weights) -> None:
        copied.model.resampler.ln_post.weight.mul_(1.25)
        copied.flow.hift.conv_pre.weight.mul_(1.25)

    saved: list[dict[str, Any]] = []
    found = compare_regions(running, weights, 1, saved.append)
    by_name, verdict = tables_and_verdicts(found)
    assert found["narrow"] == {"dtype": "bfloat16", "error": ""} and saved[-1] == found
    assert not any(one["error"] or one["narrow_error"] for one in by_name.values())
    assert all(one["n_narrow"] == one["n"] for one in by_name.values())
    for name, one in by_name.items():
        if name in ("vision", "hift"):
            assert one["narrow_relative"] > 0.1 > 0.02 > one["both_relative"] > 1e-3, name
        else:
            assert one["narrow_relative"] == one["both_relative"], (
                f"{name}: expected equal errors of two eager engines in one dtype"
            )
        assert one["n_both"] == one["n_alike"] and one["both_relative"] == one["alike_relative"], name
    assert by_name["unit_step"]["narrow_relative"] > 1e-3, "expected the rounding error of the dtype"
    (line,) = (line for line in format_process("correctness", found) if line.startswith("vision"))
    columns = line.split()
    assert columns[5] == columns[7] == f"{by_name['vision']['both_relative']:.2e}"
    assert columns[6] == "1" and columns[8] == f"{by_name['vision']['narrow_relative']:.2e}"
    (line,) = (line for line in verdict if line.startswith("region vision"))
    assert "pass" in line and line.endswith(f"eager bfloat16 {columns[8]}, ours {columns[7]}, over 1 of 1 calls")


def test_served_regions_are_compared_without_the_narrow_twin(
    running: RunningEngine, weights: Weights, copying: Any
) -> None:
    @copying
    def fail(copied: Weights) -> None:
        raise MemoryError("expected 27.0 GB of free memory, got 3.0")

    found = compare_regions(running, weights, 1)
    by_name, verdict = tables_and_verdicts(found)
    assert all(one["n_alike"] and not one["error"] for name, one in by_name.items() if not name.startswith("speech"))
    assert not any(one["n_narrow"] for one in by_name.values()) and not found["regions_left_out"]
    (line,) = (line for line in format_process("correctness", found) if line.startswith("vision"))
    assert line.split()[6:9] == ["-"] * 3
    why = "no eager bfloat16 twin: MemoryError: expected 27.0 GB of free memory, got 3.0"
    assert why in format_process("correctness", found) and why in verdict
    assert any(line.startswith("region vision") and "pass" in line for line in verdict)


def test_narrow_twin_runs_in_the_first_half_of_the_time_limit(running: RunningEngine, weights: Weights) -> None:
    twin, narrow = (weights.copy_as(dtype).parts(SPEC, SPEC.engine_config()) for dtype in (torch.float32, NARROW))
    with compare_calls(running.parts, twin, 60.0, narrow):
        for table in (running.parts.unit_steps.regions, running.parts.vocoder.regions):
            assert math.isclose(table._until - table._narrow.until, 30.0, abs_tol=1.0)
            assert table._narrow.regions.root is not table._served.root


def test_calls_with_other_integers_do_not_count_as_alike() -> None:
    def table(ids: Any) -> Any:
        def call(name: str, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return ids(value), value + (0.5 if ids is int_of else 0)

        call.uncaptured = call
        return call

    def int_of(value: torch.Tensor) -> torch.Tensor:
        return value.long()

    served, twin = table(int_of), table(lambda value: value.long().clamp(max=5))
    region = _ComparedRegions(served, twin, SlotTensors([torch.zeros(2)]), SlotTensors([torch.zeros(2)]))
    region("step", torch.tensor([7.0]))
    region("step", torch.tensor([2.0]))
    errors = region.errors["step"]
    assert (errors.n, errors.n_alike, errors.integers) == (2, 1, 1)
    assert math.isclose(errors.alike_relative, 0.25) and errors.alike_largest == 0.5, (
        "expected only the call with the same ids"
    )


def test_twins_are_compared_over_calls_alike_in_both() -> None:
    """Each table adds an offset to its output and twice the offset to its slot, then zeroes its input."""

    def table(added: float, slot: Tensor, chooses: Callable[[float], int] = int, limit: float = 9.0) -> Any:
        def call(name: str, value: Tensor) -> tuple[Tensor, Tensor]:
            if float(value) > limit:
                raise RuntimeError("no such call")
            chosen, returned = chooses(float(value)), value + added
            slot.add_(value + 2 * added)
            value.zero_()
            return torch.tensor([chosen]), returned

        call.uncaptured = call
        return call

    own, other, third = torch.zeros(3, 1)
    served, twin = table(0.25, own, lambda value: int(value) % 4), table(0.0, other)
    narrow = NarrowTwin(table(0.5, third, lambda value: int(value) * (value != 3.0), limit=6.0), SlotTensors([third]))
    region = _ComparedRegions(served, twin, SlotTensors([own]), SlotTensors([other]), narrow=narrow)
    for value in (1.0, 2.0, 3.0, 5.0, 7.0):  # served differs at 5 and 7; the narrow twin differs at 3 and fails at 7
        region("step", torch.tensor([value]))
    errors = region.errors["step"]
    assert (errors.n, errors.n_alike, errors.n_narrow, errors.n_both) == (5, 3, 4, 2)
    assert (errors.alike_relative, errors.both_relative, errors.narrow_relative) == (0.5, 0.5, 1.0)
    assert not errors.error and "no such call" in errors.narrow_error
    region._narrow = NarrowTwin(narrow.regions, narrow.slots, until=0.0)
    region("step", torch.tensor([1.0]))
    region._narrow = NarrowTwin(narrow.regions, SlotTensors([third, third]))
    region("step", torch.tensor([1.0]))
    assert (errors.n_alike, errors.n_narrow) == (5, 4) and "zip" in errors.narrow_error and not errors.error

    alone = _ComparedRegions(table(0.25, own), twin, SlotTensors([own]), SlotTensors([other]))
    alone("step", torch.tensor([1.0]))
    assert alone.errors["step"].n_alike == 1 and alone.errors["step"].n_narrow == 0


def test_notes_contain_the_number_of_calls() -> None:
    def region(n_both: int, n_narrow: int = 4) -> dict[str, Any]:
        error = {"alike_relative": 0.0203, "both_relative": 0.0201, "narrow_relative": 0.0198, "error": ""}
        return {"n": 6, "n_alike": 5, "n_narrow": n_narrow, "n_both": n_both, **error}

    found = {"regions": {"4": {"omni": {"a": region(3), "b": region(0), "c": region(0, 0)}}}}
    found["narrow"] = {"dtype": "bfloat16", "error": ""}
    result = {"processes": {"correctness": found}, "command": ["x"], "environment": {"date": "d", "torch": "t"}}
    judged = {one["what"][7]: one for one in verdicts(result) if one["what"].startswith("region ")}
    assert {one["figure"] for one in judged.values()} == {0.0203} and not any(o["passes"] for o in judged.values())
    beside = {
        name: one["note"].removeprefix("1 of 6 calls chose otherwise, not judged; ") for name, one in judged.items()
    }
    assert beside["a"] == "eager bfloat16 1.98e-02, ours 2.01e-02, over 3 of 5 calls"
    assert beside["b"] == "eager bfloat16: no call alike in both" and beside["c"] == "eager bfloat16: not measured"


def test_memory_check_requires_half_a_twin_and_the_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = [torch.nn.Linear(1000, 1000, bias=False) for _ in range(3)]
    modules[0].device = torch.device("cuda")
    slots = SimpleNamespace(nbytes=lambda: 8_000_000)
    vocoder = SimpleNamespace(parts=SimpleNamespace(flow=modules[1], hift=modules[2]), n_bytes=4_000_000)
    twin = SimpleNamespace(model=modules[0], vocoder=vocoder, unit_steps=SimpleNamespace(state=slots))
    least = 12_000_000 + correctness.COMPARING_BYTES
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (least, 0))
    correctness._check_free_memory(twin)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (least - 1, 0))
    with pytest.raises(MemoryError, match=r"expected 10\.0 GB"):
        correctness._check_free_memory(twin)


def test_quantised_regions_are_judged_by_the_error_of_the_plain_ones(weights: Weights, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    spec = replace(SPEC, weights="int8")
    running = start(spec, 0.0, tmp_path, observer=DecisionScript(2), weights=Weights.create(spec))
    with running.engine:
        found = compare_regions(running, weights, 1)
    by_name, verdict = tables_and_verdicts(found, {"weights": "int8"})
    assert not any(one["error"] or one["narrow_error"] for one in by_name.values())
    one = by_name["vision"]
    assert one["both_relative"] > one["narrow_relative"] > 0, "expected int8 to add to the error of bfloat16"
    (line,) = (line for line in verdict if line.startswith("region vision: |d| in int8"))
    ratio = one["both_relative"] / one["narrow_relative"]
    assert f"{ratio:g} x" in line and "pass" in line, f"expected {ratio:g}, at most 4, got {line}"
    (line,) = (line for line in verdict if line.startswith("region hift: |d| in int8"))
    assert "1 x" in line, "expected the vocoder's weights unchanged"
