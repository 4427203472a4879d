"""The model benchmark: results, counts, and full work in each timed call. No times are checked."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.model import __main__ as bench
from benchmarks.model.floors import RegionWork, floor, tensor_bytes, work_of
from benchmarks.model.occupied_slots import OccupiedSlots, is_possible
from benchmarks.model.settings import parse
from benchmarks.timing import Ceilings
from models.checkpoint.config import load_config
from models.inputs.audio import LogMel
from models.load import build_on_meta, load_model
from models.omni import OmniModel
from models.sampling.text import TokenSet, TokenSets
from models.stages.region_table import Regions, Shapes
from models.stages.state import SlotState
from worker.compile import targets as compile_targets

SHAPES = Shapes(
    batch=(2,),
    slices=(1,),
    patches=(16,),
    clip_frames=(40,),
    rows=(16,),
    kv=(64,),
    spoken=(24,),
    tokens=(24,),
    speech_kv=(64,),
)
FEW = ("--sizes", "batch=1", "clip_frames=40", "patches=16", "rows=4", "kv=64", "speech_kv=64")
WITH_SAMPLING = (
    "unit_prefill",
    "unit_step",
    "speech_begin",
    "speech_step",
)  # token choice or speech token draw, compiled beside a layer


def regions_of(model: OmniModel, *, n_slots: int, llm_len: int) -> Regions:
    state = SlotState.allocate(model, n_slots=n_slots, llm_len=llm_len, tts_len=512)
    sets = TokenSets.build([TokenSet()], model.config.vocab_size, model.device)
    log_mel = LogMel(model.device, model.config.audio_config.num_mel_bins)
    return Regions(model, state, log_mel, sets, SHAPES)


@pytest.fixture(scope="module")
def small(tiny: Path) -> Regions:
    return regions_of(load_model(tiny), n_slots=2, llm_len=128)


@pytest.fixture(scope="module")
def released(root: Path) -> Regions:
    """Released size as bfloat16, shapes only."""
    model = build_on_meta(load_config(root / "tests/data/released_config.json")).to(torch.bfloat16)
    return regions_of(model, n_slots=8, llm_len=4096)


def run(tiny: Path, folder: Path, *options: str) -> dict[str, Any]:
    file = folder / "out" / "result.json"
    bench.main(["--config", str(tiny), "--device", "cpu", "--repeats", "2", "--json", str(file), *options])
    return json.loads(file.read_text())


def test_eager_run_writes_all_results(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    got = run(tiny, tmp_path, "--modes", "eager", "--regions", "audio_unit,spoken_rows", "--batch", "1,2")
    keys = {"command", "environment", "settings", "ceilings", "rows", "compile_s", "graph_breaks", "left_out"}
    keys |= {"recompiles_after_warm_up", "peak_memory", "wall_s"}
    assert got.keys() == keys, f"expected {sorted(keys)}, got {sorted(got)}"
    assert {"date", "python", "torch", "triton", "cuda", "driver", "gpu", "cpu"} == got["environment"].keys()
    assert got["environment"]["torch"] == torch.__version__
    assert got["ceilings"]["copy_bytes_per_s"] > 0
    assert got["ceilings"]["matmul_flop_per_s"].keys() == {"float32", "float64"}
    assert got["settings"]["tf32"] is False
    assert (got["graph_breaks"], got["recompiles_after_warm_up"], got["left_out"]) == (0, 0, [])

    rows = [(row["region"], row["bucket"]["batch"]) for row in got["rows"]]
    assert rows == [("audio_unit", 1), ("audio_unit", 2), ("spoken_rows", 1), ("spoken_rows", 2)]
    for row in got["rows"]:
        assert row["modes"].keys() == {"eager"}
        timed = row["modes"]["eager"]
        assert timed["n"] == 2
        assert 0 < timed["p50_ms"] <= timed["p95_ms"]
        assert math.isclose(row["best_over_floor"], timed["p50_ms"] / row["floor_ms"])
        parts = row["bytes"]
        assert parts["total"] == parts["weights"] + parts["state"] + parts["io"]
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("audio_unit ") for line in lines) == 2, lines


def test_compiled_run_counts_graphs(tiny: Path, tmp_path: Path) -> None:
    options = ("--backend", "eager", "--modes", "eager,compiled", "--regions", "spoken_rows", "--batch", "1,2")
    got = run(tiny, tmp_path, *options)
    compiled = [row["modes"]["compiled"] for row in got["rows"]]
    assert [mode["graphs"] for mode in compiled] == [1, 1]
    assert [mode["recompiles"] for mode in compiled] == [0, 0]
    assert got["graph_breaks"] == 0
    assert got["compile_s"]["spoken_rows"]["compiled"] > 0


def test_runs_all_regions_by_default(tiny: Path, tmp_path: Path) -> None:
    got = run(tiny, tmp_path, "--modes", "eager", *FEW)
    assert {row["region"] for row in got["rows"]} == set(bench.ORDER)


def test_by_layer_applies_only_to_stacked_regions(tiny: Path, tmp_path: Path) -> None:
    chosen = "vision", "audio_unit", "unit_step", "speech_step", "mel_unit", "spoken_rows"
    got = run(tiny, tmp_path, "--backend", "eager", "--modes", "by_layer", "--regions", ",".join(chosen), *FEW)
    assert {row["region"] for row in got["rows"]} == {*chosen}
    assert {way for row in got["rows"] for way in row["modes"]} == {"by_layer", "compiled"}
    for row in got["rows"]:
        (way,) = row["modes"]
        assert way == ("by_layer" if row["region"] in bench.STACKED else "compiled"), row
        # One graph per stack's layer, and one for the sampling function.
        n_graphs = 2 if row["region"] in {*WITH_SAMPLING, "vision"} else 1
        assert row["modes"][way].get("graphs") == n_graphs, row


def test_graph_is_timed_with_and_without_the_launch(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Eager:
        """Replaces a captured graph without a GPU: same interface, eager execution."""

        def __init__(self, regions: Regions, name: str, bucket: dict[str, int]):
            tensors, static = regions.table[name].example(bucket)
            self.graph, self.replay = self, lambda: regions(name, *tensors, **static)
            self.outputs = self.replay()

        def __call__(self, *tensors: torch.Tensor) -> Any:
            return self.replay()

    monkeypatch.setattr(bench, "Captured", Eager)
    options = ["--config", str(tiny), "--device", "cpu", "--repeats", "2", "--batch", "2", "--regions", "speech_step"]
    settings = replace(parse(options), modes=("graph",))
    (row,) = bench.ModelBench(settings, options).run()["rows"]
    assert row["modes"].keys() == {"graph"}
    timed = row["modes"]["graph"]
    assert timed["over"] == "eager"
    assert min(timed["p50_ms"], timed["device_p50_ms"], timed["capture_s"]) > 0
    assert row["bytes"]["io"] == 2 * 8 + 2 * 8, "slots in, speech tokens out"
    assert f"{timed['p50_ms']:.3f}/{timed['p95_ms']:.3f}" in capsys.readouterr().out


@pytest.mark.gpu
def test_graph_on_the_device(tiny: Path, tmp_path: Path) -> None:
    options = ("--device", "cuda", "--modes", "eager,graph", "--regions", "unit_step,audio_unit,speech_step,mel_unit")
    got = run(tiny, tmp_path, *options)
    assert len(got["rows"]) == 8
    for row in got["rows"]:
        assert row["modes"].keys() == {"eager", "graph"}
        assert "error" not in row["modes"]["graph"], row["modes"]["graph"]["error"]
        assert row["modes"]["graph"]["device_p50_ms"] > 0
    assert got["peak_memory"]["allocated_bytes"] > 0


def test_failure_is_recorded_as_a_result(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Regions, name: str, *tensors: object, **static: object) -> None:
        raise RuntimeError("no room")

    monkeypatch.setattr(Regions, "__call__", fail)
    got = run(tiny, tmp_path, "--modes", "eager", "--regions", "vision")
    assert got["rows"][0]["modes"]["eager"]["error"] == "RuntimeError: no room"
    assert got["rows"][0]["best_over_floor"] is None


def test_spent_budget_lists_missing_rows(tiny: Path, tmp_path: Path) -> None:
    options = ("--modes", "eager,compiled", "--regions", "mel_unit,vision", "--batch", "1", "--budget-s", "0")
    got = run(tiny, tmp_path, *options)
    expected = [f"mel_unit batch=1 samples=16640 {mode}" for mode in ("eager", "compiled")]
    expected += [f"vision slices=1 patches=1088 {mode}" for mode in ("eager", "compiled")]
    assert got["left_out"] == expected
    assert got["rows"] == []


@pytest.mark.parametrize(
    "options",
    [
        ("--modes", "fast"),
        ("--modes", "graph"),
        ("--sizes", "width=3"),
        ("--config", "/nowhere"),
        ("--regions", "lung"),
        ("--repeats", "-1"),
    ],
)
def test_rejects_invalid_options(tiny: Path, options: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as stop:
        bench.main(["--config", str(tiny), "--device", "cpu", *options])
    assert stop.value.code not in (0, None)


def test_every_region_is_ordered_and_counted(small: Regions) -> None:
    assert set(bench.ORDER) == small.table.keys()
    for name, region in small.table.items():
        for bucket in region.buckets(SHAPES):
            work = work_of(small, name, bucket)
            assert work is not None, f"{name}: expected a count, got none"
            assert work.weights + work.state > 0, f"{name}: expected bytes, got none"


def test_regions_compiled_by_layer_are_timed_by_layer() -> None:
    assert set(compile_targets.STACKED) <= bench.STACKED
    assert not bench.STACKED & {*compile_targets.WHOLE, *compile_targets.EAGER}


def test_unit_step_at_released_size(released: Regions) -> None:
    matrices = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 12288  # q and o, k and v, gate, up and down
    layer = matrices + 2 * 4096 + 2 * 128
    head = 4096 * 151748
    cache_row = 36 * 2 * 8 * 128 * 2
    expected = RegionWork(
        weights=2 * (36 * layer + 4096 + head + 8 * 4096) + 2 * 151748,  # two masks of the one set of tokens
        state=8 * (2049 * cache_row + 8 * 4096 + 2 * 4096),  # cache, ids chosen before, the state for speech
        flops=8 * (2 * (36 * matrices + head) + 4 * 36 * 2048 * 4096),
    )
    assert expected.weights == 15_135_336_448 + 2 * 151748
    assert work_of(released, "unit_step", {"batch": 8, "kv": 2048}) == expected


def test_unit_prefill_runs_the_head_once_per_slot(released: Regions) -> None:
    one, two = (work_of(released, "unit_prefill", {"batch": 1, "rows": rows, "kv": 2048}) for rows in (1, 2))
    matrices = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 12288
    step = work_of(released, "unit_step", {"batch": 1, "kv": 2048})
    assert one + RegionWork(state=2 * 4096) == step, "a step also keeps the token's state"
    assert two.flops - one.flops == 36 * (2 * matrices + 4 * 2048 * 4096)
    assert two.weights - one.weights == 2 * 4096, "one more row of the embedding table"
    assert two.state - one.state == 36 * 2 * 8 * 128 * 2, "one more row of the cache"


def test_audio_overlap_work_equals_a_clip_of_ten_units(released: Regions) -> None:
    """The work of a 10 s clip, with four more columns a unit and without the projection."""
    clip = work_of(released, "clips", {"batch": 3, "frames": 1000})
    work = work_of(released, "audio_overlap", {"batch": 3})
    projector = 1024 * 4096 + 4096 * 4096
    convolved = 3 * (40 * 3 * 80 * 1024 + 20 * 3 * 1024 * 1024)
    assert work.flops - clip.flops == 2 * (convolved - 3 * 500 * projector)
    assert clip.weights - work.weights == 2 * (projector + 2 * 4096)
    assert work.state == 3 * (4 * 10 * 80 * 104 + 500 * 24 * 2 * 1024 * 2)


def test_spoken_rows_grow_with_the_tokens(released: Regions) -> None:
    half, whole = (work_of(released, "spoken_rows", {"batch": 3, "spoken": n}) for n in (12, 24))
    assert whole.state == 2 * half.state == 3 * 24 * 2 * 4096, "the states in the slots"
    assert whole.flops == 2 * half.flops > 0
    assert whole.weights - half.weights == 3 * 12 * 2 * 768, "rows of the embedding table"


def test_speech_step_at_released_size(released: Regions) -> None:
    matrices = 4 * 768 * 768 + 3 * 768 * 3072
    head = 6562 * 768
    expected = RegionWork(
        weights=2 * (20 * (matrices + 2 * 768) + 768 + head + 768),
        state=513 * 20 * 2 * 768 * 2,
        flops=2 * (20 * matrices + head) + 4 * 20 * 512 * 768,
    )
    assert work_of(released, "speech_step", {"batch": 1, "kv": 512}) == expected


def test_vision_at_released_size(released: Regions) -> None:
    matrices = 4 * 1152 * 1152 + 2 * 1152 * 4304
    layers = 27 * (2 * 1000 * matrices + 4 * 1000 * 1000 * 1152)
    patches = 2 * 1000 * 588 * 1152
    keys = 2 * 1000 * 1152 * 4096 + 2 * 2 * 1000 * 4096 * 4096
    queries = 3 * 2 * 64 * 4096 * 4096 + 4 * 64 * 1000 * 4096
    work = work_of(released, "vision", {"slices": 1, "patches": 1000})
    assert work.flops == layers + patches + keys + queries


def test_evict_reads_and_writes_the_slot_once(released: Regions) -> None:
    row = 36 * 2 * 8 * 128 * 2
    work = work_of(released, "llm_evict", {"batch": 3})
    assert work == RegionWork(state=3 * (2 * (4096 - 8) + 8) * row)


def test_floor_is_the_longer_of_copy_and_multiply() -> None:
    ceilings = Ceilings(copy=1000.0, matmul={"bfloat16": 100.0, "float64": 10.0})
    assert floor(RegionWork(weights=500, state=300, flops=50), 200, ceilings, "bfloat16").ms == 1000
    assert floor(RegionWork(weights=500, flops=50), 0, ceilings, "bfloat16").bound == "bytes"
    assert floor(RegionWork(weights=500, flops=70), 0, ceilings, "bfloat16").ms == 700
    in_float64 = floor(RegionWork(weights=500, flops=70, is_float64=True), 0, ceilings, "bfloat16")
    assert (in_float64.ms, in_float64.bound) == (7000, "flops")


def test_tensor_bytes_of_nested_outputs() -> None:
    one = torch.zeros(3, dtype=torch.int64)
    assert tensor_bytes((one, [one, None], 5)) == 48
    assert tensor_bytes(None) == 0


def test_calls_fill_their_bucket_and_restore_undoes_them(small: Regions) -> None:
    state = small.state
    for name, cache in (
        ("unit_step", state.llm),
        ("unit_prefill", state.llm),
        ("speech_step", state.speech.cache),
        ("speech_begin", state.speech.cache),
    ):
        (bucket,) = small.table[name].buckets(SHAPES)
        occupied = OccupiedSlots(small, name, bucket)
        before = [tensor.clone() for tensor in (cache.lengths, cache.positions, state.speech.speech_tokens)]
        small(name, *occupied.tensors, **occupied.static)
        assert cache.lengths[:2].tolist() == [bucket["kv"]] * 2, f"{name}: expected slots filled to the last row"
        occupied.restore()
        for was, now in zip(before, (cache.lengths, cache.positions, state.speech.speech_tokens), strict=True):
            assert torch.equal(was, now), f"{name}: expected {was}, got {now}"


def test_timed_calls_do_full_work(small: Regions) -> None:
    def outputs(name: str, bucket: dict[str, int]) -> Any:
        occupied = OccupiedSlots(small, name, bucket)
        return small(name, *occupied.tensors, **occupied.static)

    _, lo, hi = outputs("mel_unit", {"batch": 2, "samples": 16640})
    assert (lo.tolist(), hi.tolist()) == ([0, 0], [104, 104]), "expected a unit with context on both sides"
    rows, n_rows = outputs("audio_unit", {"batch": 2})
    assert n_rows.tolist() == [10, 10]
    assert rows.isfinite().all()
    for name, bucket in (("unit_step", {}), ("unit_prefill", {"rows": 16})):
        packed, _ = outputs(name, {"batch": 2, "kv": 64, **bucket})
        assert packed[1:].tolist() == [[0, 0], [1, 1]], f"{name}: expected a good token for each slot, got {packed}"
    outputs("audio_overlap", {"batch": 2})
    assert small.state.apm.lengths[:2].tolist() == [500, 500], "expected ten units encoded again"
    assert outputs("spoken_rows", {"batch": 2, "spoken": 24}).isfinite().all()
    assert small.state.hidden[:2].any(-1).all(), "expected states that wait to be spoken"
    outputs("speech_step", {"batch": 2, "kv": 64})
    assert not small.state.speech.done[:2].any(), "expected a call that goes on"


def test_rows_of_a_call_must_fit_the_attended_rows() -> None:
    assert is_possible("unit_prefill", {"batch": 1, "rows": 64, "kv": 64})
    assert not is_possible("unit_prefill", {"batch": 1, "rows": 65, "kv": 64})
    assert not is_possible("speech_begin", {"batch": 1, "tokens": 63, "kv": 64})
    assert is_possible("vision", {"slices": 1, "patches": 1088})
