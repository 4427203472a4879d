"""Compact file formats of golden data keep every bit."""

import hashlib
import json
import lzma
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tests.golden_copies import change, moved
from tests.parity import drawn as drawn_tensors
from tests.parity.checksum import allowed, checksum
from tests.parity.drawn import Drawn, box_muller, outputs_of
from tests.parity.golden import GoldenDir, completed, read_tensors
from tests.parity.packed import load_packed, save_packed
from tests.parity.report import Report

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)
LIMIT = 10_500_000  # bytes that all golden data may take


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


@st.composite
def tensors(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    """Arbitrary bits, including NaN, in tensors of any size and type, including empty ones."""
    held = {}
    for number in range(draw(st.integers(0, 4))):
        dtype, shape = draw(st.sampled_from(DTYPES)), draw(st.lists(st.integers(0, 5), max_size=3))
        rng = np.random.default_rng(draw(st.integers(0, 2**32)))
        raw = torch.tensor(rng.integers(0, 256, int(np.prod(shape)) * dtype.itemsize).tolist(), dtype=torch.uint8)
        raw = raw % 2 if dtype is torch.bool else raw
        held[f"t{number}"] = raw.view(dtype).view(shape)
    return held


@given(tensors(), st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=2))
def test_packing_keeps_every_bit(held, metadata):
    with tempfile.TemporaryDirectory() as folder:
        for name in ("a", "b"):
            save_packed(held, Path(folder) / f"{name}.packed", metadata)
        got, header = load_packed(Path(folder) / "a.packed")
        assert (Path(folder) / "a.packed").read_bytes() == (Path(folder) / "b.packed").read_bytes()
    assert header == metadata and got.keys() == held.keys()
    for name, tensor in held.items():
        assert (got[name].dtype, got[name].shape) == (tensor.dtype, tensor.shape)
        assert bits(got[name]) == bits(tensor), f"{name}: expected {tensor}, got {got[name]}"


DRAWN = Drawn(seed=7, spans=[(32, 20), (0, 16)], mean=0.5, std=0.25)


@given(st.integers(0, 2**32 - 1), st.lists(st.sampled_from([0, 0x7FC00001, 0x80000000, 0xFF800000]), max_size=9))
def test_drawn_tensors_keep_every_bit(seed, odd):
    """Values near the predicted ones, far from them, and any others."""
    rng = np.random.default_rng(seed)
    values = DRAWN.values(outputs_of(DRAWN.seed, DRAWN.end))
    values += rng.choice([0, 1e-7, 3e-6, 1], len(values)).astype(np.float32)
    values[: len(odd)] = np.array(odd, np.uint32).view(np.float32)
    held = {"far": torch.ones(3), "near": torch.from_numpy(values).view(4, 9)}
    with tempfile.TemporaryDirectory() as folder:
        save_packed(held, Path(folder) / "a.packed", drawn={"near": DRAWN})
        got, _ = load_packed(Path(folder) / "a.packed")
    assert list(got) == list(held) and all(bits(got[name]) == bits(tensor) for name, tensor in held.items())


def test_drawn_values_are_those_of_torch(tmp_path):
    torch.manual_seed(DRAWN.seed)
    expected = torch.empty(40).normal_(0.5, 0.25)
    whole = Drawn(DRAWN.seed, [(0, 24), (40, 16)], 0.5, 0.25)
    predicted = whole.values(outputs_of(whole.seed, whole.end))
    assert np.allclose(predicted, expected.numpy(), rtol=1e-6), f"expected {expected}, got {predicted}"
    torch.manual_seed(DRAWN.seed)
    held = {"t": torch.randn(300, 100)}
    save_packed(held, tmp_path / "t.packed", drawn={"t": Drawn(DRAWN.seed, [(0, 30_000)], 0.0, 1.0)})
    size = (tmp_path / "t.packed").stat().st_size
    assert size < 30_000 / 3, f"expected less than a third of a byte for each value, got {size} bytes"


def test_predictions_are_the_same_on_every_machine():
    values = box_muller(outputs_of(3, 1 << 16))
    expected = "3b3a28a4a2cc31154daa0c0748dea6f88f39e80266226dab1b5962211ee1284d"
    assert hashlib.sha256(values.tobytes()).hexdigest() == expected


def test_wrong_predictions_are_noticed(tmp_path, monkeypatch):
    held = {"t": torch.from_numpy(DRAWN.values(outputs_of(DRAWN.seed, DRAWN.end)))}
    save_packed(held, tmp_path / "t.packed", drawn={"t": DRAWN})
    monkeypatch.setattr(drawn_tensors, "BLOCK", 8)
    with pytest.raises(ValueError, match=r"t\.packed: expected drawn values with the digest"):
        load_packed(tmp_path / "t.packed")


def test_packing_reduces_the_size(tmp_path):
    torch.manual_seed(0)
    held = {"weights": torch.randn(300, 100), "zeros": torch.zeros(300, 100)}
    save_packed(held, tmp_path / "w.packed")
    save_file(held, tmp_path / "w.safetensors")
    packed, plain = ((tmp_path / f"w.{end}").stat().st_size for end in ("packed", "safetensors"))
    assert packed < 0.87 * plain / 2, f"expected what numbers of one scale take, {0.87 * plain / 2:.0f}, got {packed}"


def test_both_formats_load_equally(tmp_path):
    held, header = {"x": torch.arange(6.0).view(2, 3)}, {"config": '{"n": 1}'}
    save_packed(held, tmp_path / "small.packed", header)
    save_file(held, tmp_path / "plain.safetensors", metadata=header)
    (tmp_path / "small.json.xz").write_bytes(lzma.compress(b'{"a": [1]}'))
    (tmp_path / "plain.json").write_text('{"a": [1]}')
    golden = GoldenDir(tmp_path)
    assert golden.stems() == ["plain", "small"] and golden.stems("pl") == ["plain"]
    for stem in golden.stems():
        assert torch.equal(golden.tensors(stem)["x"], held["x"])
        assert golden.config(stem) == {"n": 1}
        assert golden.json(f"{stem}.json") == {"a": [1]}
    assert golden.tensors("none") == {} and golden.json("none.json") is None


def test_trimmed_tables_are_completed(tmp_path):
    kept = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    about = {"t": {"rows": 4, "kept": [3, 1], "fill": 9.0}}
    save_packed({"t": kept, "u": kept}, tmp_path / "f.packed", {"trimmed": json.dumps(about)})
    got = GoldenDir(tmp_path).tensors("f")
    assert got["t"].tolist() == [[9, 9], [3, 4], [9, 9], [1, 2]] and torch.equal(got["u"], kept)
    assert completed({"t": kept[:0]}, {"t": {"rows": 2, "kept": []}})["t"].tolist() == [[0, 0], [0, 0]]


def test_missing_weights_are_named(tmp_path):
    (tmp_path / "model").mkdir()
    for file in ("config.json", "trimmed.json"):
        (tmp_path / "model" / file).write_text('{"t": {"rows": 1, "kept": []}}')
    with pytest.raises(FileNotFoundError, match=r"expected model\.safetensors or model\.packed, got neither"):
        _ = GoldenDir(tmp_path).checkpoint
    shutil.copytree(tmp_path / "model", tmp_path / "other")
    with pytest.raises(FileNotFoundError, match=r"expected one folder with config\.json"):
        _ = GoldenDir(tmp_path).checkpoint


def test_packed_checkpoint_is_unpacked_into_a_copy(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "tokenizer.json.xz").write_bytes(lzma.compress(b"[1]"))
    save_packed({"w": torch.ones(2)}, tmp_path / "model" / "model.packed")
    golden = GoldenDir(tmp_path)
    assert {file.name for file in golden.checkpoint.iterdir()} == {"config.json", "tokenizer.json", "model.safetensors"}
    assert load_file(golden.checkpoint / "model.safetensors")["w"].tolist() == [1, 1]
    assert (golden.checkpoint / "tokenizer.json").read_text() == "[1]" and golden.kept_rows("w") == slice(None)


def test_changed_packed_checkpoint_is_unpacked_again(tmp_path, root):
    golden = root / "tests" / "golden"
    folder = change(golden, tmp_path / "golden", "llm", moved("greedy_ids", 1))
    before, after = (read_tensors(path, "llm")[0] for path in (golden, folder))
    assert [name for name in before if not torch.equal(before[name], after[name])] == ["greedy_ids"]
    assert not (folder / "llm.packed").exists() and (golden / "llm.packed").exists()
    assert not (folder / "duplex").exists(), "expected a copy of one set, got others with it"


def test_all_golden_data_stays_small(root):
    size = sum(path.lstat().st_size for path in (root / "tests" / "golden").rglob("*"))
    assert size < LIMIT, f"expected less than {LIMIT} bytes, got {size}"


def test_checksums():
    sums = checksum(torch.tensor([[1.0, -2.0], [3.0, 0.0]]))
    expected = [2.0, 6.0, 1 - 2 * np.cos(0.1) + 3 * np.cos(0.2)]
    assert np.allclose(sums, expected, atol=1e-12), f"expected {expected}, got {sums}"
    assert checksum(torch.zeros(0)) == [0, 0, 0]
    assert allowed([10.0, 20.0, -0.5]).tolist() == pytest.approx([0.02, 0.04, 0.002])
    assert allowed([0.0, 1e6, 0.0]).tolist() == pytest.approx([10.0, 2000.0, 10.0])
    report = Report()
    report.sums_if("case", "same", torch.ones(3), checksum(torch.ones(3)))
    report.sums_if("case", "other order", torch.tensor([1.0, 5.0]), checksum(torch.tensor([5.0, 1.0])))
    report.sums_if("case", "trimmed", torch.ones(3), None)
    assert [(check.name, check.ok) for check in report.checks] == [("same", True), ("other order", False)]
    assert "expected [6, 6, 5.995], got [6, 6, 5.97502]" in str(report), str(report)
