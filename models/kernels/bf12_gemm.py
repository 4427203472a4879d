"""Products of few rows with weights in bf12 (`models.kernels.bf12`): a Triton kernel.

A program reads three quarters of the bytes of a bfloat16 weight and makes its numbers in registers: four high bytes
take two or three instructions, and one makes two numbers of their bytes. Exceptions are added in float32 at the end.
The bits of a row depend on that row and the weight alone: all tiles are multiplied by the same instructions, in
columns' order. Requires Triton.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from models.kernels.bf12 import GROUP, GROUP_WORDS, LEAST_ENTRIES, Bf12Matrix
from models.kernels.launch import Launch, launch_options
from models.kernels.skinny_gemm import MAX_ROWS, count_splits, sum_parts
from models.kernels.tile_ops import add_dot, silu_product

MIN_PROGRAMS = 192  # that split a weight, if its columns allow it
MIN_SPLIT_GROUPS = 4  # that a program multiplies at least, if it shares rows with others
MAX_BLOCK = 32  # most rows of x of a program
_WORDS = tl.constexpr(GROUP // 8)  # of one half of a group
_GROUP_WORDS = tl.constexpr(GROUP_WORDS)
_ENTRIES = tl.constexpr(LEAST_ENTRIES)


class Bf12Tiles(NamedTuple):
    """How a product is split; a tile has the columns of one group.

    Two warps use instructions that add in the same order for every number of rows, those of four do not.
    """

    rows: int  # weight rows per program, of both halves together if gated
    splits: int = 1  # programs that share a row, each with an equal share of its groups
    stages: int = 3  # tiles in flight (pipeline stages)
    warps: int = 2


def _pair(i: int) -> tl.constexpr:
    """Number i of two neighbouring words. Operands: $0 the numbers; $1, $2 low bytes; $3, $4 high bytes."""
    return tl.constexpr(f"prmt.b32 $0, ${1 + i // 2}, ${3 + i // 2}, {'0x5140' if i % 2 == 0 else '0x7362'};")


PAIR_0, PAIR_1, PAIR_2, PAIR_3 = _pair(0), _pair(1), _pair(2), _pair(3)


@triton.jit
def _high_bytes(bits, smallest):
    """High bytes of the numbers of both halves of a group. bits, smallest: uint32."""
    return (bits & 0x87878787) + smallest, (((bits << 4) | (bits >> 28)) & 0x87878787) + smallest


@triton.jit
def _numbers(
    low, high, place, smallest, k, INDEX: tl.constexpr, HALF: tl.constexpr, CODE: tl.constexpr, dtype: tl.constexpr
):
    """Numbers 32 INDEX to 32 INDEX + 31 of one half of a group [BN, words]."""
    if dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(CODE, "=r,r,r,r,r", [low, high], tl.bfloat16, is_pure=True, pack=2)
    at = (k - k % 2 + INDEX // 2)[None, :]
    shift = ((INDEX % 2 * 2 + k % 2) * 8)[None, :].to(tl.uint32)
    first, second = _high_bytes(tl.load(place + 2 * _WORDS + at).to(tl.uint32, bitcast=True), smallest)
    own = second if HALF == 1 else first
    lower = tl.load(place + HALF * _WORDS + at).to(tl.uint32, bitcast=True)
    bits = ((own >> shift) & 255) << 24 | ((lower >> shift) & 255) << 16
    return bits.to(tl.float32, bitcast=True).to(dtype)


@triton.jit
def _half_dot(place, x, low, high, smallest, read, k, acc, HALF: tl.constexpr, PRECISION: tl.constexpr):
    """acc plus the product of one half of a group. x: places of its first columns [BM, words]."""
    dtype: tl.constexpr = x.dtype.element_ty
    part = _numbers(low, high, place, smallest, k, 0, HALF, PAIR_0, dtype)
    acc = add_dot(part, tl.trans(tl.load(x, mask=read, other=0.0)), acc, PRECISION)
    part = _numbers(low, high, place, smallest, k, 1, HALF, PAIR_1, dtype)
    acc = add_dot(part, tl.trans(tl.load(x + _WORDS, mask=read, other=0.0)), acc, PRECISION)
    part = _numbers(low, high, place, smallest, k, 2, HALF, PAIR_2, dtype)
    acc = add_dot(part, tl.trans(tl.load(x + 2 * _WORDS, mask=read, other=0.0)), acc, PRECISION)
    part = _numbers(low, high, place, smallest, k, 3, HALF, PAIR_3, dtype)
    return add_dot(part, tl.trans(tl.load(x + 3 * _WORDS, mask=read, other=0.0)), acc, PRECISION)


@triton.jit
def _group_dot(place, x, smallest, read, k, acc, PRECISION: tl.constexpr):
    """acc plus one group's product. x: places of the group's first columns [BM, words]."""
    low = tl.load(place + k[None, :])
    other_low = tl.load(place + _WORDS + k[None, :])
    bits = tl.load(place + 2 * _WORDS + k[None, :]).to(tl.uint32, bitcast=True)
    high, other_high = _high_bytes(bits, smallest)
    high, other_high = high.to(tl.int32, bitcast=True), other_high.to(tl.int32, bitcast=True)
    acc = _half_dot(place, x, low, high, smallest, read, k, acc, 0, PRECISION)
    return _half_dot(place, x + 4 * _WORDS, other_low, other_high, smallest, read, k, acc, 1, PRECISION)


@triton.jit
def _add_exception(total, entry, smallest, columns, is_row):
    """total plus the products of one exception of each weight row.

    Args:
        entry: [BN] column (high half) and bits of the number (low half).
        smallest: [BN] high byte of the number that the tile has in its place.
        columns: places of the first column of x [1, BM].
    """
    entry = entry.to(tl.uint32, bitcast=True)
    number = (entry << 16).to(tl.float32, bitcast=True)
    missing = number - (smallest << 24 | ((entry << 16) & 0x80000000)).to(tl.float32, bitcast=True)
    place = columns + (entry >> 16).to(tl.int32)[:, None]
    values = tl.load(place, mask=is_row & (missing != 0.0)[:, None], other=0.0).to(tl.float32)
    return tl.fma(values, missing[:, None].broadcast_to(values.shape), total)


@triton.jit(do_not_specialize=["M", "E", "TILES"])
def bf12_kernel(
    x, values, smallest, exceptions, out, M, N, K, ROWS, E, x_stride, TILES,
    BN: tl.constexpr, BM: tl.constexpr, STAGES: tl.constexpr, GATED: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A tile of BN weight rows times BM rows of x, in float32 sums.

    If GATED, N is half of the weight's ROWS, and half of the tile's rows are the gate's.

    Args:
        values: K words a row. smallest: [ROWS]. exceptions: [E, ROWS].
        TILES: groups that a program multiplies.
        PDL: as `launch_options` returns it. The next kernel does not start early; see `product_options`.
    """
    OWN: tl.constexpr = BN // 2 if GATED else BN
    i = tl.arange(0, BN)
    # Indices beyond the last row read the last row; their results are not stored.
    rows = tl.minimum(tl.program_id(0) * OWN + i % OWN, N - 1) + i // OWN * N
    m = tl.program_id(2) * BM + tl.arange(0, BM)
    k = tl.arange(0, _WORDS)
    first = tl.program_id(1) * TILES
    is_row = m < M
    place = values + rows.to(tl.int64)[:, None] * K
    columns = x + m[:, None] * x_stride + k[None, :]
    base = tl.load(smallest + rows).to(tl.uint32)
    words = (base * 0x01010101)[:, None]
    entry = exceptions + rows
    e0, e1 = tl.load(entry), tl.load(entry + ROWS)
    e2, e3 = tl.load(entry + 2 * ROWS), tl.load(entry + 3 * ROWS)
    if PDL:
        tl.extra.cuda.gdc_wait()
    acc = tl.zeros((BN, BM), tl.float32)
    for tile in tl.range(first, first + TILES, num_stages=STAGES):
        own = columns + tile * (8 * _WORDS)
        acc = _group_dot(place + tile * _GROUP_WORDS, own, words, is_row[:, None], k, acc, PRECISION)
    if first == 0:
        row_of_x, is_row_of_x = x + m[None, :] * x_stride, is_row[None, :]
        total = _add_exception(tl.zeros((BN, BM), tl.float32), e0, base, row_of_x, is_row_of_x)
        total = _add_exception(total, e1, base, row_of_x, is_row_of_x)
        total = _add_exception(total, e2, base, row_of_x, is_row_of_x)
        total = _add_exception(total, e3, base, row_of_x, is_row_of_x)
        for e in range(_ENTRIES, E):
            total = _add_exception(total, tl.load(entry + e * ROWS), base, row_of_x, is_row_of_x)
        acc += total
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(acc, (2, OWN, BM)), (1, 2, 0)))
        acc = silu_product(gate, up, x.dtype.element_ty)
    n = tl.program_id(0) * OWN + tl.arange(0, OWN)
    to = (tl.program_id(1) * M + m)[None, :] * N + n[:, None]
    tl.store(out + to, acc.to(out.dtype.element_ty), mask=(n < N)[:, None] & is_row[None, :])


def bf12_tiles(weight: Bf12Matrix, n_rows: int, *, gated: bool = False) -> Bf12Tiles:
    """Tile sizes for n_rows rows of x, measured on one H200. splits: the same for all numbers of rows."""
    N, K = weight.shape
    splits = 1
    if not gated:
        splits = count_splits(triton.cdiv(N, 64), K // GROUP, enough=MIN_PROGRAMS, least_tiles=MIN_SPLIT_GROUPS)
    return Bf12Tiles(32 if n_rows <= 8 else 64, splits, stages=2 if gated and n_rows > 16 else 3)


def bf12_launch(x: Tensor, weight: Bf12Matrix, out: Tensor, plan: Bf12Tiles, *, gated: bool = False) -> Launch:
    """The call that writes x [M, K], M <= 64, times weight [N, K] to out, [splits, M, N], or if gated [M, N / 2]."""
    (N, K), M, width = weight.shape, len(x), out.shape[-1]
    assert M <= MAX_ROWS, f"rows: expected at most {MAX_ROWS}, got {M}"
    assert x.shape[1] == K, f"columns: expected {K}, got {x.shape[1]}"
    assert x.stride(1) == 1 and all(one.is_contiguous() for one in weight), "expected contiguous rows"
    assert K // GROUP % plan.splits == 0, f"splits: expected a divisor of {K // GROUP} groups, got {plan.splits}"
    block = min(max(8, triton.next_power_of_2(M)), MAX_BLOCK)
    n_programs = triton.cdiv(width, plan.rows // 2 if gated else plan.rows)
    exact = x.dtype == torch.float32 and not torch.backends.cuda.matmul.allow_tf32
    return Launch(
        (n_programs, plan.splits, triton.cdiv(M, block)),
        (
            x, weight.values, weight.smallest, weight.exceptions, out, M, width, weight.values.shape[1], N,
            len(weight.exceptions), x.stride(0), K // GROUP // plan.splits,
        ),
        {
            "BN": plan.rows, "BM": block, "STAGES": plan.stages, "GATED": gated,
            "PRECISION": "ieee" if exact else "tf32", "num_warps": plan.warps, **launch_options(weight.device),
        },
    )  # fmt: skip


def _product(x: Tensor, weight: Bf12Matrix, out: Tensor, plan: Bf12Tiles, *, gated: bool = False) -> None:
    launch = bf12_launch(x, weight, out, plan, gated=gated)
    bf12_kernel[launch.grid](*launch.args, **launch.options)


def bf12_parts(x: Tensor, weight: Bf12Matrix) -> Tensor:
    """As `skinny_parts`: x [M, K], M <= 64. Returns: [P, M, N] float32, or [1, M, N] in x's dtype."""
    plan = bf12_tiles(weight, len(x))
    dtype = x.dtype if plan.splits == 1 else torch.float32
    out = torch.empty(plan.splits, len(x), weight.shape[0], dtype=dtype, device=x.device)
    if len(x):
        _product(x, weight, out, plan)
    return out


def bf12_linear(x: Tensor, weight: Bf12Matrix) -> Tensor:
    """As `skinny_linear`: x [M, K], M <= 64. Returns: [M, N] in x's dtype."""
    parts = bf12_parts(x, weight)
    return sum_parts(parts, x.dtype) if len(parts) > 1 else parts[0]


def bf12_gated_linear(x: Tensor, weight: Bf12Matrix) -> Tensor:
    """As `skinny_gated_linear`: x [M, K], M <= 64, weight [2 I, K], the gate's rows first. Returns: [M, I]."""
    out = torch.empty(len(x), weight.shape[0] // 2, dtype=x.dtype, device=x.device)
    if len(x):
        _product(x, weight, out, bf12_tiles(weight, len(x), gated=True), gated=True)
    return out
