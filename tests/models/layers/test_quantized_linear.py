"""Linear layers with quantised weights in PyTorch operations, and the CPU's int8 product."""

import weakref
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models import load
from models.checkpoint.precision import PRESETS, Kind
from models.checkpoint.quantized import KINDS, QuantizedMatrix, quantize
from models.layers.quantized import INT8_ENGINES, QuantizedLinear
from models.load import load_model


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_multiply_the_dequantised_weight(kind: Kind, dtype: torch.dtype) -> None:
    plain = nn.Linear(64, 40)
    layer = QuantizedLinear.of(plain, matrix := quantize(plain.weight.detach(), kind))
    layer.bias = nn.Parameter(plain.bias.detach().to(dtype), requires_grad=False)
    x = drawn(2, 3, 64).to(dtype)
    want = F.linear(x.double(), matrix.dequantized().double(), plain.bias.detach().to(dtype).double())
    got = [layer(x)]
    layer.derive("cpu", dtype)  # int8 changes to PyTorch's product, which rounds rows of x to 8 bits
    got.append(layer(x))
    assert (layer.values is None) is (kind == "int8")
    assert torch.equal(layer.weight.dequantized(), matrix.dequantized())
    for one, most in zip(got, (2e-6, 1e-2 if kind == "int8" else 2e-6), strict=True):
        assert one.dtype is dtype and one.shape == (2, 3, 40)
        error = ((one.double() - want).norm() / want.norm()).item()
        most = max(most, 6e-3) if dtype is torch.bfloat16 else most
        assert error < most, f"{kind}: expected a relative error below {most}, got {error:.3g}"


def test_rows_of_an_int8_product_do_not_depend_on_each_other() -> None:
    layer = QuantizedLinear(quantize(drawn(40, 64), "int8"))
    layer.derive("cpu", torch.float32)
    x = drawn(4, 64)
    want = layer(x[1:2])
    x[0], x[2], x[3] = 1e4, float("nan"), 0
    got = layer(x)
    assert torch.equal(got[1:2], want), "expected the same bits beside large, zero and not finite rows"
    assert got[2].isnan().all() and not got[3].any()
    assert layer(x[:0]).shape == (0, 40)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x[1:2]), want)


@pytest.mark.skipif(torch.backends.quantized.engine not in INT8_ENGINES, reason="no packed int8 products")
def test_int8_matrices_of_a_cpu_are_packed_one_by_one(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def quantize_and_count(tensor: Tensor, kind: Kind, name: str) -> QuantizedMatrix:
        alive.append(sum(one() is not None for one in made))
        matrix = quantize(tensor, kind, name)
        made.append(weakref.ref(matrix.values))
        return matrix

    monkeypatch.setattr(load, "quantize", quantize_and_count)
    load_model(tiny, precision=PRESETS["int8"])
    assert len(alive) > 10
    assert not any(alive), f"expected no unpacked matrix when the next one is made, got up to {max(alive)}"
