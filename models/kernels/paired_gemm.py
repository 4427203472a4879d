"""Products of few rows with quantised weights on tensor cores for 8-bit numbers: a Triton kernel.

x is given as pairs of 8-bit numbers (`models.kernels.paired_rows`), weights are multiplied as they are stored, int4
after its bytes are split into two. Within a group of columns, sums of int8 and int4 are whole numbers, and those of fp8
have about 14 bits, as these tensor cores keep them; the sums of groups are added in float32. Without dequantising
weights in registers the product is bound by reading them. Requires Triton.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from models.checkpoint.quantized import QuantizedMatrix
from models.kernels.launch import Launch, launch_options
from models.kernels.paired_rows import GROUP, PairedRows
from models.kernels.skinny_gemm import MAX_ROWS, count_splits
from models.kernels.tile_ops import group_terms, silu_product

MIN_PROGRAMS, MIN_INT4_PROGRAMS = 256, 384  # that split a weight, if its columns allow it
MULTIPROCESSORS = 132  # of an H200, on which the tiles were measured
MIN_SPLIT_GROUPS = 4  # that a program multiplies at least, if it shares rows with others


class PairedTiles(NamedTuple):
    """How a product is split. splits: the same for all numbers of rows of x, whose sums keep one order."""

    rows: int  # weight rows per program, of both halves together if gated
    splits: int = 1  # programs that share a row, each with an equal share of its groups
    stages: int = 4  # tiles in flight (pipeline stages)
    warps: int = 4


# Four bytes to their low or high four bits.
_LOW = tl.constexpr("and.b32 $0, $1, 0x0f0f0f0f;")
_HIGH = tl.constexpr("""{
.reg .b32 a;
shr.u32 a, $1, 4;
and.b32 $0, a, 0x0f0f0f0f;
}""")


@triton.jit
def _halves(packed, INTERPRETED: tl.constexpr):
    """Low and high four bits of bytes, as int8."""
    if INTERPRETED:
        low, high = (packed & 15).to(tl.int8), (packed >> 4).to(tl.int8)
    else:
        low = tl.inline_asm_elementwise(_LOW, "=r,r", [packed], tl.int8, is_pure=True, pack=4)
        high = tl.inline_asm_elementwise(_HIGH, "=r,r", [packed], tl.int8, is_pure=True, pack=4)
    return low, high


@triton.jit(do_not_specialize=["M", "TILES"])
def paired_kernel(
    x, steps, sums, values, scale, zeros, out, M, N, K, ROWS, TILES,
    BN: tl.constexpr, BM: tl.constexpr, STAGES: tl.constexpr, FP8: tl.constexpr, INT4: tl.constexpr,
    GATED: tl.constexpr, INTERPRETED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A tile of BN weight rows times all of x; a tile of columns is one group.

    If GATED, N is half of the weight's ROWS, and half of the tile's rows are the gate's.

    Args:
        x, steps, sums: as in `PairedRows`.
        values: K bytes a row. scale, zeros: of int4 as 32-bit words, [groups, ROWS / 2] and [groups, ROWS / 4].
        TILES: groups that a program multiplies.
        PDL: as `launch_options` returns it. The next kernel does not start early; see `product_options`.
    """
    OWN: tl.constexpr = BN // 2 if GATED else BN
    BK: tl.constexpr = 64 if INT4 else 128
    own = tl.arange(0, BN)
    # Indices beyond the last row read the last row; their results are not stored.
    rows = tl.minimum(tl.program_id(0) * OWN + own % OWN, N - 1) + own // OWN * N
    m, pair, k = tl.arange(0, BM), tl.arange(0, 2 * BM), tl.arange(0, BK)
    columns = K * 2 if INT4 else K
    first = tl.program_id(1) * TILES
    place = values + rows.to(tl.int64)[:, None] * K + k[None, :]
    at = x + pair[:, None] * columns + k[None, :]
    is_pair = (pair < 2 * M)[:, None]
    if PDL:
        tl.extra.cuda.gdc_wait()
    acc = tl.zeros((BN, BM), tl.float32)
    for tile in tl.range(first, first + TILES, num_stages=STAGES):
        weight = tl.load(place + tile * BK)
        left = tl.trans(tl.load(at + tile * 128, mask=is_pair, other=0.0))
        step = tl.load(steps + tile * M + m, mask=m < M, other=0.0)[None, :]
        if INT4:
            right = tl.trans(tl.load(at + tile * 128 + BK, mask=is_pair, other=0.0))
            total = tl.load(sums + tile * M + m, mask=m < M, other=0)
            low, high = _halves(weight, INTERPRETED)
            part = tl.dot(low, left, out_dtype=tl.int32)
            part = tl.dot(high, right, part, out_dtype=tl.int32)
            by, zero = group_terms(scale, zeros, tile * (ROWS // 4), rows)
            upper, lower = tl.split(tl.reshape(part, (BN, BM, 2)))
            product = (upper * 256 + lower - zero[:, None] * total[None, :]).to(tl.float32) * by[:, None]
        elif FP8:
            upper, lower = tl.split(tl.reshape(tl.dot(weight, left), (BN, BM, 2)))
            product = upper + lower * 0.0625
        else:
            upper, lower = tl.split(tl.reshape(tl.dot(weight, left, out_dtype=tl.int32), (BN, BM, 2)))
            product = (upper * 256 + lower).to(tl.float32)
        acc = tl.fma(product, step.broadcast_to(BN, BM), acc)
    if not INT4:
        acc *= tl.load(scale + rows)[:, None]
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(acc, (2, OWN, BM)), (1, 2, 0)))
        acc = silu_product(gate, up, out.dtype.element_ty)
    n = tl.program_id(0) * OWN + tl.arange(0, OWN)
    to = (tl.program_id(1) * M + m)[None, :] * N + n[:, None]
    tl.store(out + to, acc.to(out.dtype.element_ty), mask=(n < N)[:, None] & (m < M)[None, :])


def paired_tiles(weight: QuantizedMatrix, n_rows: int, *, gated: bool = False) -> PairedTiles:
    """Tile sizes for n_rows rows of x, measured on one H200. The sums of a row have the same bits beside any others."""
    N, K = weight.shape
    is_int4 = weight.zeros is not None
    enough = MIN_INT4_PROGRAMS if is_int4 else MIN_PROGRAMS
    splits = 1 if gated else count_splits(triton.cdiv(N, 64), K // GROUP, enough=enough, least_tiles=MIN_SPLIT_GROUPS)
    if is_int4:
        return _int4_tile(n_rows, splits)
    # More than 32 rows take tiles twice as large, if every multiprocessor still has a program.
    if n_rows > 32 and triton.cdiv(N, 128) * splits > MULTIPROCESSORS:
        return PairedTiles(128, splits, stages=3)
    return PairedTiles(64, splits)


def _int4_tile(n_rows: int, splits: int) -> PairedTiles:
    if n_rows <= 4:
        return PairedTiles(64, splits, warps=2)
    return PairedTiles(128 if n_rows <= 32 else 64, splits)


def paired_product(
    x: PairedRows, weight: QuantizedMatrix, out: torch.Tensor, plan: PairedTiles, *, gated: bool = False
) -> None:
    """Write x [M, K] times weight [N, K] to out, [splits, M, N], or if gated [M, N / 2]."""
    launch = paired_launch(x, weight, out, plan, gated=gated)
    paired_kernel[launch.grid](*launch.args, **launch.options)


def paired_launch(
    x: PairedRows, weight: QuantizedMatrix, out: torch.Tensor, plan: PairedTiles, *, gated: bool = False
) -> Launch:
    """The call of `paired_product`."""
    (N, K), M, is_int4, is_fp8 = weight.shape, x.n_rows, weight.zeros is not None, weight.kind == "fp8"
    assert x.shape[-1] == K, f"columns: expected {K}, got {x.shape[-1]}"
    assert x.is_fp8 == is_fp8, f"pairs: expected those of {weight.kind}, got {x.values.dtype}"
    assert all(one.is_contiguous() for one in weight.tensors()), "expected contiguous rows of the weight"
    assert not is_int4 or weight.group == GROUP, f"group: expected {GROUP}, got {weight.group}"
    assert M <= MAX_ROWS, f"rows: expected at most {MAX_ROWS}, got {M}"
    assert K % (plan.splits * GROUP) == 0, f"splits: expected a divisor of {K // GROUP} groups, got {plan.splits}"
    # Matrices of 8-bit numbers have at least eight columns, those of the instructions for fp8 sixteen.
    least = 8 if is_fp8 else 4
    scale, zeros = weight.scale, weight.scale
    if weight.zeros is not None:
        scale, zeros = scale.view(torch.int32), weight.zeros.view(torch.int32)
    width = out.shape[-1]
    return Launch(
        (triton.cdiv(width, plan.rows // 2 if gated else plan.rows), plan.splits),
        (
            x.values, x.steps, x.sums, weight.values, scale, zeros, out, M, width, weight.values.shape[1], N,
            K // GROUP // plan.splits,
        ),
        {
            "BN": plan.rows, "BM": max(least, triton.next_power_of_2(M)), "STAGES": plan.stages, "FP8": is_fp8,
            "INT4": is_int4, "GATED": gated, "INTERPRETED": triton.knobs.runtime.interpret,
            "num_warps": plan.warps, **launch_options(weight.device),
        },
    )  # fmt: skip
