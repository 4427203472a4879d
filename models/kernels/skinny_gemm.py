"""Skinny GEMM (split-K): Triton kernels for products of few rows with large weights, bound by reading the weights.

The bits of a row depend on that row and the weights alone: rows are the narrow side of the tile, and the split of K and
the order of its sum follow from the weight's shape. Requires Triton.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from models.kernels.launch import launch_options, product_options
from models.kernels.tile_ops import add_dot, silu_product

MAX_ROWS = 64
SUM_BLOCK = 1024  # elements per program of the sum


class TileSizes(NamedTuple):
    """How one weight is split into tiles."""

    rows: int  # weight rows per program, of each half if gated; at least 64 for a warp group's instructions
    columns: int  # columns per tile
    splits: int = 1  # programs that share a row, each with an equal share of its columns
    stages: int = 4  # tiles in flight (pipeline stages)
    warps: int = 4


# By (N, K), measured on one H200. Other weights use DEFAULT with tiles that divide their columns.
TILE_SIZES: dict[tuple[int, int], TileSizes] = {
    (6144, 4096): TileSizes(64, 128, splits=2),
    (4096, 4096): TileSizes(64, 128, splits=4),
    (24576, 4096): TileSizes(64, 64),
    (4096, 12288): TileSizes(64, 128, splits=4),
    (151748, 4096): TileSizes(64, 128),
    (2304, 768): TileSizes(64, 64, splits=3, stages=3),
    (768, 768): TileSizes(64, 64, splits=3, stages=3),
    (6144, 768): TileSizes(32, 128, stages=3, warps=2),
    (768, 3072): TileSizes(16, 128, splits=6, stages=3, warps=2),
    (6562, 768): TileSizes(32, 128),
    # Qwen3-TTS: the talker of 1.7B, then the code predictors and the talker of 0.6B.
    (4096, 2048): TileSizes(64, 128, splits=4),
    (2048, 2048): TileSizes(64, 128, splits=8),
    (2048, 6144): TileSizes(64, 128, splits=8),
    (4096, 1024): TileSizes(64, 128, splits=4),
    (1024, 2048): TileSizes(64, 128, splits=8),
    (1024, 3072): TileSizes(64, 128, splits=8),
    (2048, 1024): TileSizes(32, 128),
}
DEFAULT = TileSizes(64, 128)


@triton.jit(do_not_specialize=["M"])
def _product_kernel(
    x, weight, out, M, N, K, x_stride,
    BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, TILES: tl.constexpr,
    GATED: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One tile of weight rows times all of x. If GATED, N is half of the weight's rows.

    PDL, EARLY: as `product_options` returns them.
    """
    first = tl.program_id(1) * TILES * BK
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    # Indices beyond the last row read the last row; their results are not stored.
    rows = tl.minimum(n, N - 1).to(tl.int64)
    if PDL:
        if EARLY:
            tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    m = tl.arange(0, BM)
    k = tl.arange(0, BK)
    acc = tl.zeros((BN, BM), tl.float32)
    if GATED:
        up = tl.zeros((BN, BM), tl.float32)
    for tile in range(TILES):
        column = first + tile * BK
        values = tl.load(x + m[:, None] * x_stride + (column + k)[None, :], mask=(m < M)[:, None], other=0.0)
        values = tl.trans(values)
        tile_of = weight + rows[:, None] * K + (column + k)[None, :]
        acc = add_dot(tl.load(tile_of), values, acc, PRECISION)
        if GATED:
            up = add_dot(tl.load(tile_of + N.to(tl.int64) * K), values, up, PRECISION)
    dtype: tl.constexpr = x.dtype.element_ty
    inside = (n < N)[:, None] & (m < M)[None, :]
    if GATED:
        acc = silu_product(acc, up, dtype)
    place = (tl.program_id(1) * M + m)[None, :] * N + n[:, None]
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _sum_kernel(parts, out, n, PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    total = tl.load(parts + at, mask=inside)
    for part in tl.static_range(1, PARTS):
        total += tl.load(parts + part * n + at, mask=inside)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


def count_splits(n_programs: int, n_tiles: int, *, enough: int, least_tiles: int) -> int:
    """Programs that share a row's tiles: the least power of two with which `enough` programs run, if tiles suffice.

    Args:
        n_programs: of the product without a split.
        least_tiles: that a program multiplies at least, if it shares rows with others.
    """
    splits = 1
    while splits * n_programs < enough and n_tiles % (2 * splits) == 0 and n_tiles >= 2 * splits * least_tiles:
        splits *= 2
    return splits


def tile_sizes(N: int, K: int, n_bytes: int = 2) -> TileSizes:
    """The entry of TILE_SIZES for a weight [N, K] of n_bytes a number, or DEFAULT, with tiles that divide the columns.

    For numbers of more than two bytes tiles are half as wide, and narrower still for few columns: rounding errors are
    smallest if the number of columns per tile is about the number of tiles (`add_dot`).
    """
    plan = TILE_SIZES.get((N, K), DEFAULT)
    narrow = plan.columns
    if n_bytes > 2:
        narrow = min(narrow // 2, max(16, triton.next_power_of_2(math.isqrt(K // plan.splits))))
    while K // plan.splits % narrow:
        narrow //= 2
    assert narrow >= 16, f"weight: expected columns a multiple of {16 * plan.splits}, got {K}"
    return plan._replace(columns=narrow)


def _tiles_of(weight: Tensor) -> TileSizes:
    N, K = weight.shape
    return tile_sizes(N, K, weight.element_size())


def _product(x: Tensor, weight: Tensor, out: Tensor, plan: TileSizes, gated: bool = False) -> None:
    M, K = x.shape
    N = out.shape[-1]
    assert M <= MAX_ROWS, f"rows: expected at most {MAX_ROWS}, got {M}"
    assert weight.shape[1] == K, f"columns: expected {weight.shape[1]}, got {K}"
    assert x.stride(1) == 1 and weight.is_contiguous(), "expected contiguous rows"
    exact = x.dtype == torch.float32 and not torch.backends.cuda.matmul.allow_tf32
    _product_kernel[(triton.cdiv(N, plan.rows), plan.splits)](
        x, weight, out, M, N, K, x.stride(0),
        BN=plan.rows, BM=max(16, triton.next_power_of_2(M)), BK=plan.columns,
        TILES=K // plan.splits // plan.columns, GATED=gated, PRECISION="ieee" if exact else "tf32",
        num_warps=plan.warps, num_stages=plan.stages, **product_options(weight),
    )  # fmt: skip


def skinny_parts(x: Tensor, weight: Tensor) -> Tensor:
    """The product x weight^T as partial sums over K, for a kernel that adds them (`models.kernels.rows`).

    Args:
        x: [M, K], M <= 64, rows contiguous.
        weight: [N, K] of the same dtype, contiguous.
    Returns: [P, M, N] float32, or the product itself, [1, M, N] in x's dtype, if its tile sizes do not split K.
    """
    plan = _tiles_of(weight)
    dtype = x.dtype if plan.splits == 1 else torch.float32
    out = torch.empty(plan.splits, len(x), len(weight), dtype=dtype, device=x.device)
    if len(x):
        _product(x, weight, out, plan)
    return out


def skinny_linear(x: Tensor, weight: Tensor) -> Tensor:
    """The product x weight^T; the bits of a row do not depend on the other rows.

    Args:
        x: [M, K], M <= 64, rows contiguous.
        weight: [N, K] of the same dtype, contiguous.
    Returns: [M, N] in x's dtype.
    """
    plan = _tiles_of(weight)
    if plan.splits > 1:
        return sum_parts(skinny_parts(x, weight), x.dtype)
    out = torch.empty(len(x), len(weight), dtype=x.dtype, device=x.device)
    if len(x):
        _product(x, weight, out, plan)
    return out


def sum_parts(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum [M, N] of partial sums [P, M, N] float32, added in their order."""
    n_parts, M, N = parts.shape
    out = torch.empty(M, N, dtype=dtype, device=parts.device)
    if M:
        _sum_kernel[(triton.cdiv(M * N, SUM_BLOCK),)](
            parts, out, M * N, PARTS=n_parts, BLOCK=SUM_BLOCK, num_warps=4, **launch_options(parts.device),
        )  # fmt: skip
    return out


def skinny_gated_linear(x: Tensor, weight: Tensor) -> Tensor:
    """silu(gate) * up of the halves of x weight^T, rounded as in `models.layers.transformer.GatedMLP`.

    Args:
        x: [M, K], M <= 64, rows contiguous.
        weight: [2 I, K] contiguous, the gate's rows first.
    Returns: [M, I] in x's dtype.
    """
    plan = _tiles_of(weight)._replace(splits=1)
    out = torch.empty(len(x), len(weight) // 2, dtype=x.dtype, device=x.device)
    if len(x):
        _product(x, weight, out, plan, gated=True)
    return out
