"""The vocoder benchmark: reported rows, and its lower bound against a manual count."""

import json
from types import SimpleNamespace

import pytest
import torch

from benchmarks.timing import Ceilings
from benchmarks.token2wav import __main__ as bench
from benchmarks.token2wav.work import ChunkWork, chunk_work, hift_flops
from models.layers.weights import on_meta
from models.token2wav.flow.flow import Flow
from models.token2wav.hift.hift import Hift
from models.token2wav.load.random_weights import random_parts
from models.token2wav.settings import DiTConfig, EncoderConfig, FlowConfig, HiftConfig
from models.token2wav.stream.region_table import VocoderParts


def test_run_reports_every_row(tmp_path, capsys):
    file = tmp_path / "out.json"
    bench.main(["--device", "cpu", "--steps", "2,1", "--batch", "1,2", "--repeats", "1", "--json", str(file)])
    result = json.loads(file.read_text())
    rows = {(row["batch"], row["n_steps"]): row for row in result["rows"]}
    assert set(rows) == {(1, 2), (1, 1), (2, 2), (2, 1)}
    for row in rows.values():
        assert row["flow_p50_ms"] > 0 and row["hift_p50_ms"] > 0 and 0 < row["p50_ms"] <= row["p95_ms"]
        assert (row["graph_breaks"], row["recompiles_after_warm_up"]) == (0, 0)
        assert 0 < row["floor_ms"] < row["p50_ms"]
    assert rows[1, 2]["floor_ms"] > rows[1, 1]["floor_ms"]
    assert rows[2, 2]["state_bytes"] > rows[1, 2]["state_bytes"]
    assert result["environment"]["torch"] == torch.__version__ and result["left_out"] == []
    assert len(capsys.readouterr().out.splitlines()) == 5


def test_bfloat16_sound_is_compared_with_float32(tmp_path):
    file = tmp_path / "out.json"
    options = ["--device", "cpu", "--precision", "float32,bfloat16", "--steps", "1", "--repeats", "1"]
    bench.main([*options, "--json", str(file)])
    difference = json.loads(file.read_text())["difference"]["bfloat16 1"]
    assert 0 < difference["log_mel_l1"] < 1 and -10 < difference["snr_db"] < 80


def test_quantised_weights_are_compared_with_those_of_the_precision(tmp_path):
    file = tmp_path / "out.json"
    options = ["--device", "cpu", "--weights", "bf16,int8,fp8", "--steps", "1", "--repeats", "1"]
    bench.main([*options, "--json", str(file)])
    result = json.loads(file.read_text())
    assert [row["precision"] for row in result["rows"]] == ["float32", "float32 int8", "float32 fp8"]
    sizes = [row["work"] for row in result["rows"]]
    assert sizes[1]["flops"] == sizes[0]["flops"] and sizes[2]["weights"] == sizes[1]["weights"] < sizes[0]["weights"]
    for kind in ("int8", "fp8"):
        difference = result["difference"][f"float32 {kind} 1"]
        assert difference["against"] == "float32" and 0 < difference["log_mel_l1"] < 1, difference


def test_spent_budget_starts_no_further_row(tmp_path):
    file = tmp_path / "out.json"
    bench.main(["--device", "cpu", "--steps", "1", "--budget-s", "0", "--json", str(file)])
    result = json.loads(file.read_text())
    assert result["rows"] == [] and result["left_out"] == ["float32 batch 1"]


def test_fused_kernels_disable_compilation(monkeypatch):
    done: dict[str, list[str]] = {}
    run = bench.VocoderBench(bench.parse(["--device", "cpu", "--steps", "1"]), [])
    run.options.modes = bench.MODES

    def vocoder(parts, batch, kernels):
        calls = done.setdefault(run.options.modes[len(done)], [kernels])
        regions = SimpleNamespace(
            uncompile=lambda: None,
            compile=lambda names, **options: calls.extend(f"compile {name}" for name in names),
            capture=lambda: calls.append("capture"),
        )
        return SimpleNamespace(regions=regions)

    monkeypatch.setattr(run, "_vocoder", vocoder)
    monkeypatch.setattr(run, "_row", lambda *row: None)
    run._batch("float32", None, 1, None)
    compiled = [f"compile {name}" for name in ("flow", "hift", "begin")]
    assert done == {
        "eager": ["plain"],
        "compiled": ["plain", *compiled],
        "fused": ["fused"],
        "compiled_graph": ["plain", *compiled, "capture"],
        "graph": ["fused", "capture"],
    }


@pytest.mark.parametrize(
    "options",
    [
        ["--modes", "quick"],
        ["--precision", "float8"],
        ["--weights", "int4"],
        ["--repeats", "0"],
        ["--device", "cpu", "--modes", "graph"],
    ],
)
def test_rejects_invalid_options(options):
    with pytest.raises(SystemExit) as stopped:
        bench.parse(options)
    assert stopped.value.code == 2


def test_floor_is_the_slower_of_copying_and_multiplying():
    ceilings = Ceilings(copy=1e12, matmul={"float32": 1e13})
    assert ChunkWork(weights=10**9, rows=10**9, flops=10**9).floor_ms(ceilings, "float32") == pytest.approx(2.0)
    assert ChunkWork(weights=10**9, rows=0, flops=10**11).floor_ms(ceilings, "float32") == pytest.approx(10.0)


def test_work_at_released_size():
    """Expected from the layer sizes: 166 GFLOP of the solver, 3 of the encoder, 35 per second of HiFT."""
    with on_meta():
        parts = VocoderParts(Flow(FlowConfig()), Hift(HiftConfig()))
    work = chunk_work(parts, 1, 10, 50, 400)
    hift = hift_flops(parts.hift, 58)
    assert hift == pytest.approx(35.5e9, rel=0.03)
    assert work.flops - hift == pytest.approx(169e9, rel=0.03)
    # Ten times the blocks without the layers that depend only on the time step, and the encoder once.
    blocks, encoder = 114.56e6 - 37.85e6, 35.2e6
    hift_bytes = 4 * sum(p.numel() for p in parts.hift.parameters())
    assert work.weights == pytest.approx(4 * (10 * blocks + encoder) + hift_bytes, rel=0.02)
    assert work.rows == 10 * 16 * 2 * 2 * 512 * 4 * (450 + 50)


def test_work_grows_with_the_batch_but_not_the_weights():
    flow = FlowConfig(
        encoder=EncoderConfig(width=16, heads=2, inner=32, n_layers=1, n_up_layers=1),
        estimator=DiTConfig(width=16, heads=1, head_dim=16, depth=1),
    )
    made = random_parts(flow, HiftConfig(base_channels=8, f0_channels=8))
    one, four = (chunk_work(VocoderParts(made.flow, made.hift), n, 2, 50, 100) for n in (1, 4))
    assert (four.weights, four.rows, four.flops) == (one.weights, 4 * one.rows, 4 * one.flops)
