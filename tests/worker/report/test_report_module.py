"""Reports of arbitrary modules: they name known problems of torch.compile, and the process state does not change."""

import logging
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.callback import callback_handler
from torch._dynamo.utils import counters

from models.graphs.region_graphs import compile_counters
from tests.worker.report import compilable
from tests.worker.report.compilable import rows
from worker.report.compile_report import CompileReport, ReportError, Row
from worker.report.compile_watch import BREAKS, SKIPS
from worker.report.module_report import module_report


@pytest.fixture(autouse=True)
def forgotten() -> None:
    torch._dynamo.reset()


def report_on(module: nn.Module, inputs: Any = None, **options: Any) -> CompileReport:
    """A report without Inductor, whose kernels these tests do not need."""
    return module_report(
        module, rows(3, 5) if inputs is None else inputs, **{"backend": "aot_eager", "runs": 5, **options}
    )


def problems(row: Row) -> str:
    return "; ".join(row.problems())


def test_plain_module_has_no_problem():
    module, inputs = compilable.build_plain()
    report = report_on(module, inputs)
    assert report.problems() == []
    first, second = report.rows
    assert (first.name, first.bucket, second.bucket) == ("Plain", {"x": "2x8 float32"}, {"x": "3x8 float32"})
    assert (first.n_graphs, second.n_graphs) == (1, 1), "expected a graph for one size and one for any"
    [recompile] = second.recompiles
    assert "expected 2, actual 3" in recompile.guard and not recompile.after_warm_up
    for row in report.rows:
        assert row.eager.n == row.compiled.n == 5 and row.ratio > 0 and row.n_late == 0
        assert row.equivalence.is_equal and row.equivalence.dtype == "float32"
        assert (row.determinism.eager, row.determinism.compiled) == ("yes", "yes")
        assert row.cuda_graphs == "not on this device" and row.memory.kind == "resident growth"
    assert first.compile_s > 0 and report.header.torch == torch.__version__


def test_static_and_dynamic_sizes():
    module, inputs = compilable.build_plain()
    static, dynamic = (report_on(module, inputs, dynamic=dynamic) for dynamic in (False, True))
    assert [row.n_graphs for row in static.rows] == [1, 1], "expected a graph for each size"
    assert [row.n_graphs for row in dynamic.rows] == [1, 0], "expected one graph for all sizes"
    assert static.header.settings["dynamic"] is False


@pytest.mark.parametrize(
    ("kind", "reason", "line"),
    [
        (compilable.ReadsBack, "Tensor.item()", "x.sum().item()"),
        (compilable.Prints, "print", "printed by the module"),
        (compilable.PicksByValue, "output shape depends on input Tensor data", "x[x > 0]"),
        (compilable.PrintsInLoop, "print", "print(number)"),
    ],
)
def test_breaks_have_a_reason_and_a_line(kind: type[nn.Module], reason: str, line: str):
    report = report_on(kind(), rows(3))
    [row] = report.rows
    [found] = row.graph_breaks
    assert reason in found.reason, f"expected {reason!r}, got {found.reason!r}"
    file, _, number = found.where.rpartition(":")
    assert file == compilable.__file__
    with open(file) as lines:
        assert line in list(lines)[int(number) - 1], f"expected the line of {line!r}, got {found.where}"
    assert "graph breaks" in problems(row) and row.equivalence.is_equal
    assert found.where in report.table()


def test_reports_a_function_that_stays_eager():
    [row] = report_on(compilable.PrintsInLoop(), rows(3)).rows
    assert row.error.startswith("stays eager: forward (") and "print" in row.error


def test_a_cache_that_counts_in_a_list_compiles_at_each_length():
    with torch._dynamo.config.patch(recompile_limit=8):  # torch's default
        [row] = report_on(compilable.ListCache(), rows(3), runs=20).rows
    assert len(row.recompiles) == 7, f"expected recompiles up to the limit of 8 graphs, got {row.recompiles}"
    assert all("self.rows" in one.guard for one in row.recompiles), f"expected the list in all, got {row.recompiles}"
    assert [one.after_warm_up for one in row.recompiles].count(True) == row.n_late > 0
    assert "after warm-up" in problems(row) and "recompile limit" in row.error
    assert row.equivalence.is_equal, "expected equal numbers from equal states"


def test_state_and_inputs_start_equal_and_count_for_equality():
    inputs = [{"x": torch.randn(n, 4), "scale": {"by": torch.tensor(2.0)}} for n in (3, 5)]
    module = compilable.BufferCache()
    report = report_on(module, inputs)
    assert report.problems() == [], f"expected none, got {report.problems()}"
    assert module.n_rows == 0 and not module.mean.any(), "expected the caller's module untouched"
    assert report.rows[0].bucket == {"x": "3x4 float32", "scale['by']": "scalar float32"}

    class Forgets(compilable.BufferCache):
        def forward(self, x: Tensor, *, scale: dict[str, Tensor]) -> Tensor:
            if not torch.compiler.is_compiling():
                self.n_rows += 1
            return x * scale["by"]

    [row] = report_on(Forgets(), inputs[:1]).rows
    assert row.equivalence.n_unequal == 1, f"expected one buffer to differ, got {row.equivalence}"
    [row] = report_on(compilable.WritesInput(), rows(3)).rows
    assert not row.problems()


def test_unequal_outputs_are_a_problem():
    [row] = report_on(compilable.TellsWhenCompiled(), rows(3)).rows
    assert row.equivalence.max_abs == pytest.approx(0.01, rel=1e-3) and "not equal" in problems(row)


def test_distinguishes_seeded_and_unseeded_modules():
    [row] = report_on(compilable.Dropout(), rows(3)).rows
    assert (row.determinism.eager, row.determinism.compiled) == ("per seed", "per seed")
    assert "eager repeats per seed" in problems(row)
    [row] = report_on(compilable.Unsteady(), rows(3)).rows
    assert row.determinism.eager == "no"


def test_a_backend_that_fails_leaves_the_eager_figures():
    def refuses(graph: Any, inputs: Any) -> Callable[..., Any]:
        raise RuntimeError("out of registers")

    report = report_on(compilable.Prints(), backend=refuses)
    for row in report.rows:
        assert "out of registers" in row.error and row.eager is not None and row.compiled is None
        assert row.determinism.eager == "yes" and row.determinism.compiled is None
    assert len(report.problems()) >= 2 and "failed" in report.table()


def test_a_module_that_fails_by_itself():
    [row] = report_on(compilable.WrongShape(), rows(3)).rows
    assert row.error.startswith("eager: RuntimeError: linalg.inv") and row.eager is None


@pytest.mark.parametrize(
    ("inputs", "expected"), [([], "at least one set"), (torch.ones(1), "a tuple of inputs"), ([1], "a tuple of inputs")]
)
def test_inputs_of_another_form(inputs: Any, expected: str):
    with pytest.raises(ReportError, match=f"inputs: expected {expected}"):
        report_on(compilable.Plain(), inputs)


def test_refuses_settings_unknown_to_torch():
    with pytest.raises(ReportError, match="expected settings that it accepts, got"):
        report_on(compilable.Plain(), rows(3), backend="no such backend")


def traces() -> dict[str, Any]:
    """The process state that a report could change."""
    loggers = [logging.getLogger(name) for name in (*BREAKS, *SKIPS)]
    return {
        "logging": [(one.level, one.propagate, list(one.handlers)) for one in loggers],
        "counters": {key: dict(values) for key, values in counters.items() if values},
        "callbacks": list(callback_handler.end_callbacks),
        "config": torch._dynamo.config.get_config_copy(),
        "threads": torch.get_num_threads(),
        "draws": torch.get_rng_state().tolist(),
        "grad": torch.is_grad_enabled(),
    }


def test_restores_the_process():
    graphs: list[Any] = []

    def counting(graph: Any, inputs: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    module, [first, second] = compilable.build_plain()
    compiled = torch.compile(module, backend=counting, dynamic=False)
    compiled(*first)
    before, n_compiled = traces(), compile_counters()
    report = report_on(module, [first, second])
    again = report_on(module, [first, second])
    after = traces()
    for what, expected in before.items():
        assert after[what] == expected, f"{what}: expected {expected}, got {after[what]}"
    compiled(*first)
    assert len(graphs) == 1 and compile_counters() == n_compiled, "expected the caller's graph to be still there"
    counts = [[(row.n_graphs, row.recompiles and len(row.recompiles)) for row in one.rows] for one in (report, again)]
    assert counts[0] == counts[1], f"expected equal reports, got {counts}"


@pytest.mark.slow
def test_counts_cache_hits_of_inductor():
    shift = (time.time_ns() % 1_000_000_007) / 1e9  # kernels that are not in any cache

    class Shifts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(x * 3 + shift)

    cold, cached = (report_on(Shifts(), rows(4), backend="inductor").rows[0] for _ in range(2))
    assert (cold.hits, cold.misses) == (0, 1), f"expected a miss, got {cold.hits} hits, {cold.misses} misses"
    assert (cached.hits, cached.misses) == (1, 0), f"expected a hit, got {cached.hits} hits, {cached.misses} misses"
    assert cold.equivalence.is_equal and not cold.problems()
