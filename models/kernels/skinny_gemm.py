"""Skinny GEMM (split-K): Triton kernels for products of few rows with large weights, bound by reading the weights.

Programs of a small weight read their share of it before the kernel ahead of them has ended, if they hold all of it at
once: one tile, or up to four of a gated product. That hides most of the time that such a product takes.

The bits of a row depend on that row and the weights alone: rows are the narrow side of the tile, and the split of K and
the order of its sum follow from the weight's shape. Requires Triton.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from models.kernels.launch import SMALL_WEIGHT, has_large_tiles, launch_options, product_options
from models.kernels.tile_ops import add_dot, silu_product

MAX_ROWS = 64
MAX_AHEAD = 4  # most tiles that a program of a gated product reads ahead
GATED_TILE = 8192  # most bytes of each of a gated product's two tiles where programs may not hold large tiles
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
    (2304, 768): TileSizes(64, 256, splits=3),
    (768, 768): TileSizes(64, 128, splits=6),
    (6144, 768): TileSizes(32, 256),
    (768, 3072): TileSizes(64, 512, splits=6),
    (6562, 768): TileSizes(32, 128),
    # Qwen3-TTS: the talker of 1.7B, then the code predictors and the talker of 0.6B.
    (4096, 2048): TileSizes(64, 256, splits=8),
    (2048, 2048): TileSizes(64, 256, splits=8),
    (2048, 6144): TileSizes(64, 128, splits=8),
    (4096, 1024): TileSizes(64, 256, splits=4),
    (1024, 2048): TileSizes(64, 512, splits=4),
    (1024, 3072): TileSizes(64, 512, splits=6),
    (6144, 1024): TileSizes(32, 256),
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

    A single tile is read before the kernel ahead has ended. PDL, EARLY: as `product_options` returns them.
    """
    first = tl.program_id(1) * TILES * BK
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    # Indices beyond the last row read the last row; their results are not stored.
    rows = tl.minimum(n, N - 1).to(tl.int64)
    m = tl.arange(0, BM)
    k = tl.arange(0, BK)
    AHEAD: tl.constexpr = TILES == 1 and not GATED
    if PDL and EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    if AHEAD:
        ahead = tl.load(weight + rows[:, None] * K + (first + k)[None, :])  # while earlier kernels run
    if PDL:
        tl.extra.cuda.gdc_wait()
    acc = tl.zeros((BN, BM), tl.float32)
    if GATED:
        up = tl.zeros((BN, BM), tl.float32)
    if AHEAD:
        values = tl.load(x + m[:, None] * x_stride + (first + k)[None, :], mask=(m < M)[:, None], other=0.0)
        acc = add_dot(ahead, tl.trans(values), acc, PRECISION)
    else:
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
def _tile_of(weight, rows, K, first, k):
    """Columns first + k of rows of a weight."""
    return tl.load(weight + rows[:, None] * K + (first + k)[None, :])


@triton.jit(do_not_specialize=["M"])
def _gated_kernel(
    x, weight, out, M, N, K, x_stride,
    BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, TILES: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """BN gate rows and the same up rows as one tile times all of x; tiles of all columns are read ahead."""
    i = tl.arange(0, 2 * BN)
    n = tl.minimum(tl.program_id(0) * BN + i % BN, N - 1)
    rows = (n + i // BN * N).to(tl.int64)
    m = tl.arange(0, BM)
    k = tl.arange(0, BK)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    w0 = _tile_of(weight, rows, K, 0, k)
    if TILES > 1:
        w1 = _tile_of(weight, rows, K, BK, k)
    if TILES > 2:
        w2 = _tile_of(weight, rows, K, 2 * BK, k)
    if TILES > 3:
        w3 = _tile_of(weight, rows, K, 3 * BK, k)
    if PDL:
        tl.extra.cuda.gdc_wait()
    values = x + m[:, None] * x_stride + k[None, :]
    is_row = (m < M)[:, None]
    acc = tl.zeros((2 * BN, BM), tl.float32)
    acc = add_dot(w0, tl.trans(tl.load(values, mask=is_row, other=0.0)), acc, PRECISION)
    if TILES > 1:
        acc = add_dot(w1, tl.trans(tl.load(values + BK, mask=is_row, other=0.0)), acc, PRECISION)
    if TILES > 2:
        acc = add_dot(w2, tl.trans(tl.load(values + 2 * BK, mask=is_row, other=0.0)), acc, PRECISION)
    if TILES > 3:
        acc = add_dot(w3, tl.trans(tl.load(values + 3 * BK, mask=is_row, other=0.0)), acc, PRECISION)
    gate, up = tl.split(tl.permute(tl.reshape(acc, (2, BN, BM)), (1, 2, 0)))
    dtype: tl.constexpr = x.dtype.element_ty
    value = silu_product(gate, up, dtype)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    tl.store(out + m[None, :] * N + n[:, None], value.to(dtype), mask=(n < N)[:, None] & (m < M)[None, :])


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


def _tiles_of(weight: Tensor, *, gated: bool = False) -> TileSizes:
    N, K = weight.shape
    plan = tile_sizes(N, K, weight.element_size())
    if has_large_tiles(weight.device):
        return plan
    most = GATED_TILE // (plan.rows * weight.element_size()) if gated else 128
    return plan._replace(columns=min(plan.columns, most))


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


def _is_ahead(weight: Tensor, plan: TileSizes) -> bool:
    """Whether a program of a gated product reads all of its tiles ahead."""
    N, K = weight.shape
    is_small = N * K <= SMALL_WEIGHT and K // plan.columns <= MAX_AHEAD
    return is_small and weight.element_size() == 2 and has_large_tiles(weight.device)


def _gated_product(x: Tensor, weight: Tensor, out: Tensor, plan: TileSizes) -> None:
    M, K = x.shape
    N = out.shape[-1]
    _gated_kernel[(triton.cdiv(N, plan.rows),)](
        x, weight, out, M, N, K, x.stride(0), BN=plan.rows, BM=max(16, triton.next_power_of_2(M)), BK=plan.columns,
        TILES=K // plan.columns, PRECISION="tf32", num_warps=plan.warps, **launch_options(weight.device),
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
    plan = _tiles_of(weight, gated=True)._replace(splits=1)
    out = torch.empty(len(x), len(weight) // 2, dtype=x.dtype, device=x.device)
    if len(x):
        if _is_ahead(weight, plan):
            _gated_product(x, weight, out, plan)
        else:
            _product(x, weight, out, plan, gated=True)
    return out
