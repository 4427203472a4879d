"""The strict loader: all problems in one error, other spellings of names, and `.pt` overrides."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.checkpoint import files as checkpoint
from models.checkpoint.config import load_config
from models.checkpoint.files import MAPPED_BYTES
from models.errors import CheckpointError
from models.load import expected_tensors, load_model
from models.omni import OmniModel
from models.random_weights import random_model

HEAD = "tts.head_code.0"
INDEX = "model.safetensors.index.json"

Write = Callable[..., Path]


@pytest.fixture(scope="module")
def weights(tiny: Path) -> dict[str, Tensor]:
    return {name: tensor for shard in sorted(tiny.glob("*.safetensors")) for name, tensor in load_file(shard).items()}


@pytest.fixture
def write(tiny: Path, tmp_path: Path) -> Write:
    """Writes tensors as a checkpoint folder with the tiny config (plus changes), in one file or in shards."""

    def write(tensors: dict[str, Tensor], *, shards: int = 1, **changes: object) -> Path:
        config = json.loads((tiny / "config.json").read_text()) | changes
        (tmp_path / "config.json").write_text(json.dumps(config))
        if shards == 1:
            save_file(tensors, tmp_path / "model.safetensors")
            return tmp_path
        names = sorted(tensors)
        weight_map = {}
        for i in range(shards):
            part = names[i::shards]
            save_file({name: tensors[name] for name in part}, tmp_path / f"part{i}.safetensors")
            weight_map |= dict.fromkeys(part, f"part{i}.safetensors")
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
        return tmp_path

    return write


def assert_same(model: OmniModel, expected: dict[str, Tensor]) -> None:
    got = model.state_dict()
    assert got.keys() == expected.keys()
    different = [name for name in expected if not torch.equal(got[name], expected[name])]
    assert not different, f"expected equal tensors, got differences in {different}"


def error_of(path: Path, **options: object) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_model(path, **options)
    return str(caught.value)


def test_loaded_model_is_complete_and_frozen(tiny: Path, weights: dict[str, Tensor]) -> None:
    model = load_model(tiny)
    assert_same(model, weights)
    assert not model.training
    tensors = [*model.named_parameters(), *model.named_buffers()]
    assert not [name for name, tensor in tensors if tensor.is_meta or tensor.requires_grad]
    assert {tensor.device.type for _, tensor in tensors} == {"cpu"}


def test_single_file_equals_shards(write: Write, weights: dict[str, Tensor]) -> None:
    assert_same(load_model(write(weights)), weights)


def test_many_shards_equal_single_file(write: Write, weights: dict[str, Tensor]) -> None:
    assert_same(load_model(write(weights, shards=5)), weights)


def test_weight_normed_head_is_folded(tiny: Path, weights: dict[str, Tensor]) -> None:
    g, v = (weights[f"{HEAD}.parametrizations.weight.original{i}"].double() for i in (0, 1))
    expected = g * v / v.norm(dim=1, keepdim=True)
    got = load_model(tiny).tts.head_code[0].weight.double()
    assert (got - expected).abs().max() < 1e-6, f"max diff {(got - expected).abs().max()}"


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
def test_weights_are_converted_to_the_dtype(
    write: Write, weights: dict[str, Tensor], stored: torch.dtype, wanted: torch.dtype
) -> None:
    path = write({name: tensor.to(stored) for name, tensor in weights.items()})
    model = load_model(path, dtype=wanted)
    types = {name: torch.float32 if "parametrizations" in name else wanted for name in weights}
    assert_same(model, {name: tensor.to(stored).to(types[name]) for name, tensor in weights.items()})
    assert {name: p.dtype for name, p in model.named_parameters()} == types
    assert model.tts.head_code[0].weight.dtype == wanted


def test_same_dtype_on_cpu_stays_mapped_to_its_file(tiny: Path) -> None:
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("needs /proc")
    model = load_model(tiny)
    address = model.tts.emb_code[0].weight.data_ptr()
    ranges = (line.split() for line in maps.read_text().splitlines())
    owners = [r[-1] for r in ranges if int(r[0].split("-")[0], 16) <= address < int(r[0].split("-")[1], 16)]
    assert owners[0].endswith(".safetensors"), f"expected a mapping of the shard, got {owners}"


def test_files_are_read_ahead_once(write: Write, weights: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every byte of each file is requested once, in order; systems without read-ahead are no error."""
    path, requested = write(weights, shards=2), []
    monkeypatch.setattr(checkpoint, "READ_AHEAD_BYTES", 1000)
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, start, size, advice: requested.append((start, size)))
    assert_same(load_model(path), weights)
    starts = [at for at, (start, _) in enumerate(requested) if start == 0]
    assert len(starts) == 2, f"expected two files, got {requested}"
    for first, last in zip(starts, [*starts[1:], len(requested)], strict=True):
        ends = [start + size for start, size in requested[first:last]]
        assert [start for start, _ in requested[first + 1 : last]] == ends[:-1], "expected no gap and no overlap"
    n_bytes = sum(tensor.nbytes for tensor in weights.values())
    assert sum(size for _, size in requested) == n_bytes + 2 * 1000
    monkeypatch.delattr(os, "posix_fadvise")
    assert_same(load_model(path), weights)


def test_refuses_a_folder_without_weights(tiny: Path, tmp_path: Path) -> None:
    shutil.copy(tiny / "config.json", tmp_path)
    message = error_of(tmp_path)
    assert str(tmp_path) in message
    assert "model.safetensors.index.json or model.safetensors" in message


def test_every_kind_of_difference_is_listed_at_once(write: Write, weights: dict[str, Tensor]) -> None:
    broken = dict(weights)
    del broken["apm.conv1.bias"], broken["resampler.query"]
    broken["llm.surplus.weight"] = torch.zeros(3)
    broken["vpm.post_layernorm.weight"] = torch.zeros(7)
    broken["llm.model.norm.weight"] = torch.zeros(128, dtype=torch.int8)
    message = error_of(write(broken, shards=2))
    assert "missing (2):" in message
    assert "apm.conv1.bias [64]" in message
    assert "resampler.query [64, 128]" in message
    assert "unexpected (1):\n  llm.surplus.weight [3] in part" in message
    assert "vpm.post_layernorm.weight: expected [32], got [7]" in message
    assert "llm.model.norm.weight: expected one of ['BF16', 'F16', 'F32', 'F64'], got I8" in message


def test_everything_missing_is_listed(write: Write, weights: dict[str, Tensor]) -> None:
    kept = {name: tensor for name, tensor in weights.items() if not name.startswith("apm.")}
    n_missing = len(weights) - len(kept)
    message = error_of(write(kept))
    assert f"missing ({n_missing}):" in message
    assert message.count("\n  apm.") == n_missing


@pytest.mark.parametrize("keep", [0, 4, 1000, -1])
def test_truncated_shard_is_named(write: Write, weights: dict[str, Tensor], keep: int) -> None:
    path = write(weights, shards=3)
    data = (path / "part1.safetensors").read_bytes()
    (path / "part1.safetensors").write_bytes(data[:keep])
    message = error_of(path)
    assert "files (1):\n  part1.safetensors: expected a complete safetensors file" in message
    assert "part0" not in message


def test_damaged_header_is_named(write: Write, weights: dict[str, Tensor]) -> None:
    path = write(weights)
    with (path / "model.safetensors").open("r+b") as file:
        file.write(b"\xff" * 64)
    assert "model.safetensors: expected a complete safetensors file" in error_of(path)


def test_missing_shard_is_named_among_other_problems(write: Write, weights: dict[str, Tensor]) -> None:
    path = write(weights | {"odd": torch.zeros(1)}, shards=3)
    shard = json.loads((path / INDEX).read_text())["weight_map"]["llm.lm_head.weight"]
    (path / shard).unlink()
    message = error_of(path)
    assert f"{shard}: expected a safetensors file, got no such file" in message
    assert "llm.lm_head.weight" in message
    assert ("odd [1]" in message) == (json.loads((path / INDEX).read_text())["weight_map"]["odd"] != shard)


def test_contradictions_of_index_and_shards_are_named(write: Write, weights: dict[str, Tensor]) -> None:
    path = write(weights, shards=2)
    index = json.loads((path / INDEX).read_text())
    other = {"part0.safetensors": "part1.safetensors", "part1.safetensors": "part0.safetensors"}
    moved, unlisted = "apm.conv1.bias", "apm.conv2.bias"
    index["weight_map"][moved] = other[index["weight_map"][moved]]
    del index["weight_map"][unlisted]
    (path / INDEX).write_text(json.dumps(index))
    message = error_of(path)
    assert f"expected {moved}, which the index lists, got none" in message
    assert f"expected {unlisted} of part" in message
    assert "got no entry" in message


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}'])
def test_unreadable_index_is_named(write: Write, weights: dict[str, Tensor], text: str) -> None:
    path = write(weights, shards=2)
    (path / INDEX).write_text(text)
    assert INDEX in error_of(path)


def test_refuses_shards_outside_the_folder(write: Write, weights: dict[str, Tensor]) -> None:
    path = write(weights, shards=2)
    index = json.loads((path / INDEX).read_text())
    index["weight_map"]["apm.conv1.bias"] = "../elsewhere.safetensors"
    (path / INDEX).write_text(json.dumps(index))
    assert "expected shard names without folders, got '../elsewhere.safetensors'" in error_of(path)


def test_old_weight_norm_names_are_renamed(write: Write, weights: dict[str, Tensor]) -> None:
    old = dict(weights)
    old[f"{HEAD}.weight_g"] = old.pop(f"{HEAD}.parametrizations.weight.original0")
    old[f"{HEAD}.weight_v"] = old.pop(f"{HEAD}.parametrizations.weight.original1")
    assert_same(load_model(write(old)), weights)


@pytest.mark.parametrize(
    "respell",
    [
        lambda name: f"module.{name}",
        lambda name: f"_orig_mod.{name}",
        lambda name: f"module._orig_mod.{name}",
        lambda name: name.replace("llm.model.", "llm.model._orig_mod."),
    ],
)
def test_wrapper_prefixes_are_removed(write: Write, weights: dict[str, Tensor], respell: Callable[[str], str]) -> None:
    assert_same(load_model(write({respell(name): tensor for name, tensor in weights.items()})), weights)


def test_refuses_one_weight_under_two_spellings(write: Write, weights: dict[str, Tensor]) -> None:
    doubled = weights | {"module.apm.conv1.bias": weights["apm.conv1.bias"] + 1}
    assert "stored twice (1):\n  apm.conv1.bias as" in error_of(write(doubled))


def test_dropped_vision_layer_is_ignored(write: Write, weights: dict[str, Tensor]) -> None:
    model = load_model(write(weights, drop_vision_last_layer=True))
    kept = {name: t for name, t in weights.items() if not name.startswith("vpm.encoder.layers.1.")}
    assert len(kept) < len(weights)
    assert_same(model, kept)


@pytest.mark.parametrize(
    ("switch", "prefixes"),
    [
        ("init_vision", ("vpm.", "resampler.")),
        ("init_audio", ("apm.", "audio_projection_layer.")),
        ("init_tts", ("tts.",)),
    ],
)
@pytest.mark.parametrize("stored", [True, False])
def test_parts_switched_off_are_not_loaded(
    write: Write, weights: dict[str, Tensor], switch: str, prefixes: tuple[str, ...], stored: bool
) -> None:
    kept = {name: tensor for name, tensor in weights.items() if not name.startswith(prefixes)}
    assert_same(load_model(write(weights if stored else kept, **{switch: False})), kept)


@pytest.mark.parametrize("wrapped", [True, False])
def test_pt_replaces_tensors_by_name(tiny: Path, tmp_path: Path, weights: dict[str, Tensor], wrapped: bool) -> None:
    name = "llm.model.norm.weight"
    extra = {f"module.{name}": torch.full((128,), 2.5, dtype=torch.float64)}
    torch.save({"state_dict": extra} if wrapped else extra, tmp_path / "extra.pt")
    model = load_model(tiny, pt_path=tmp_path / "extra.pt")
    assert_same(model, weights | {name: torch.full((128,), 2.5)})


def test_pt_supplies_tensors_missing_in_the_shards(write: Write, weights: dict[str, Tensor], tmp_path: Path) -> None:
    torch.save({"apm.conv1.bias": weights["apm.conv1.bias"]}, tmp_path / "extra.pt")
    path = write({name: tensor for name, tensor in weights.items() if name != "apm.conv1.bias"})
    assert_same(load_model(path, pt_path=tmp_path / "extra.pt"), weights)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ({"llm.model.norms.weight": torch.zeros(128)}, "llm.model.norms.weight [128]"),
        ({"llm.model.norm.weight": torch.zeros(5)}, "llm.model.norm.weight: expected [128], got [5]"),
        ({"llm.model.norm.weight": 3}, "llm.model.norm.weight: int"),
        ({"llm.model.norm.weight": torch.zeros(128, dtype=torch.int64)}, "torch.int64"),
        ([torch.zeros(3)], "list"),
    ],
)
def test_refuses_an_invalid_pt(tiny: Path, tmp_path: Path, content: object, named: str) -> None:
    torch.save(content, tmp_path / "extra.pt")
    message = error_of(tiny, pt_path=tmp_path / "extra.pt")
    assert "extra.pt" in message
    assert named in message


def test_damaged_or_missing_pt_is_named(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "extra.pt"
    assert "extra.pt" in error_of(tiny, pt_path=file)
    torch.save({"x": torch.zeros(1000)}, file)
    file.write_bytes(file.read_bytes()[:500])
    assert "extra.pt" in error_of(tiny, pt_path=file)


def test_code_in_a_pt_is_not_run(tiny: Path, tmp_path: Path) -> None:
    file, touched = tmp_path / "extra.pt", tmp_path / "touched"
    torch.save({"x": _Touch(touched)}, file)
    assert "extra.pt" in error_of(tiny, pt_path=file)
    assert not touched.exists()


class _Touch:
    def __init__(self, file: Path):
        self.file = file

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.file,)


def test_progress_is_shown_on_stderr_if_enabled(tiny: Path, capfd: pytest.CaptureFixture[str]) -> None:
    load_model(tiny)
    assert capfd.readouterr() == ("", "")
    load_model(tiny, progress=True)
    out, err = capfd.readouterr()
    assert out == ""
    assert "load tiny: 100%" in err


def test_expected_tensors_equal_the_checkpoint(tiny: Path, weights: dict[str, Tensor]) -> None:
    from models.checkpoint.config import load_config

    assert expected_tensors(load_config(tiny)) == {name: tuple(tensor.shape) for name, tensor in weights.items()}


@pytest.mark.gpu
def test_load_to_gpu(tiny: Path, weights: dict[str, Tensor]) -> None:
    model = load_model(tiny, device="cuda", dtype=torch.bfloat16)
    assert {t.device.type for t in [*model.parameters(), *model.buffers()]} == {"cuda"}
    assert torch.equal(model.state_dict()["apm.conv1.bias"].cpu(), weights["apm.conv1.bias"].bfloat16())


def test_a_file_is_mapped_in_spans(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = load_model(tiny).state_dict()
    opened: list[Path] = []

    def open_counted(file: Path, **given: Any) -> Any:
        opened.append(file)
        return safe_open(file, **given)

    monkeypatch.setattr(checkpoint, "safe_open", open_counted)
    monkeypatch.setattr(checkpoint, "MAPPED_BYTES", 300_000)
    read = dict(checkpoint.read_tensors(checkpoint.list_tensors(tiny)[0]))
    assert {one.name: data.shape for one, data in read.items()} == {name: one.shape for name, one in whole.items()}
    assert all(torch.equal(data, whole[one.name]) for one, data in read.items())
    assert len(opened) > 2 * len(set(opened)) + 2, f"expected each file to be opened for each span, got {opened}"


PEAK_OF_A_LOAD = """
import re, sys
import torch
from models.checkpoint.precision import Precision
from models.load import load_model

def bytes_of(name):
    return 1024 * int(re.search(name + r":\\s+(\\d+)", open("/proc/self/status").read())[1])

(torch.randn(64, 64) @ torch.randn(64, 64)).double().round()
before = bytes_of("VmRSS")
model = load_model(sys.argv[1], dtype=torch.bfloat16, precision=Precision(llm="int4", head="int4"))
print(bytes_of("VmHWM") - before, sum(one.nbytes for one in model.state_dict().values()))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_of_a_quantised_load_is_little_more_than_the_result(tiny: Path, tmp_path: Path) -> None:
    settings = json.loads((tiny / "config.json").read_text())
    settings |= {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 2}
    settings["tts_config"]["llm_dim"] = 1024
    (tmp_path / "config.json").write_text(json.dumps(settings))
    source = random_model(load_config(tmp_path), dtype=torch.bfloat16)
    save_file({name: one.contiguous() for name, one in source.state_dict().items()}, tmp_path / "model.safetensors")
    command = [sys.executable, "-W", "ignore", "-c", PEAK_OF_A_LOAD, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    peak, result = map(int, done.stdout.split())
    # What is mapped of the file at once, and the intermediate numbers of one block.
    most = 1.2 * result + MAPPED_BYTES + (32 << 20)
    assert peak < most, (
        f"expected at most {most / 1e6:.0f} MB for a result of {result / 1e6:.0f} MB, got {peak / 1e6:.0f}"
    )
