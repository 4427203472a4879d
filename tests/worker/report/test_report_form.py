"""The compile report as JSON and as a table: dashes for missing measurements, and the names of problems."""

from pathlib import Path

import pytest

from worker.assembly.load_times import Loading
from worker.report.compile_report import (
    CompileReport,
    Determinism,
    Equivalence,
    GraphBreak,
    Header,
    Latency,
    Live,
    Memory,
    Recompile,
    ReportError,
    Row,
    write_report,
)

HEADER = Header(what="a model", date="2030-01-01T00:00:00+00:00", device="cpu", python="3.12", torch="2.13")
FULL = Row(
    name="unit_step",
    part="llm.model",
    bucket={"batch": 4, "kv": 512},
    graph_breaks=[GraphBreak(where="a.py:7", reason="print", count=3)],
    recompiles=[Recompile(function="forward", where="a.py:1", guard="len(x) == 1", seconds=0.5, after_warm_up=True)],
    n_late=1,
    cuda_graphs="skipped",
    skips=["mutated inputs"],
    n_graphs=2,
    compile_s=12.345,
    hits=5,
    misses=6,
    eager=Latency(p50_ms=4.0, p95_ms=5.0, p99_ms=6.0, n=10),
    compiled=Latency(p50_ms=2.0, p95_ms=2.5, p99_ms=3.0, n=10),
    captured=Latency(p50_ms=0.5, p95_ms=0.6, p99_ms=0.7, n=10),
    memory=Memory(kind="device peak", eager_bytes=3_000_000, compiled_bytes=2_000_000),
    equivalence=Equivalence(is_equal=False, dtype="float32", mae=0.25, max_abs=float("inf"), relative=0.5, n_unequal=9),
    determinism=Determinism(n=3, eager="yes", compiled="no"),
)


def line_of(report: CompileReport, start: str) -> str:
    [line] = [line for line in report.table().splitlines() if line.startswith(start)]
    return line


def test_json_round_trip(tmp_path: Path):
    report = CompileReport(header=HEADER, rows=[FULL, Row(name="empty")], live=Live(compiles=2, last=["one"]))
    path = tmp_path / "new folder" / "report.json"
    write_report(report, path)
    assert CompileReport.from_json(path.read_bytes()) == report
    assert '"max_abs": "Infinity"' in path.read_text(), "expected JSON that any reader takes"


def test_header_has_weights_and_memory():
    changed = {
        "loading": Loading(6_000_000_000, 2.5),
        "allocator": "native",
        "memory": {"allocated": 5, "free": 2_500_000_000},
    }
    report = CompileReport(header=HEADER.model_copy(update=changed), rows=[])
    assert line_of(report, "weights:") == "weights: 6 GB in 2.50 s, 2.4 GB/s"
    assert "free 2.50 GB" in line_of(report, "GPU memory:")
    assert CompileReport.from_json(report.to_json()) == report
    assert "weights" not in CompileReport(header=HEADER, rows=[]).table()


def test_ignores_keys_of_a_newer_worker():
    text = CompileReport(header=HEADER, rows=[]).to_json().replace('"rows"', '"added": {"later": 1},\n "rows"')
    assert CompileReport.from_json(text) == CompileReport(header=HEADER, rows=[])


@pytest.mark.parametrize("text", ["", "{}", '{"header": {}, "rows": []}', "[1]", "<html>"])
def test_refuses_documents_that_are_not_reports(text: str):
    with pytest.raises(ReportError, match="expected a compile report, got"):
        CompileReport.from_json(text)


def test_row_has_every_figure():
    line = line_of(CompileReport(header=HEADER, rows=[FULL]), "unit_step  ")
    expected = (
        *("unit_step", "llm.model", "batch=4", "kv=512", "4.000/5.000/6.000", "2.000/2.500/3.000"),
        *("0.500/0.600/0.700", "8.00", "3", "1", "1", "skipped", "12.35", "5/6", "3.0/2.0", "inf", "NO", "yes/no"),
    )
    assert tuple(line.split()) == expected


def test_unmeasured_row_has_dashes_and_no_problem():
    report = CompileReport(header=HEADER, rows=[Row(name="alone")])
    figures = line_of(report, "alone").split()[1:]
    assert set("".join(figures)) == {"-", "/"}, f"expected dashes, got {figures}"
    assert report.problems() == [] and "no problems" in report.table()


def test_notes_have_reasons():
    table = CompileReport(header=HEADER, rows=[FULL]).table()
    for expected in (
        "graph break at a.py:7, 3 times: print",
        "recompiled forward after warm-up (a.py:1): len(x) == 1",
        "CUDA graphs skipped: mutated inputs",
        "not equal to eager: mae 0.25, max inf, relative 0.5; 9 exact values differ",
    ):
        assert f"unit_step (batch=4, kv=512): {expected}" in table, f"expected {expected!r} in\n{table}"


def test_problems_are_named_one_by_one():
    problems = [problem.partition(": ")[2] for problem in CompileReport(header=HEADER, rows=[FULL]).problems()]
    assert problems == [
        "3 graph breaks",
        "1 graphs compiled after warm-up",
        "CUDA graphs skipped",
        "compiled is not equal to eager",
        "runs differ: compiled repeats no",
    ]
    live = CompileReport(header=HEADER, rows=[], live=Live(recompiles=2, hits=5))
    assert live.problems() == ["2 recompiles since warm-up"]
    failed = CompileReport(header=HEADER, rows=[Row(name="a", error="no room")])
    assert failed.problems() == ["a: failed: no room"] and "failed" in line_of(failed, "a  ")


def test_recompile_during_warm_up_is_no_problem():
    row = Row(name="a", recompiles=[Recompile(function="f", where="a.py:1", guard="size")], n_late=0)
    report = CompileReport(header=HEADER, rows=[row])
    assert "recompiled f (a.py:1): size" in report.table() and not report.problems()


@pytest.mark.parametrize(
    ("samples", "expected"),
    [([7.0], (7.0, 7.0, 7.0)), (list(range(101)), (50.0, 95.0, 99.0)), ([5.0, 1.0, 3.0], (3.0, 4.8, 4.96))],
)
def test_percentiles_in_any_order(samples: list[float], expected: tuple[float, ...]):
    latency = Latency.of(samples)
    assert (latency.p50_ms, latency.p95_ms, latency.p99_ms) == pytest.approx(expected)
    assert latency.n == len(samples)
