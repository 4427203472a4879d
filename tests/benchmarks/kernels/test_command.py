"""The kernel benchmark: every part runs, failures become rows, and the budget is kept."""

import json

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.kernels import __main__ as bench
from benchmarks.kernels import rows as kernels_rows
from benchmarks.kernels.timing import Case, Meter, gb_per_s, relative_error

TINY = ["--device", "cpu", "--tiny"]
cpu_only = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are built for the GPU")


@cpu_only
@pytest.mark.slow
def test_every_part_runs(tmp_path, capsys):
    file = tmp_path / "out.json"
    bench.main([*TINY, "--json", str(file)])
    result = json.loads(file.read_text())
    assert result["command"][3:] == [*TINY, "--json", str(file)] and result["left_out"] == []
    assert result["environment"]["triton"] and result["environment"]["torch"] == torch.__version__
    names = {part: {row["name"] for row in result["rows"] if row["part"] == part} for part in bench.PARTS}
    assert names == {
        "regions": {"unit_step", "speech_step", "speech_step, library", "flow", "hift", "flow, library"},
        "products": {"product", "all of tiny"},
        "precision": {"unit_step, int4"},
        "quantized": {"tiny", "tiny, gated"},
        "rows": {"add_rms_norm", "add_layer_norm", "qkv_rows", "silu_mul"},
        "codes": {"draw_codes"},
        "tokens": {"choose_tokens"},
        "attention": {"decode", "audio"},
    }
    for row in result["rows"]:
        assert row.get("error") is None, row
        assert row["figures"].get("error", 0.0) < 1e-6, row
        if (row["part"], row["name"]) == ("attention", "decode"):
            assert row["figures"]["pages_error"] < 1e-6, row
        assert row["figures"].get("same_codes", True) and row["figures"].get("same_tokens", True), row
        # Triton's interpreter is not timed.
        assert all(value is None for key, value in row["figures"].items() if key.endswith(("_us", "_ms", "per_s"))), row
    printed = capsys.readouterr().out
    assert all(f"\n{name} " in f"\n{printed}" for name in [*bench.PARTS, "draw_codes"])


def failing(meter: Meter):
    def fail():
        raise RuntimeError("no such\nkernel")

    yield Case("broken", {"rows": 1}, fail)
    yield Case("whole", {"rows": 2}, lambda: {"ours_us": 1.234, "error": 2e-3})
    raise OSError("no more memory")


def test_failure_becomes_a_row_and_other_rows_remain(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(kernels_rows, "row_cases", failing)
    file = tmp_path / "out.json"
    bench.main([*TINY, "--parts", "rows,codes", "--json", str(file)])
    rows = json.loads(file.read_text())["rows"]
    assert [(row["part"], row["name"], row.get("error")) for row in rows] == [
        ("rows", "broken", "RuntimeError: no such kernel"),
        ("rows", "whole", None),
        ("rows", "", "OSError: no more memory"),
        ("codes", "draw_codes", None),
    ]
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["broken", "rows=1", "failed:", "RuntimeError:", "no", "such", "kernel"]
    assert lines[2].split() == ["whole", "rows=2", "1.23", "-", "2.0e-03"]


def test_spent_budget_starts_no_further_row(tmp_path, capsys):
    file = tmp_path / "out.json"
    bench.main([*TINY, "--parts", "products,attention", "--budget-s", "-1", "--json", str(file)])
    result = json.loads(file.read_text())
    assert result["rows"] == [] and result["left_out"] == ["products", "attention"]
    assert "left out after -1 s: products; attention" in capsys.readouterr().out


@pytest.mark.parametrize(
    "options",
    [[*TINY, "--parts", "rows,unknown"], [*TINY, "--parts", ""], ["--device", "cpu"], ["--device", "cuda", "--tiny"]],
)
def test_rejects_invalid_options(options):
    with pytest.raises(SystemExit) as stopped:
        bench.parse(options)
    assert stopped.value.code == 2


def test_missing_gpu_is_a_usage_error(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        bench.parse([])
    assert "expected a GPU, got none; --device cpu --tiny" in capsys.readouterr().err


def test_rates_and_errors():
    assert gb_per_s(3_000_000, 2.0) == pytest.approx(1500.0) and gb_per_s(1, None) is None
    assert relative_error(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0])) == pytest.approx(0.1)
