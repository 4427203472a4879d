"""Skinny GEMM against `F.linear`: tiles, splits, epilogues, independence of rows.

Where equal bits are expected, values are small whole numbers: sums of their products are exact in any order.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.models.compare import assert_close, assert_same
from tests.models.kernels.interpreter import chained_dot

pytest.importorskip("triton")

from models.kernels import launch, skinny_gemm
from models.kernels.rows import add_rms_norm, silu_mul
from models.kernels.skinny_gemm import (
    MAX_ROWS,
    TILE_SIZES,
    TileSizes,
    skinny_gated_linear,
    skinny_linear,
    skinny_parts,
    tile_sizes,
)

DTYPES = [torch.float32, torch.float16]
K = 192
CUTS = [TileSizes(32, 32), TileSizes(32, 64, splits=3), TileSizes(64, 32, splits=2)]
GATED = ((24576, 4096), (6144, 768), (6144, 1024))
gpu = pytest.mark.gpu
cpu_only = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are built for the GPU")
# Warnings of the interpreter for values beyond the range of a dtype.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")


def whole(*shape: int, seed: int = 0, limit: int = 3) -> Tensor:
    return torch.randint(-limit, limit + 1, shape, generator=torch.Generator().manual_seed(seed)).float()


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch):
    """Sets the tile sizes of a weight's shape."""
    return lambda weight, plan: monkeypatch.setitem(TILE_SIZES, tuple(weight.shape), plan)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("plan", CUTS)
@pytest.mark.parametrize("n_rows", [1, 5, 33])
def test_product_is_exact(n_rows, plan, dtype, cut):
    x, weight = whole(n_rows, K).to(dtype), whole(70, K, seed=1).to(dtype)  # 70: the last tile is partly filled
    cut(weight, plan)
    assert_same(skinny_linear(x, weight), F.linear(x, weight))


def test_product_accepts_strided_rows():
    x, weight = whole(4, 80)[:, 16:], whole(40, 64, seed=2)
    assert_same(skinny_linear(x, weight), F.linear(x, weight))


@pytest.mark.parametrize("plan", CUTS)
def test_each_part_is_the_product_of_its_share_of_columns(plan, cut):
    x, weight = whole(3, K).half(), whole(70, K, seed=1).half()
    cut(weight, plan)
    parts = skinny_parts(x, weight)
    assert parts.dtype == (torch.float16 if plan.splits == 1 else torch.float32)
    shares = [F.linear(*pair) for pair in zip(x.chunk(plan.splits, 1), weight.chunk(plan.splits, 1), strict=True)]
    assert_same(parts, torch.stack(shares).to(parts.dtype))


def test_norm_of_parts_equals_norm_of_the_product(cut):
    x, weight, stream, gain = whole(3, K).half(), whole(64, K, seed=1).half(), noise(3, 64).half(), noise(64).half()
    cut(weight, TileSizes(32, 32, splits=3))
    fused = add_rms_norm(stream, skinny_parts(x, weight), gain, 1e-6)
    apart = add_rms_norm(stream, skinny_linear(x, weight), gain, 1e-6)
    for got, want in zip(fused, apart, strict=True):
        assert_same(got, want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("plan", [CUTS[0], CUTS[2], TileSizes(32, 64)])  # it is not split; the last is read ahead
def test_gated_product_equals_gating_the_product(plan, dtype, cut):
    x, weight = whole(5, K).to(dtype), whole(140, K, seed=1).to(dtype)
    cut(weight, plan)
    assert_same(skinny_gated_linear(x, weight), silu_mul(F.linear(x, weight)))


def test_older_gpus_read_narrower_tiles(cut, monkeypatch):
    x, weight = whole(5, 512).half(), whole(128, 512, seed=1).half()
    cut(weight, TileSizes(32, 256))
    ahead = skinny_gated_linear(x, weight)
    monkeypatch.setattr("models.kernels.skinny_gemm.has_large_tiles", lambda device: False)
    monkeypatch.setattr("models.kernels.skinny_gemm._gated_product", None)  # it would be called
    assert skinny_gemm._tiles_of(weight).columns == 128
    assert_same(skinny_gated_linear(x, weight), ahead)
    assert_same(skinny_linear(x, weight), F.linear(x, weight))
    cut(weight, TileSizes(64, 128))
    assert_same(skinny_gated_linear(x, weight), ahead)
    got = [skinny_gemm._tiles_of(weight, gated=gated).columns for gated in (False, True)]
    assert got == [128, 64], f"columns of a tile, of a gated one: expected [128, 64], got {got}"


def check_rounding(device: str) -> None:
    """Chains over all columns have relative errors of 2.2e-7 and 5.7e-7."""
    for n_columns, bound in ((128, 1.3e-7), (1024, 2.5e-7)):
        x, weight = noise(4, n_columns).to(device), noise(96, n_columns, seed=1).to(device)
        want = x.double() @ weight.double().T
        off = ((skinny_linear(x, weight).double() - want).norm() / want.norm()).item()
        assert off < bound, f"{n_columns} columns: expected an error below {bound}, got {off:.2g}"


@cpu_only
def test_float32_sums_are_rounded_in_short_chains(monkeypatch):
    monkeypatch.setattr("triton.runtime.interpreter.InterpreterBuilder.create_dot", chained_dot)
    check_rounding("cpu")


@gpu
def test_float32_sums_are_rounded_in_short_chains_on_the_gpu():
    check_rounding("cuda")


@pytest.mark.parametrize("plan", CUTS)
def test_other_rows_change_no_bit(plan, cut):
    x, weight = whole(40, K), whole(70, K, seed=1)
    cut(weight, plan)
    want = F.linear(x[7:8], weight)
    x[:7], x[8:] = float("nan"), float("inf")
    assert_same(skinny_linear(x, weight)[7:8], want)
    assert_same(skinny_linear(x[:8], weight)[7:8], want)


@pytest.mark.parametrize("shape", TILE_SIZES, ids=str)
def test_tile_sizes_divide_their_weights(shape):
    n_rows, n_columns = shape
    plan = TILE_SIZES[shape]
    assert n_columns % (plan.splits * plan.columns) == 0
    assert tile_sizes(*shape) == plan
    assert shape not in GATED or (plan.splits == 1 and n_rows // 2 % plan.rows == 0)


def test_default_tile_sizes_divide_the_weight():
    assert tile_sizes(10, 384).columns == 128
    assert tile_sizes(10, 48).columns == 16
    assert tile_sizes(10, 4096, 4).columns == 64
    assert tile_sizes(10, 384, 4).columns == 32
    assert tile_sizes(10, 128, 4).columns == 16
    with pytest.raises(AssertionError, match="columns a multiple of 16, got 40"):
        tile_sizes(10, 40)


def test_accepts_no_rows_and_refuses_too_many():
    weight = whole(32, 64)
    assert skinny_linear(whole(0, 64), weight).shape == (0, 32)
    assert skinny_gated_linear(whole(0, 64), weight).shape == (0, 16)
    with pytest.raises(AssertionError, match=f"at most {MAX_ROWS}, got {MAX_ROWS + 1}"):
        skinny_linear(whole(MAX_ROWS + 1, 64), weight)


@gpu
@pytest.mark.parametrize("shape", TILE_SIZES, ids=str)
def test_other_rows_change_no_bit_on_the_gpu(shape):
    weight = (torch.randn(shape, device="cuda") / shape[1] ** 0.5).bfloat16()
    x = torch.randn(MAX_ROWS, shape[1], device="cuda").bfloat16()
    call = skinny_gated_linear if shape in GATED else skinny_linear
    together = call(x, weight)
    for n_rows in (1, 2, 9, 17, 32, 33):
        assert_same(call(x[:n_rows], weight), together[:n_rows], f"{n_rows} rows")
    assert_same(call(x[-1:], weight), together[-1:], "the last row")
    plain = F.linear(x, weight)
    plain = silu_mul(plain) if shape in GATED else plain
    assert_close(together.float(), plain.float(), 2**-5 * plain.abs().max().item())


@gpu
@pytest.mark.parametrize(
    ("o", "gate_up", "down"),
    [((4096, 4096), (24576, 4096), (4096, 12288)), ((768, 768), (6144, 768), (768, 3072))],
    ids=["large", "read ahead"],
)
def test_dependent_launch_changes_no_bit_on_the_gpu(o, gate_up, down, monkeypatch):
    width = o[0]
    stream, gain = torch.randn(4, width, device="cuda").bfloat16(), torch.ones(width, device="cuda").bfloat16()
    layers = [
        [(torch.randn(shape, device="cuda") / shape[1] ** 0.5).bfloat16() for shape in (o, gate_up, down)]
        for _ in range(6)
    ]

    def run() -> Tensor:
        x, y = add_rms_norm(stream, None, gain, 1e-6, warps=16)
        for first, inner, last in layers:
            x, y = add_rms_norm(x, skinny_parts(y, first), gain, 1e-6, warps=16)
            x, y = add_rms_norm(x, skinny_parts(skinny_gated_linear(y, inner), last), gain, 1e-6, warps=16)
        return x

    early = run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = run()
    graph.replay()
    monkeypatch.setattr(launch, "_has_pdl", lambda index: False)
    assert_same(early, run(), "early starts")
    assert_same(replayed, early, "a graph with dependent launches")
