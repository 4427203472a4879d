"""`worker.plan`: memory equals that of a worker's modules and slots, and kinds of sessions are measured."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from models.checkpoint.config import load_config
from models.checkpoint.precision import PRESETS, Precision
from models.checkpoint.quantized import quantize
from models.errors import SettingsError
from models.kernels.bf12 import LEAST_ENTRIES, encode
from models.load import build_on_meta
from models.omni import OmniModel
from models.random_weights import random_model
from tests.worker.loop.engines import loaded, make_config, make_parts, make_prompt, make_sound, short_speech
from worker.assembly import parts as building
from worker.assembly.parts import slot_bytes
from worker.assembly.slot_memory import (
    CONTEXT_BYTES,
    FREE_SHARE,
    WORK_BYTES,
    WORK_SLOT_BYTES,
    decode_copy_bytes,
    has_room_for_copy,
    slots_in,
)
from worker.config.session import EngineConfig
from worker.config.weights import PartWeights
from worker.engine import Engine
from worker.plan.__main__ import gpu_bytes, main
from worker.plan.measure import KINDS, measure, time_lines
from worker.plan.memory import graphs_line, plan_memory
from worker.report.compile_report import CompileReport, Header, Memory, Row, write_report
from worker.start.starting import REPORT_FILE
from worker.start.warmup_session import WarmUpUnit

SECOND = WarmUpUnit(make_sound(0), b"")


def test_memory_is_that_of_the_modules_and_slots() -> None:
    config = make_config(kv_layout="slots").model_copy(update={"max_sessions": None, "dtype": "float32"})
    model, _, _, vocoder = loaded()
    plan = plan_memory(config, 2**30, by_kernels=False)
    tensors = [tensor for part in (model, vocoder.flow, vocoder.hift) for tensor in part.state_dict().values()]
    held = sum(tensor.nbytes for tensor in tensors)
    model_bytes = sum(tensor.nbytes for tensor in model.state_dict().values())
    assert sum(plan.weights.values()) == held, plan.weights
    assert plan.slot == slot_bytes(model, vocoder, config)
    total, slot = 8 * 10**9, sum(plan.slot.values())
    room = total - held - int(FREE_SHARE * total) - WORK_BYTES - slot
    assert plan_memory(config, total, by_kernels=False).n_slots == room // (slot + WORK_SLOT_BYTES) > 1
    quantised = plan_memory(
        config.model_copy(update={"part_weights": PartWeights(flow="int8")}), 2**30, by_kernels=False
    )
    flow = vocoder.flow.state_dict()
    kept = Precision(flow="int8").flow_kind_of
    saved = sum(one.nbytes - quantize(one).nbytes for name, one in flow.items() if kept(name, tuple(one.shape)))
    assert quantised.weights == {**plan.weights, "flow": plan.weights["flow"] - saved} and saved > 0
    config = config.model_copy(update={"token2wav_path": Path("nowhere")})
    plan, held = plan_memory(config, 2**30, by_kernels=False), model_bytes
    assert sum(plan.weights.values()) == held and "vocoder" not in plan.slot, plan
    by_kernels = plan_memory(config, 2**30)
    assert by_kernels.host > 0 and by_kernels.host == held - sum(by_kernels.weights.values())
    half = plan_memory(config.model_copy(update={"dtype": "bfloat16"}), 2**30)
    assert 2 * half.host == by_kernels.host and half.slot["hidden"] * 2 == plan.slot["hidden"]
    int8 = plan_memory(config.model_copy(update={"weights": "int8"}), 2**30, by_kernels=False)
    kinds = [
        (tensor, PRESETS["int8"].kind_of(name, tuple(tensor.shape))) for name, tensor in model.state_dict().items()
    ]
    saved = sum(tensor.nbytes - quantize(tensor, kind).nbytes for tensor, kind in kinds if kind is not None)
    assert sum(int8.weights.values()) == held - saved and saved > 0, int8.weights
    few = config.model_copy(update={"max_sessions": 3})
    assert plan_memory(few, 8 * 10**9).n_slots == 3
    work = CONTEXT_BYTES + held + WORK_SLOT_BYTES  # of a small model
    least = held + sum(plan.slot.values()) + work
    for total, expected in ((least, 1), (least - 1, 0)):
        fitting = plan_memory(few, total, by_kernels=False)
        assert (fitting.n_slots, fitting.fits, fitting.one_session) == (expected, False, least - held), fitting
    assert plan_memory(config, 1000).n_slots == 0


def test_plan_counts_the_copy_that_kernels_decode_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(make_config().model_path)
    wide = {"hidden_size": 256, "num_attention_heads": 256 // config.head_dim, "num_hidden_layers": 2}
    config = config.model_copy(update=wide)
    layers = [layer.weight for layer in random_model(config).llm.modules() if isinstance(layer, torch.nn.Linear)]
    copies = [copy for weight in layers if (copy := encode(weight.bfloat16())) is not None]
    held = sum(copy.nbytes - copy.exceptions[LEAST_ENTRIES:].nbytes for copy in copies)
    assert len(layers) > len(copies) > 0, "expected layers with and without whole groups of columns"
    monkeypatch.setattr("worker.plan.memory.load_config", lambda path: config)
    changes = {"decode_copy": True, "max_sessions": 2, "token2wav_path": tmp_path / "none"}
    engine = make_config().model_copy(update=changes)
    assert plan_memory(engine, 8 * 10**9).weights["decode copy"] == held
    assert "decode copy" not in plan_memory(engine, 8 * 10**9, by_kernels=False).weights
    int8 = engine.model_copy(update={"weights": "int8"})
    assert plan_memory(int8, 8 * 10**9).weights["decode copy"] == 0


@pytest.mark.parametrize(
    ("settings", "gigabytes", "expected"),
    [
        ({"max_sessions": 4}, 80, True),
        ({"max_sessions": 4}, 48, False),
        ({"max_sessions": 5}, 80, False),
        ({}, 141, False),
        ({"max_sessions": 1, "weights": "fp8"}, 80, False),
        ({"max_sessions": 1, "dtype": "float32"}, 80, False),
        ({"max_sessions": 1, "decode_copy": False}, 80, False),
        ({"max_sessions": 8, "decode_copy": True}, 24, True),
    ],
)
def test_copy_is_the_default_with_few_slots_on_large_gpus(settings: dict, gigabytes: int, expected: bool) -> None:
    config = EngineConfig.model_validate(settings)
    assert config.keeps_decode_copy(gigabytes * 10**9) is expected


def test_default_copy_leaves_room_for_the_slots(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU may have too little for it, because of other programs or of long contexts."""
    shutil.copy(root / "tests" / "data" / "released_config.json", tmp_path / "config.json")
    config = EngineConfig(model_path=tmp_path, max_sessions=4)
    copy = plan_memory(config, 80 << 30).weights["decode copy"]
    assert 11 * 10**9 < copy < 12 * 10**9
    model, slot = build_on_meta(load_config(tmp_path)), {"llm": 1_700_000_000, "tts": 20_000_000}
    assert decode_copy_bytes(model) == copy
    least = copy + WORK_BYTES + 5 * 1_720_000_000 + 4 * WORK_SLOT_BYTES
    assert has_room_for_copy(least, copy, slot, config) and not has_room_for_copy(least - 1, copy, slot, config)
    asked = config.model_copy(update={"decode_copy": True})
    assert has_room_for_copy(0, copy, slot, asked)
    long = config.model_copy(update={"llm_len": 40_000})
    assert "decode copy" in plan_memory(long, 80 << 30).weights
    assert "decode copy" not in plan_memory(long, 60 << 30).weights and plan_memory(long, 60 << 30).n_slots == 4
    # A worker on a GPU, all of whose memory but the given bytes is used.
    monkeypatch.setattr(OmniModel, "device", torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80 << 30))
    monkeypatch.setattr(building, "slot_bytes", lambda *_: slot)
    for free, expected in ((least, True), (least - 1, False)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, 80 << 30))
        assert building._keeps_decode_copy(model, None, config) is expected
        assert building._keeps_decode_copy(model, None, asked)


def test_slots_leave_a_share_of_the_gpu_free() -> None:
    """The sizes of the released model in bf16, with slots of 8192 rows, on GPUs of 24, 80 and 141 GB."""
    weights, slot = 17_600_000_000, 1_722_000_000
    for total, expected in ((25_757_220_864, 1), (85_024_112_640, 27), (150_754_820_096, 58)):
        n_slots = slots_in(total - weights, total, slot, weights)
        assert n_slots == expected, f"{total}: expected {expected} slots, got {n_slots}"
        left = total - weights - (n_slots + 1) * slot - WORK_BYTES - n_slots * WORK_SLOT_BYTES
        assert n_slots == 1 or left >= FREE_SHARE * total, f"{total}: {left} bytes are left"
    assert slots_in(10**12, 10**12, slot, weights) == 64
    assert slots_in(slot, 10**11, slot, weights) == 0, "expected no slot without room for activations"


@pytest.mark.parametrize(
    ("weights", "gpu_gb", "expected"),
    [("bf16", 24, 1), ("bf16", 20, 0), ("int4", 12, 1), ("int4", 11, 0), ("int4", 8, 0), ("int4", 7, 0)],
)
def test_one_slot_takes_the_share_that_others_leave_free(weights: str, gpu_gb: int, expected: int) -> None:
    """The released model with its vocoder, and the CUDA context of an idle GPU with 2 % less than on its label.

    In int4 on one H200 a worker with one session had 11.85 GB of the device in use.
    """
    weight_bytes, slot, context = {"bf16": 17_770_000_000, "int4": 5_970_000_000}[weights], 1_672_255_794, 5 * 10**8
    total = int(0.98 * gpu_gb * 2**30)
    free = max(0, total - context - weight_bytes)
    got = slots_in(free, total, slot, weight_bytes)
    assert got == expected, f"{gpu_gb} GB, {weights}: expected {expected} slots, got {got}"


def test_small_model_needs_less_work_than_a_large_one() -> None:
    assert slots_in(36 * 10**8, 4 << 30, 46 << 20, 40 << 20) == 1, "expected the embedded model on a GPU of 4 GB"
    assert slots_in(36 * 10**8, 4 << 30, 46 << 20, 16 << 30) == 0


@pytest.mark.parametrize("text", ["", "0GB", "many", "24MB", "-1"])
def test_refuses_a_size_that_is_none(text: str) -> None:
    with pytest.raises(SettingsError, match="--gpu: expected a size such as 24GB"):
        gpu_bytes(text)


def test_command_needs_no_weights(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert [gpu_bytes(text) for text in ("24GB", "24", "0.5 gib")] == [24 << 30, 24 << 30, 1 << 29]
    shutil.copy(root / "tests" / "data" / "released_config.json", tmp_path / "config.json")
    config = tmp_path / "settings.json"
    config.write_text(json.dumps({"model": {"device": "cpu"}}), encoding="utf-8")
    flags = ["--config", str(config), "--model-path", str(tmp_path)]
    assert main([*flags, "--gpu", "80GB"]) == 0
    text = capsys.readouterr().out
    n_paged = plan_memory(EngineConfig(model_path=tmp_path, kv_layout="pages"), 80 << 30).n_slots
    fit = f" {n_paged} sessions with default settings fit"
    for part in (": pages of a pool, 4612 rows", "llm ", "tts ", fit, "without a vocoder", "not measured"):
        assert part in text, f"expected {part!r}, got:\n{text}"
    assert main([*flags, "--gpu", "80GB", "--kv-layout", "slots"]) == 0
    text = capsys.readouterr().out
    n_slots = plan_memory(EngineConfig(model_path=tmp_path, kv_layout="slots"), 80 << 30).n_slots
    assert 20 < n_slots < n_paged < 64, f"slots {n_slots}, pages {n_paged}"
    for part in (": slots of 8192 rows", f" {n_slots} sessions of any kind fit"):
        assert part in text, f"expected {part!r}, got:\n{text}"
    assert main([*flags, "--gpu", "80GB", "--json"]) == 0
    got = json.loads(capsys.readouterr().out)
    assert (got["kv_layout"], got["n_slots"], got["total"]) == ("pages", n_paged, 80 << 30), got
    assert main(flags) == 2 and "expected --gpu SIZE or --measure" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "gigabytes", "by_kernels", "expected"),
    [
        ({}, 80, True, ("pages", 49)),
        ({"kv_layout": "slots"}, 80, True, ("slots", 30)),
        ({"weights": "fp8"}, 24, True, ("pages", 7)),
        ({"weights": "fp8", "kv_layout": "slots"}, 24, True, ("slots", 4)),
        ({}, 24, True, ("slots", 1)),
        ({"kv_layout": "pages"}, 24, True, ("pages", 1)),
        ({"max_sessions": 4}, 80, True, ("slots", 4)),
        ({"max_sessions": 5}, 80, True, ("pages", 5)),
        ({}, 80, False, ("slots", 29)),
        ({"dtype": "float32"}, 80, True, ("slots", 10)),
    ],
)
def test_layout_follows_from_the_sessions_that_fit(
    root: Path, tmp_path: Path, settings: dict, gigabytes: int, by_kernels: bool, expected: tuple[str, int]
) -> None:
    """The released model without a vocoder, on GPUs of 24 and 80 GB."""
    shutil.copy(root / "tests" / "data" / "released_config.json", tmp_path / "config.json")
    config = EngineConfig(model_path=tmp_path, **settings)
    plan = plan_memory(config, gigabytes << 30, by_kernels=by_kernels)
    assert (plan.kv_layout, plan.n_slots) == expected, f"expected {expected}, got {plan.kv_layout}, {plan.n_slots}"


def test_copy_that_is_asked_for_takes_room_before_the_layout_is_chosen(root: Path, tmp_path: Path) -> None:
    shutil.copy(root / "tests" / "data" / "released_config.json", tmp_path / "config.json")
    config = EngineConfig(model_path=tmp_path, llm_len=5000)
    for gigabytes, expected in ((36, ("pages", "slots")), (80, ("pages", "pages"))):
        asked = config.model_copy(update={"decode_copy": True})
        got = tuple(plan_memory(one, gigabytes << 30).kv_layout for one in (config, asked))
        assert got == expected, f"{gigabytes} GB: expected {expected} without and with a copy, got {got}"


def test_kinds_are_measured_and_sessions_closed() -> None:
    config = make_config(2)
    with short_speech(), Engine(make_parts(config), config) as engine:
        kinds = [kind for kind in KINDS if not kind.has_picture]
        costs = measure(engine, [SECOND], make_prompt(), kinds)
        assert engine.n_free() == 2
    assert [cost.kind for cost in costs] == kinds
    for cost in costs:
        assert cost.n == 2 and cost.lone_s > 0 and cost.together_s > 0 and 0 <= cost.most <= 2, cost
    lines = time_lines(costs)
    assert (
        len(lines) == 3
        and "at most one a slot" in lines[0]
        and "every unit speaks" in lines[1]
        and "2 at once" in lines[1]
    ), lines


def test_sessions_in_time_are_at_most_the_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units that take a tenth of the time: ten sessions would be in time if there were as many slots."""
    monkeypatch.setattr("worker.plan.measure._slowest", lambda sessions, units, kind: 0.09 * len(sessions))
    config = make_config(2)
    with Engine(make_parts(config), config) as engine:
        [cost] = measure(engine, [SECOND], make_prompt(), KINDS[-1:])
    assert cost.most == 2, f"expected as many sessions as slots, got {cost.most}"
    assert time_lines([cost])[1].endswith(": 2 sessions")


def test_graphs_are_those_of_the_last_start(tmp_path: Path) -> None:
    assert "not measured" in graphs_line(tmp_path)
    header = Header(what="tiny", date="2026-01-02", device="a GPU", python="3", torch="2")
    write_report(CompileReport(header=header, rows=[Row(name="vision")]), tmp_path / REPORT_FILE)
    assert "none were captured" in graphs_line(tmp_path)
    held = [Memory(kind="graph pool", compiled_bytes=n << 20) for n in (100, 156)]
    rows = [Row(name="vision", memory=held[0]), Row(name="unit_step", memory=held[1])]
    write_report(CompileReport(header=header, rows=rows), tmp_path / REPORT_FILE)
    assert graphs_line(tmp_path) == "  CUDA graphs: 0.25 GiB at the last start (tiny, a GPU, 2026-01-02)"
