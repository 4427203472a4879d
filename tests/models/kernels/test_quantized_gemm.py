"""Products with quantised weights against their formula in float64: tiles, splits, groups, gating, many rows."""

import pytest
import torch
from torch import Tensor

from models.checkpoint.precision import Kind
from models.checkpoint.quantized import KINDS, QuantizedMatrix, concatenated, quantize
from tests.models.compare import assert_same

pytest.importorskip("triton")

from models.kernels import quantized_gemm
from models.kernels.quantized_gemm import (
    ManyTiles,
    quantized_gated_linear,
    quantized_linear,
    quantized_parts,
    quantized_tiles,
)
from models.kernels.rows import silu_mul
from models.kernels.skinny_gemm import MAX_ROWS, TILE_SIZES, TileSizes

K = 256
CUTS = [TileSizes(32, 32), TileSizes(64, 64, splits=2)]
MANY = ManyTiles(32, 64, 32)
# Sums of 256 products in float32, in another order.
MAX_ERROR = 2e-6
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def exact(x: Tensor, weight: QuantizedMatrix) -> Tensor:
    """x times the weight by the formula, in float64, without the code under test."""
    values, scale = weight.values.double() if weight.zeros is None else None, weight.scale.double()
    if values is not None:
        return x.double() @ (values * scale[:, None]).T
    assert weight.zeros is not None
    columns = []
    half = weight.group // 2
    for column in range(weight.shape[1]):
        group, place = divmod(column, weight.group)
        byte = weight.values[:, group * half + place % half].int()
        value = (byte // 16 if place >= half else byte % 16).double()
        columns.append((value - weight.zeros[group].double()) * scale[group])
    return x.double() @ torch.stack(columns, 1).T


def check(got: Tensor, want: Tensor, most: float = MAX_ERROR) -> None:
    error = ((got.double() - want).norm() / want.norm()).item()
    assert error <= most, f"expected a relative error of at most {most}, got {error:.3g}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("plan", CUTS)
def test_few_rows(kind: Kind, plan: TileSizes, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = drawn(5, K), quantize(drawn(70, K, seed=1), kind)  # 70: the last tile is partly filled
    monkeypatch.setitem(TILE_SIZES, (70, K), plan)
    check(quantized_linear(x, weight), exact(x, weight))
    parts = quantized_parts(x, weight)
    assert parts.shape == (plan.splits, 5, 70)
    check(parts.double().sum(0), exact(x, weight))
    together = quantized_linear(x, weight)
    x[:2], x[3:] = float("nan"), float("inf")
    assert_same(quantized_linear(x, weight)[2:3], together[2:3], "a row beside others that are not finite")


@pytest.mark.parametrize("kind", KINDS)
def test_gated(kind: Kind) -> None:
    x, halves = drawn(3, K).half(), [quantize(drawn(70, K, seed=seed), kind) for seed in (1, 2)]
    product = torch.cat([exact(x, half) for half in halves], 1).half()
    got = quantized_gated_linear(x, concatenated(halves))
    check(got, silu_mul(product).double(), 2e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_many_rows_with_a_bias(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        quantized_gemm, "many_tiles", lambda M, w: MANY._replace(inner=MANY.inner if w.zeros is None else w.group // 2)
    )
    x, weight, bias = drawn(MAX_ROWS + 1, K), quantize(drawn(70, K, seed=1), kind), drawn(70, seed=2)
    got = quantized_linear(x, weight, bias)
    check(got, exact(x, weight) + bias)
    check(quantized_linear(x[:3], weight, bias), exact(x[:3], weight) + bias)


def test_groups_of_32_and_every_fp8_number() -> None:
    weight = quantize(drawn(40, 96, seed=3), "int4")
    assert weight.group == 32 and quantized_tiles(weight).columns == 16
    x = drawn(2, 96)
    check(quantized_linear(x, weight), exact(x, weight))
    # Both zeros, subnormal and all other finite numbers.
    numbers = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn)
    numbers = torch.where(numbers.float().isfinite(), numbers.float(), 0).to(torch.float8_e4m3fn)
    every = QuantizedMatrix(numbers.view(16, 16), torch.ones(16))
    assert_same(quantized_linear(torch.eye(16), every), numbers.float().view(16, 16).T + 0.0)


def test_no_rows_and_too_many() -> None:
    weight = quantize(drawn(32, 64), "int8")
    assert quantized_linear(drawn(0, 64), weight).shape == (0, 32)
    with pytest.raises(AssertionError, match=f"at most {MAX_ROWS}, got {MAX_ROWS + 1}"):
        quantized_gated_linear(drawn(MAX_ROWS + 1, 64), weight)
