"""Quantised matrices: the formula of each kind, views of packed matrices, and the kind of each weight."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from models.checkpoint.precision import PRESETS, Kind, Precision, chosen_precision, place_of
from models.checkpoint.quantized import KINDS, QuantizedMatrix, concatenated, quantize
from models.errors import CheckpointError, SettingsError


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def formula(matrix: QuantizedMatrix) -> Tensor:
    """The weight, number by number in Python's float, which is exact."""
    N, K = matrix.shape
    scale, values = matrix.scale.float().tolist(), matrix.values.float().tolist()
    if matrix.zeros is None:
        return torch.tensor([[values[n][k] * scale[n] for k in range(K)] for n in range(N)], dtype=torch.float64)
    zeros, half, group = matrix.zeros.tolist(), matrix.group // 2, matrix.group
    rows = []
    for n in range(N):
        row = []
        for k in range(K):
            byte = int(values[n][k // group * half + k % half])
            value = byte >> 4 if k % group >= half else byte & 15
            row.append((value - zeros[k // group][n]) * scale[k // group][n])
        rows.append(row)
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n_columns", [96, 256])
def test_weights_are_those_of_the_formula(kind: Kind, n_columns: int) -> None:
    tensor = drawn(9, n_columns) * 2.0 ** torch.arange(-4, 5)[:, None]
    tensor[3] = 0
    tensor[4, :50] = tensor[4, :50].abs()
    matrix = quantize(tensor, kind)
    assert matrix.kind == kind and matrix.shape == tensor.shape
    want = formula(matrix)
    assert torch.equal(matrix.dequantized(), want.float()), "expected the formula, rounded to float32 once"
    error = (want - tensor.double()).abs()
    if kind == "fp8":  # half the distance of numbers with three bits of mantissa, or of subnormal ones
        bound = torch.maximum(tensor.abs().double() * 2.0**-4, matrix.scale.double()[:, None] * 2.0**-10)
    elif kind == "int8":
        bound = matrix.scale.double()[:, None].expand_as(want) / 2
    else:
        bound = matrix.scale.double().T.repeat_interleave(matrix.group, 1) / 2
    worst = (error - bound * (1 + 1e-6)).max()
    assert worst <= 0, f"expected errors of at most half a step, got {worst:g} more"
    assert not want[3].any(), "expected a row of zeros to stay zero"


@pytest.mark.parametrize("kind", KINDS)
def test_packed_matrices_and_their_views(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [quantize(drawn(n, 64, seed=n), kind) for n in (3, 5)]
    together = concatenated(parts)
    for part, view in zip(parts, together.split([3, 5]), strict=True):
        assert torch.equal(view.dequantized(), part.dequantized())
        assert view.values.untyped_storage().data_ptr() == together.values.untyped_storage().data_ptr()
    # Rounding some rows at a time changes nothing.
    whole = drawn(7, 64)
    expected = quantize(whole, kind)
    monkeypatch.setattr("models.checkpoint.quantized._BLOCK", 130)
    for got, want in zip(quantize(whole, kind).tensors(), expected.tensors(), strict=True):
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


@pytest.mark.parametrize("kind", KINDS)
def test_no_intermediate_tensor_is_larger_than_a_block(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("models.checkpoint.quantized._BLOCK", 1024)
    sizes: list[int] = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and out.untyped_storage().data_ptr() != place:
                sizes.append(out.nbytes)
            return out

    tensor = drawn(256, 128)
    place = tensor.untyped_storage().data_ptr()
    with Sizes():
        matrix = quantize(tensor, kind)
    own = {one.nbytes for one in matrix.tensors()}
    others = [n for n in sizes if n not in own]
    assert others and max(others) <= 8 * 1024, f"expected at most 1024 numbers in float64, got {max(others)} bytes"


@pytest.mark.parametrize("kind", KINDS)
def test_values_that_are_not_finite_are_refused(kind: Kind) -> None:
    with pytest.raises(CheckpointError, match=f"to store as {kind}: expected finite values"):
        quantize(torch.full((2, 64), float("nan")), kind)


def test_presets_and_parts() -> None:
    layer, head, shape = "llm.model.layers.3.mlp.up_proj.weight", "llm.lm_head.weight", (64, 128)
    int4 = PRESETS["int4"]
    kinds = [int4.kind_of(name, shape) for name in (layer, head, "tts.model.layers.0.mlp.up_proj.weight")]
    assert kinds == ["int4", "int8", "int8"]
    assert int4.kind_of(layer, (64, 48)) == "int8", "expected int8 where no group divides the columns"
    for name, dims in (
        ("llm.model.embed_tokens.weight", shape),
        ("llm.model.layers.3.input_layernorm.weight", (128,)),
        ("apm.conv1.weight", (64, 80, 3)),
        ("resampler.kv_proj.weight", shape),
        (layer, (64, 24)),
    ):
        assert place_of(name, dims) is None, f"{name}: expected the model's dtype"
    assert str(PRESETS["fp8"]) == "llm int8 and fp8, tts bf16, vpm bf16, apm int8"
    assert chosen_precision("fp8", {"tts": "int8", "vpm": "int8"}) == replace(PRESETS["int8"], down="fp8")
    chosen = chosen_precision("int8", {"llm": "int4", "vpm": "bf16", "tts": None})
    assert chosen == Precision(llm="int4", head="int8", tts="int8", vpm=None, apm="int8")
    assert str(chosen) == "llm int4, tts int8, vpm bf16, apm int8" and str(PRESETS["int8"]) == "int8"


def test_parts_of_the_flow() -> None:
    chosen = chosen_precision("int8", {"flow": "fp8"})
    assert chosen == replace(PRESETS["int8"], flow="fp8") and str(chosen) == "int8, flow fp8"
    assert str(chosen_precision("bf16", {"flow": "int8"})) == "bf16, flow int8"
    assert all(preset.flow is None for preset in PRESETS.values())
    block, shape = "decoder.estimator.blocks.3.", (64, 128)
    for name in (
        f"{block}attn.to_q.weight",
        f"{block}mlp.fc2.weight",
        "encoder.up_encoders.0.self_attn.linear_q.weight",
    ):
        assert chosen.flow_kind_of(name, shape) == "fp8", name
        assert chosen.kind_of(name, shape) is None, "expected only weights of the flow"
    for name, dims in (
        (f"{block}adaLN_modulation.1.weight", shape),
        (f"{block}conv.block.1.weight", (64, 128, 3)),
        ("encoder.encoders.0.self_attn.linear_pos.weight", shape),
        ("decoder.estimator.in_proj.weight", shape),
        ("encoder_proj.weight", shape),
    ):
        assert chosen.flow_kind_of(name, dims) is None, f"{name}: expected the model's dtype"
    with pytest.raises(SettingsError, match=r"weights of the flow: expected bf16, fp8 or int8: .*, got int4"):
        chosen_precision("int8", {"flow": "int4"})
