"""AWQ and GPTQ folders: their values, scales and zeros arrive unchanged, and what does not fit is refused.

The packers here follow the published layouts, number by number.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.checkpoint.checksums import INDEX
from models.checkpoint.precision import PRESETS
from models.errors import CheckpointError
from models.layers.quantized import QuantizedLinear
from models.load import load_model

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the row whose value is at bits 0, 4, 8, ... of an int32
STEM = "llm.model.layers.1.mlp.up_proj"  # [192, 128]
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False, "sym": False}

NO_GROUP = "group_size: expected a number of columns with one scale, or -1 for all, got"


def words(values: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Eight neighbours of the last dim in an int32."""
    parts = values.long().unflatten(-1, (-1, 8))
    total = sum(parts[..., column] << 4 * bit for bit, column in enumerate(order))
    assert isinstance(total, Tensor)
    return torch.where(total >= 2**31, total - 2**32, total).to(torch.int32)


def drawn(n_rows: int, n_columns: int, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Values [N, K], zeros [groups, N], scales [groups, N]."""
    generator = torch.Generator().manual_seed(3)
    values = torch.randint(0, 16, (n_rows, n_columns), generator=generator)
    zeros = torch.randint(1, 16, (n_columns // group, n_rows), generator=generator)
    scales = torch.rand(n_columns // group, n_rows, generator=generator).half() / 16
    return values, zeros, scales


def weight_of(values: Tensor, zeros: Tensor, scales: Tensor, group: int) -> Tensor:
    """(value - zero) * scale [N, K] float32."""
    by_column = (one.T.float().repeat_interleave(group, 1) for one in (zeros, scales))
    zero, scale = by_column
    return (values.float() - zero) * scale


def stored(method: str, values: Tensor, zeros: Tensor, scales: Tensor, *, plus: int = 0) -> dict[str, Tensor]:
    if method == "awq":
        return {"qweight": words(values.T, AWQ_ORDER), "qzeros": words(zeros, AWQ_ORDER), "scales": scales}
    group = values.shape[1] // len(scales)
    order = torch.arange(values.shape[1], dtype=torch.int32) // group
    return {"qweight": words(values).T.contiguous(), "qzeros": words(zeros - plus), "scales": scales, "g_idx": order}


def folder_with(tiny: Path, folder: Path, declared: dict[str, Any], parts: dict[str, Tensor]) -> Path:
    """A copy of the tiny checkpoint whose matrix STEM is replaced; its scales are in another file."""
    shutil.copytree(tiny, folder, ignore=shutil.ignore_patterns("assets"))
    (folder / "config.json").chmod(0o644)
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": declared}
    (folder / "config.json").write_text(json.dumps(config))
    index = json.loads((folder / INDEX).read_text())
    files = sorted(set(index["weight_map"].values()))
    tensors = {file: load_file(folder / file) for file in files}
    for file in files:
        tensors[file].pop(f"{STEM}.weight", None)
    for suffix, tensor in parts.items():
        tensors[files[1] if suffix == "scales" else files[0]][f"{STEM}.{suffix}"] = tensor.contiguous()
    for file in files:
        (folder / file).unlink()
        save_file(tensors[file], folder / file)
    weight_map = {name: file for file in files for name in tensors[file]}
    (folder / INDEX).unlink()
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.mark.parametrize(
    ("declared", "plus"), [(AWQ, 0), (GPTQ, 1), ({**GPTQ, "checkpoint_format": "gptq_v2"}, 0)], ids=["awq", "v1", "v2"]
)
def test_numbers_arrive_unchanged(tiny: Path, tmp_path: Path, declared: dict[str, Any], plus: int) -> None:
    numbers = drawn(192, 128, 64)
    parts = stored(declared["quant_method"], *numbers, plus=plus)
    folder = folder_with(tiny, tmp_path / "folder", declared, parts)
    want = weight_of(*numbers, 64)
    layer = load_model(folder, precision=PRESETS["int4"]).get_submodule(STEM)
    assert isinstance(layer, QuantizedLinear) and layer.kind == "int4" and layer.weight.group == 64
    assert torch.equal(layer.weight.dequantized(), want), "expected the stored numbers, not rounded again"
    plain = load_model(folder, dtype=torch.bfloat16).get_submodule(STEM)
    assert torch.equal(plain.weight, want.bfloat16())


def test_one_group_of_all_columns_becomes_groups_of_128(tiny: Path, tmp_path: Path) -> None:
    numbers = drawn(192, 128, 128)
    folder = folder_with(tiny, tmp_path / "f", {**AWQ, "group_size": -1}, stored("awq", *numbers))
    layer = load_model(folder, precision=PRESETS["int4"]).get_submodule(STEM)
    assert torch.equal(layer.weight.dequantized(), weight_of(*numbers, 128))


@pytest.mark.parametrize(
    ("declared", "changes", "expected"),
    [
        ({**AWQ, "bits": 8}, {}, "quantization_config: expected awq or gptq with 4 bits, got awq with 8 bits"),
        ({**AWQ, "version": "gemv"}, {}, "quantization_config: expected version gemm, got gemv"),
        ({"quant_method": "fp8"}, {}, "expected awq or gptq with 4 bits, got fp8"),
        ({**GPTQ, "checkpoint_format": "marlin"}, {}, "expected checkpoint_format gptq or gptq_v2, got marlin"),
        (
            {**AWQ, "group_size": None},
            {},
            f"{NO_GROUP} None",
        ),
        (
            {**AWQ, "group_size": "64"},
            {},
            f"{NO_GROUP} '64'",
        ),
        (
            {**GPTQ, "group_size": 0},
            {},
            f"{NO_GROUP} 0",
        ),
        (AWQ, {"scales": None}, f"{STEM}.scales: expected F16 or BF16 or F32 [2, 192], got nothing"),
        (AWQ, {"qzeros": torch.zeros(3, 24).int()}, f"{STEM}.qzeros: expected I32 [2, 24], got I32 [3, 24]"),
        ({**AWQ, "group_size": 48}, {}, "groups of 32, 64 or a multiple of 128 that divide 128 columns, got 48"),
        (AWQ, {"scales": torch.full((2, 192), torch.nan).half()}, "expected finite scales"),
        (AWQ, {"qweight": torch.zeros(64, 24).int()}, f"{STEM}.weight: expected [192, 128], got [192, 64]"),
        (GPTQ, {"g_idx": torch.arange(128).int() % 2}, "g_idx: expected columns in their order, got another"),
    ],
)
def test_what_does_not_fit_is_refused(
    tiny: Path, tmp_path: Path, declared: dict[str, Any], changes: dict[str, Tensor | None], expected: str
) -> None:
    method = "gptq" if declared["quant_method"] == "gptq" else "awq"
    parts = stored(method, *drawn(192, 128, 64)) | changes
    folder = folder_with(tiny, tmp_path / "f", declared, {key: one for key, one in parts.items() if one is not None})
    with pytest.raises(CheckpointError) as caught:
        load_model(folder, precision=PRESETS["int4"])
    assert expected in str(caught.value), f"expected {expected}, got {caught.value}"
