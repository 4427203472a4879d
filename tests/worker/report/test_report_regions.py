"""The report of regions: compiled and eager runs start from equal state, and the slots are reset afterwards."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor

from models.errors import SettingsError
from tests.models.graphs.fake_captures import replay_on_cpu
from tests.worker.loop.engines import make_config, make_parts
from worker.assembly.parts import EngineParts
from worker.compile.compile_engine import CompileResult, compile_engine
from worker.compile.state import RegionState, TargetPhase, TargetState
from worker.config.compile import TARGETS, CompileConfig
from worker.config.session import EngineConfig
from worker.report import measures
from worker.report import region_report as region_module
from worker.report import start_report as start_module
from worker.report.compile_report import CompileReport, ReportError, Row
from worker.report.region_report import MEASURED, header, region_report
from worker.report.start_report import TargetWatch, compiled_report, start_report

NAMES = ("unit_step", "audio_unit", "begin")
SETTINGS = CompileConfig(enabled=True, targets=("llm.model", "apm"), dynamic=False)


@pytest.fixture(autouse=True)
def forgotten() -> None:
    torch._dynamo.reset()


def make(compile_config: CompileConfig = SETTINGS) -> tuple[EngineParts, EngineConfig]:
    config = make_config(2, compile=compile_config)
    return make_parts(config), config


def row_of(report: CompileReport, name: str) -> Row:
    return next(row for row in report.rows if row.name == name)


def slanted(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
    """A backend with an error that grows with the column, since a norm would remove a constant error."""

    def off(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        return value + torch.linspace(0, 0.01, value.shape[-1])

    return lambda *given: tuple(map(off, graph.forward(*given)))


def contents(parts: EngineParts) -> list[Tensor]:
    """All slot tensors of sessions, and the vocoder state that a session can read."""
    state, vocoder = parts.unit_steps.state, parts.vocoder
    held = [tensor[: state.n_slots].clone() for tensor in state.tensors()]
    tables = (vocoder.state.token_table, vocoder.state.mel_table, vocoder.state.dit_table)
    return held + [tensor.clone() for table in tables for tensor in (table.length, table.start)]


def test_compiled_regions_are_equal_and_compile_nothing_more():
    parts, config = make()
    empty = contents(parts)
    result = compile_engine(parts, config, backend="eager")
    report = region_report(parts, config, result, names=NAMES, runs=3)
    assert report.problems() == []
    step = row_of(report, "unit_step")
    assert (step.part, step.bucket) == ("llm.model, choose", {"batch": 2, "kv": 384})
    assert step.eager.n == step.compiled.n == 3 and step.captured is None
    assert step.equivalence.dtype == "float32" and step.equivalence.is_equal
    assert (step.determinism.eager, step.determinism.compiled) == ("yes", "yes")
    assert (step.n_late, step.recompiles, step.cuda_graphs) == (0, [], "not on this device")
    begin = row_of(report, "begin")
    assert begin.compiled is None and begin.equivalence is None, "expected no figures of what was not compiled"
    for before, after in zip(empty, contents(parts), strict=True):
        assert torch.equal(before, after), "expected slots as empty as before"


def test_every_region_runs_without_compiling():
    parts, config = make(CompileConfig())
    report = region_report(parts, config, runs=1)
    assert {row.name for row in report.rows} == set(MEASURED) and report.problems() == []
    assert all(row.compiled is None and row.determinism.eager == "yes" for row in report.rows)
    prefills = [row.bucket["rows"] for row in report.rows if row.name == "unit_prefill"]
    assert prefills == [16, 80], f"expected the smallest and the largest bucket, got {prefills}"


def test_a_difference_is_a_problem():
    parts, config = make()
    parts.unit_steps.regions.compile(["audio_unit"], by_layer=True, backend=slanted)
    parts.unit_steps.regions.warm_up(["audio_unit"])
    [row] = region_report(parts, config, names=["audio_unit"], runs=1).rows
    assert row.equivalence.max_abs > 1e-3 and "compiled is not equal to eager" in row.problems()


def test_a_difference_in_slot_contents_is_a_problem(monkeypatch: pytest.MonkeyPatch):
    """`begin` returns nothing and only writes to slots."""
    parts, config = make(CompileConfig(enabled=True, targets=("token2wav.flow",)))
    table = parts.vocoder.regions
    monkeypatch.setattr(region_module, "_is_compiled", lambda *_: True)
    [row] = region_report(parts, config, names=["begin"], runs=1).rows
    assert row.equivalence.is_equal, f"expected equal slots, got {row.equivalence}"

    begin = table.uncaptured

    def leaves_more(name: str, slots: Tensor, voices: Tensor) -> None:
        begin(name, slots, voices)
        parts.vocoder.state.prompt[slots] = 7

    monkeypatch.setattr(table, "uncaptured", leaves_more)
    [row] = region_report(parts, config, names=["begin"], runs=1).rows
    assert row.equivalence.n_unequal == 2, f"expected both slots to differ, got {row.equivalence}"


def test_regions_without_warm_up_compile_late():
    parts, config = make()
    parts.unit_steps.regions.compile(["audio_unit"], by_layer=True, backend="eager")
    [row] = region_report(parts, config, names=["audio_unit"], runs=1).rows
    assert row.n_late >= 1 and f"{row.n_late} graphs compiled after warm-up" in row.problems()


def test_a_captured_region_has_figures_of_its_graph(monkeypatch: pytest.MonkeyPatch):
    made = replay_on_cpu(monkeypatch)
    parts, config = make()
    result = compile_engine(parts, config, backend="eager")
    parts.unit_steps.regions.capture(["unit_step"])
    [row] = region_report(parts, config, result, names=["unit_step"], runs=2).rows
    assert row.cuda_graphs == "captured" and row.captured.n == 2 and row.compiled.n == 2
    assert made[0].n_replays > 2 and not row.problems()


def test_refuses_while_a_session_is_open():
    parts, config = make()
    with parts.unit_steps.lease(), pytest.raises(ReportError, match="expected no session, got 1 slots in use"):
        region_report(parts, config)
    with pytest.raises(SettingsError, match="region: expected one of"):
        region_report(parts, config, names=["nonsense"])


def test_start_report_has_no_measurements():
    parts, config = make()
    targets: dict[str, TargetState] = {}
    reported: list[str] = []
    with TargetWatch(targets, lambda what, done, total: reported.append(what)) as watch:
        result = compile_engine(parts, config, targets=targets, progress=watch.progress, backend="eager")
    assert reported, "expected progress to be forwarded"
    report = start_report(config, parts.model.device, result, watch.happened, cache="cold")
    assert report.problems() == [] and report.header.cache == "cold"
    llm, flow = row_of(report, "llm.model"), row_of(report, "token2wav.flow")
    assert llm.compile_s == result.targets["llm.model"].seconds and llm.n_graphs > 0 and llm.graph_breaks == []
    assert llm.eager is None and llm.equivalence is None and llm.n_late is None, (
        "expected nothing that was not measured"
    )
    n_guards = {name: len(row_of(report, name).recompiles) for name in ("llm.model", "apm")}
    assert min(n_guards.values()) > 0, f"expected each target's own recompiles, got {n_guards}"
    assert flow.cuda_graphs == "off" and flow.compile_s is None and flow.graph_breaks is None
    unwatched = start_report(config, parts.model.device, result)
    assert row_of(unwatched, "llm.model").graph_breaks is None


def test_start_report_has_graphs_on_a_gpu(monkeypatch: pytest.MonkeyPatch):
    """Sizes and cost of captured regions, and the reason for uncaptured ones. Neither is a problem."""
    parts, config = make(CompileConfig(enabled=True, targets=("vpm",)))
    result = compile_engine(parts, config, backend="eager")
    result.regions = {
        "vision": RegionState("vision", "see", 8, {"slices": [1, 2], "patches": [64]}, 1.5, 3_000_000, n_retried=1),
        "reset": RegionState("reset", reason="no unit calls it"),
    }
    monkeypatch.setattr(
        start_module, "header", lambda config, device, cache: header(config, torch.device("cpu"), cache)
    )
    report = start_report(config, torch.device("cuda"), result)
    vision, reset = row_of(report, "vision"), row_of(report, "reset")
    assert (vision.part, vision.bucket) == ("see", {"slices": "1/2", "patches": "64"})
    assert vision.cuda_graphs == "8 captured, 1 at second try" and vision.memory.compiled_bytes == 3_000_000
    assert reset.cuda_graphs == "no: no unit calls it" and report.problems() == []
    table = report.table()
    assert "slices=1/2 patches=64" in table and "  3.0  " in table, table
    on_cpu = start_report(config, torch.device("cpu"), result)
    assert [row.name for row in on_cpu.rows] == list(TARGETS), "expected no rows of graphs where there are none"


def test_a_target_that_fell_back_is_a_problem():
    def refuses(graph: Any, inputs: Any) -> Callable[..., Any]:
        raise RuntimeError("out of registers")

    parts, config = make(CompileConfig(enabled=True, targets=("apm",)))
    result = compile_engine(parts, config, backend=refuses)
    report = start_report(config, parts.model.device, result)
    [problem] = report.problems()
    assert problem.startswith("apm: failed: ") and "out of registers" in problem
    measured = region_report(parts, config, result, names=["audio_unit"], runs=1)
    assert measured.rows[0].compiled is None and measured.problems() == []


def test_missing_target_is_no_problem(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        start_module, "header", lambda config, device, cache: header(config, torch.device("cpu"), cache)
    )
    state = TargetState("llm.model", TargetPhase.KERNELS, n_captured=8)
    missing = TargetState("token2wav.flow", TargetPhase.OFF, error="the checkpoint does not have it")
    result = CompileResult({state.name: state, missing.name: missing})
    report = start_report(make_config(), torch.device("cuda"), result)
    assert report.problems() == []
    row = row_of(report, "llm.model")
    assert (row.part, row.cuda_graphs) == (None, "8 captured")


def test_reports_targets_and_regions_of_a_checkpoint(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(start_module, "build", make_parts)
    monkeypatch.setattr(start_module, "compile_engine", partial(compile_engine, backend="eager"))
    report = compiled_report(make_config(2, compile=SETTINGS), names=["unit_step"], runs=1)
    names = [row.name for row in report.rows]
    assert names == [*TARGETS, "unit_step"] and report.problems() == []
    assert CompileReport.from_json(report.to_json()) == report


def test_compares_nonempty_slots():
    """Each region returns nonzero values, or only writes to slots, which then have nonzero content."""
    parts, _ = make(CompileConfig())
    silent = set()
    for table, slots, region in region_module._chosen(parts, None):
        bucket = next(iter(region.buckets(table.shapes)))
        trial = region_module.Trial.of(table, slots, region, bucket, region.variants[0])
        outputs, slot_tensors = trial.observed(trial.eager)
        if not any(isinstance(leaf, Tensor) and bool(leaf.any()) for _, leaf in measures.leaves(outputs)):
            silent.add(region.name)
            assert any(bool(tensor.any()) for tensor in slot_tensors), f"{region.name}: expected nonzero slots"
    assert silent == {"audio_overlap", "llm_evict", "begin"}, f"expected those that return nothing, got {silent}"


@pytest.mark.parametrize(
    ("kind", "expected"), [("cpu", {"flow", "hift", "unit_step"}), ("cuda", {"flow", "hift", "unit_step"})]
)
def test_compiled_parts_depend_on_the_device(kind: str, expected: set[str]):
    parts, config = make(CompileConfig(enabled=True, targets=("llm.model", "token2wav.flow", "token2wav.hift")))
    names = ("flow", "hift", "unit_step", "begin", "llm_evict", "vision")
    regions = parts.unit_steps.regions.table | parts.vocoder.regions.table
    got = {name for name in names if region_module._is_compiled(regions[name], config, None, torch.device(kind))}
    assert got == expected, f"expected {expected}, got {got}"


def test_beside_kernels_the_log_mel_does_not_compile():
    parts, config = make(CompileConfig(enabled=True, targets=("apm",)))
    result = CompileResult({"apm": TargetState("apm", TargetPhase.KERNELS)})
    regions = parts.unit_steps.regions.table
    for phase, expected in ((TargetPhase.KERNELS, {"audio_unit"}), (TargetPhase.COMPILED, {"audio_unit", "mel_unit"})):
        result.targets["apm"].phase = phase
        names, device = ("audio_unit", "mel_unit"), torch.device("cuda")
        got = {name for name in names if region_module._is_compiled(regions[name], config, result, device)}
        assert got == expected, f"{phase}: expected {expected}, got {got}"
