"""Products of few bfloat16 rows with quantised weights that are read as 32-bit words: a Triton kernel.

A word has four fp8 or int8 values, or eight int4 values. Value i of all words of a tile is one matrix, which multiplies
every fourth column of x: x is read as 64-bit words of four columns. So all reads are wide, and bytes become bfloat16
pairs without being moved between threads. Other types than bfloat16 take the same tiles without words of x, for
Triton's interpreter. Requires Triton.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from models.checkpoint.quantized import QuantizedMatrix
from models.kernels.launch import Launch, product_options
from models.kernels.skinny_gemm import count_splits
from models.kernels.tile_ops import add_dot, group_terms, silu_product

INT4_WORDS = 16  # of a group of 128 columns, one tile
MIN_PROGRAMS = 256  # that split a weight, if its columns allow it: two for each multiprocessor of an H200
MIN_SPLIT_WORDS = 128  # that a program multiplies at least, if it shares rows with others
# Words, splits and stages by (N, K) of the speech model's layers, measured with one row of x on one H200.
SPEECH_TILES: dict[tuple[int, int], tuple[int, int, int]] = {
    (2304, 768): (32, 3, 3),
    (768, 768): (32, 3, 3),
    (768, 3072): (32, 6, 4),
}


class WordTiles(NamedTuple):
    """How a product is split. words, splits: the same for all numbers of rows of x, whose sums keep one order."""

    rows: int  # weight rows per program, of each half if gated
    words: int  # 32-bit words of a row per tile
    splits: int = 1  # programs that share a row, each with an equal share of its words
    stages: int = 4  # tiles in flight (pipeline stages)
    warps: int = 4


# 2 ** 120: between the exponents of a float that has the bits of an fp8 number, and of that number.
FP8_STEP = tl.constexpr(1.329227995784916e36)

# Instructions that convert types run at a quarter of the rate of others or less, and would take longer than reading the
# weights. For bfloat16, numbers are made of bits instead. Operands: $0 two neighbouring numbers, $1 and $2 their words.


def _fp8_pair(i: int) -> str:
    """Byte i to the high half of 16 bits, exponent and mantissa four bits lower, and the product with 2 ** 120."""
    return f"""{{
.reg .b32 a, m, s, z;
prmt.b32 a, $1, $2, 0x{i + 4}{i + 4}{i}{i};
shr.u32 m, a, 4;
and.b32 m, m, 0x07f007f0;
lop3.b32 a, a, 0x80008000, m, 0xea;
mov.b32 s, 0x7b807b80;
mov.b32 z, 0x80008000;
fma.rn.bf16x2 $0, a, s, z;
}}"""


def _int8_pair(i: int) -> str:
    """128 plus the low seven bits, less 128 or, with the sign's bit in the exponent, 256."""
    return f"""{{
.reg .b32 a, b, c, s;
prmt.b32 a, $1, $2, 0x{i + 4}{i + 4}{i}{i};
mov.b32 c, 0xc300c300;
lop3.b32 b, a, 0x00800080, c, 0xea;
mov.b32 c, 0x43004300;
lop3.b32 a, a, 0x007f007f, c, 0xea;
mov.b32 s, 0x3f803f80;
fma.rn.bf16x2 $0, a, s, b;
}}"""


def _int4_pair(i: int) -> str:
    """Bits 4 i of both words: 128 plus the value."""
    return f"""{{
.reg .b32 a, c;
prmt.b32 a, $1, $2, 0x{"5410" if i < 4 else "7632"};
shr.u32 a, a, {i % 4 * 4};
mov.b32 c, 0x43004300;
lop3.b32 $0, a, 0x000f000f, c, 0xea;
}}"""


def _column_pair(i: int) -> str:
    """Column i of two neighbouring 64-bit words, $1 and $2."""
    half, order = "ab"[i // 2], "0x5410" if i % 2 == 0 else "0x7632"
    return f"""{{
.reg .b32 a1, b1, a2, b2;
mov.b64 {{a1, b1}}, $1;
mov.b64 {{a2, b2}}, $2;
prmt.b32 $0, {half}1, {half}2, {order};
}}"""


def _four(make: Callable[[int], str]) -> tuple[tl.constexpr, ...]:
    return tuple(tl.constexpr(make(i)) for i in range(4))


FP8_0, FP8_1, FP8_2, FP8_3 = _four(_fp8_pair)
INT8_0, INT8_1, INT8_2, INT8_3 = _four(_int8_pair)
INT4_0, INT4_1, INT4_2, INT4_3 = _four(_int4_pair)
INT4_4, INT4_5, INT4_6, INT4_7 = _four(lambda i: _int4_pair(i + 4))
COLUMN_0, COLUMN_1, COLUMN_2, COLUMN_3 = _four(_column_pair)


@triton.jit
def _bytes(words, INDEX: tl.constexpr, CODE: tl.constexpr, FP8: tl.constexpr, dtype: tl.constexpr):
    """Byte INDEX of each word as a number."""
    if dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(CODE, "=r,r,r", [words], tl.bfloat16, is_pure=True, pack=2)
    byte = (words >> (8 * INDEX)) & 255
    if FP8:
        bits = (byte & 128) << 24 | (byte & 127) << 20
        return (bits.to(tl.float32, bitcast=True) * FP8_STEP).to(dtype)
    return ((byte ^ 128) - 128).to(dtype)


@triton.jit
def _nibbles(words, INDEX: tl.constexpr, CODE: tl.constexpr, dtype: tl.constexpr):
    """Value INDEX of each word; plus 128 in bfloat16."""
    if dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(CODE, "=r,r,r", [words], tl.bfloat16, is_pure=True, pack=2)
    return ((words >> (4 * INDEX)) & 15).to(dtype)


@triton.jit
def _column(x, words, at, inside, INDEX: tl.constexpr, CODE: tl.constexpr):
    """Column INDEX of each word of x [words, rows]."""
    if x.dtype.element_ty == tl.bfloat16:
        return tl.inline_asm_elementwise(CODE, "=r,l,l", [words], tl.bfloat16, is_pure=True, pack=2)
    return tl.load(x + at * 4 + INDEX, mask=inside, other=0.0)


@triton.jit
def _bytes_dot(words, x, columns, at, inside, acc, FP8: tl.constexpr, PRECISION: tl.constexpr):
    dtype: tl.constexpr = x.dtype.element_ty
    first = _bytes(words, 0, FP8_0 if FP8 else INT8_0, FP8, dtype)
    acc = add_dot(first, _column(x, columns, at, inside, 0, COLUMN_0), acc, PRECISION)
    second = _bytes(words, 1, FP8_1 if FP8 else INT8_1, FP8, dtype)
    acc = add_dot(second, _column(x, columns, at, inside, 1, COLUMN_1), acc, PRECISION)
    third = _bytes(words, 2, FP8_2 if FP8 else INT8_2, FP8, dtype)
    acc = add_dot(third, _column(x, columns, at, inside, 2, COLUMN_2), acc, PRECISION)
    fourth = _bytes(words, 3, FP8_3 if FP8 else INT8_3, FP8, dtype)
    return add_dot(fourth, _column(x, columns, at, inside, 3, COLUMN_3), acc, PRECISION)


@triton.jit
def _group_dot(words, x, low, high, at, inside, HALF: tl.constexpr, PRECISION: tl.constexpr):
    """Sums of one group of int4 with its zeros not subtracted.

    Args:
        low, high: 64-bit words of x with the halves of the group's columns.
    """
    dtype: tl.constexpr = x.dtype.element_ty
    part = _nibbles(words, 0, INT4_0, dtype)
    acc = tl.dot(part, _column(x, low, at, inside, 0, COLUMN_0), input_precision=PRECISION)
    part = _nibbles(words, 2, INT4_2, dtype)
    acc = add_dot(part, _column(x, low, at, inside, 1, COLUMN_1), acc, PRECISION)
    part = _nibbles(words, 4, INT4_4, dtype)
    acc = add_dot(part, _column(x, low, at, inside, 2, COLUMN_2), acc, PRECISION)
    part = _nibbles(words, 6, INT4_6, dtype)
    acc = add_dot(part, _column(x, low, at, inside, 3, COLUMN_3), acc, PRECISION)
    part = _nibbles(words, 1, INT4_1, dtype)
    acc = add_dot(part, _column(x, high, at + HALF, inside, 0, COLUMN_0), acc, PRECISION)
    part = _nibbles(words, 3, INT4_3, dtype)
    acc = add_dot(part, _column(x, high, at + HALF, inside, 1, COLUMN_1), acc, PRECISION)
    part = _nibbles(words, 5, INT4_5, dtype)
    acc = add_dot(part, _column(x, high, at + HALF, inside, 2, COLUMN_2), acc, PRECISION)
    part = _nibbles(words, 7, INT4_7, dtype)
    return add_dot(part, _column(x, high, at + HALF, inside, 3, COLUMN_3), acc, PRECISION)


@triton.jit
def _column_sums(x, low, high, at, inside, BN: tl.constexpr, HALF: tl.constexpr, PRECISION: tl.constexpr):
    """Sums of the group's columns of x, for each of BN rows of the result. Arguments: as of `_group_dot`."""
    ones = tl.full((BN, HALF), 1.0, x.dtype.element_ty)
    acc = tl.dot(ones, _column(x, low, at, inside, 0, COLUMN_0), input_precision=PRECISION)
    acc = add_dot(ones, _column(x, low, at, inside, 1, COLUMN_1), acc, PRECISION)
    acc = add_dot(ones, _column(x, low, at, inside, 2, COLUMN_2), acc, PRECISION)
    acc = add_dot(ones, _column(x, low, at, inside, 3, COLUMN_3), acc, PRECISION)
    acc = add_dot(ones, _column(x, high, at + HALF, inside, 0, COLUMN_0), acc, PRECISION)
    acc = add_dot(ones, _column(x, high, at + HALF, inside, 1, COLUMN_1), acc, PRECISION)
    acc = add_dot(ones, _column(x, high, at + HALF, inside, 2, COLUMN_2), acc, PRECISION)
    return add_dot(ones, _column(x, high, at + HALF, inside, 3, COLUMN_3), acc, PRECISION)


@triton.jit
def _add_group(acc, part, sums, scale, zeros, at, n, dtype: tl.constexpr):
    """acc plus a group's sums less its zeros, times its scales. at, n: as of `group_terms`."""
    by, zero = group_terms(scale, zeros, at, n)
    zero += 128 if dtype == tl.bfloat16 else 0
    zero = zero.to(tl.float32)[:, None].broadcast_to(part.shape)
    return tl.fma(tl.fma(sums, -zero, part), by[:, None].broadcast_to(part.shape), acc)


@triton.jit(do_not_specialize=["M", "TILES"])
def word_kernel(
    x, x_words, values, scale, zeros, out, M, N, K, ROWS, x_stride, TILES,
    BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, FP8: tl.constexpr, INT4: tl.constexpr,
    GATED: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A tile of BN weight rows times all of x, in float32 sums. If GATED, N is half of the weight's ROWS.

    Args:
        x_words: x as 64-bit words; x_stride of them a row.
        values: words; K of them a row. scale, zeros: of int4 as words, [groups, ROWS / 2] and [groups, ROWS / 4].
        TILES: tiles of BK words that a program multiplies; for int4 a tile is a group.
        PDL, EARLY: as `product_options` returns them.
    """
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    # Indices beyond the last row read the last row; their results are not stored.
    rows = tl.minimum(n, N - 1)
    m = tl.arange(0, BM)
    k = tl.arange(0, BK)
    first = tl.program_id(1) * TILES
    dtype: tl.constexpr = x.dtype.element_ty
    PER_TILE: tl.constexpr = 2 * BK if INT4 else BK  # words of x
    inside = (m < M)[None, :]
    place = values + rows.to(tl.int64)[:, None] * K + k[None, :]
    at = m[None, :] * x_stride + k[:, None]
    up_place = place + N.to(tl.int64) * K
    if PDL:
        if EARLY:
            tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    acc = tl.zeros((BN, BM), tl.float32)
    if GATED:
        up = tl.zeros((BN, BM), tl.float32)
    for tile in tl.range(first, first + TILES, num_stages=STAGES):
        words = tl.load(place + tile * BK)
        own = at + tile * PER_TILE
        low = tl.load(x_words + own, mask=inside, other=0)
        if INT4:
            high = tl.load(x_words + own + BK, mask=inside, other=0)
            sums = _column_sums(x, low, high, own, inside, BN, BK, PRECISION)
            group = tile * (ROWS // 4)
            part = _group_dot(words, x, low, high, own, inside, BK, PRECISION)
            acc = _add_group(acc, part, sums, scale, zeros, group, rows, dtype)
            if GATED:
                part = _group_dot(tl.load(up_place + tile * BK), x, low, high, own, inside, BK, PRECISION)
                up = _add_group(up, part, sums, scale, zeros, group, rows + N, dtype)
        else:
            acc = _bytes_dot(words, x, low, own, inside, acc, FP8, PRECISION)
            if GATED:
                up = _bytes_dot(tl.load(up_place + tile * BK), x, low, own, inside, up, FP8, PRECISION)
    if not INT4:
        acc *= tl.load(scale + rows)[:, None]
        if GATED:
            up *= tl.load(scale + rows + N)[:, None]
    if GATED:
        acc = silu_product(acc, up, dtype)
    to = (tl.program_id(1) * M + m)[None, :] * N + n[:, None]
    tl.store(out + to, acc.to(out.dtype.element_ty), mask=(n < N)[:, None] & inside)


def word_tiles(weight: QuantizedMatrix, n_rows: int, *, gated: bool = False) -> WordTiles | None:
    """Tile sizes for n_rows rows of x; None for a weight that this kernel does not multiply.

    The sums of a row have the same bits beside 7 and beside 63 others.
    """
    N, K = weight.shape
    rows, warps = (32, 4 if n_rows > 16 else 2) if gated or n_rows > 8 else (64, 4)
    if weight.zeros is None and (N, K) in SPEECH_TILES:
        words, splits, stages = SPEECH_TILES[N, K]
        return WordTiles(32, words, 1 if gated else splits, stages, 4 if n_rows > 16 else 2)
    if weight.zeros is None:
        n_words, words = K // 4, 32
        while n_words % words:
            words //= 2
        if K % 4 or words < 16:
            return None
    elif weight.group == 8 * INT4_WORDS and N % 4 == 0:
        n_words, words = K // 8, INT4_WORDS
    else:
        return None
    least = MIN_SPLIT_WORDS // words
    splits = 1 if gated else count_splits(triton.cdiv(N, 64), n_words // words, enough=MIN_PROGRAMS, least_tiles=least)
    return WordTiles(rows, words, splits, 4, warps)


def word_product(x: Tensor, weight: QuantizedMatrix, out: Tensor, plan: WordTiles, *, gated: bool = False) -> None:
    """Write x [M, K] times weight [N, K] to out, [splits, M, N], or if gated [M, N / 2]."""
    launch = word_launch(x, weight, out, plan, gated=gated)
    word_kernel[launch.grid](*launch.args, **launch.options)


def word_launch(x: Tensor, weight: QuantizedMatrix, out: Tensor, plan: WordTiles, *, gated: bool = False) -> Launch:
    """The call of `word_product`."""
    M, N = len(x), out.shape[-1]
    assert all(one.is_contiguous() for one in weight.tensors()), "expected contiguous rows of the weight"
    if x.stride(1) != 1 or x.stride(0) % 4 or x.storage_offset() % 4:
        x = x.clone(memory_format=torch.contiguous_format)
    is_int4 = weight.zeros is not None
    values = _words(weight.values)
    n_tiles = values.shape[1] // plan.words
    assert n_tiles % plan.splits == 0, f"splits: expected a divisor of {n_tiles} tiles, got {plan.splits}"
    exact = x.dtype == torch.float32 and not torch.backends.cuda.matmul.allow_tf32
    return Launch(
        (triton.cdiv(N, plan.rows), plan.splits),
        (
            x, x.view(torch.int64), values, _words(weight.scale) if is_int4 else weight.scale,
            weight.scale if weight.zeros is None else _words(weight.zeros), out, M, N, values.shape[1], len(weight),
            x.stride(0) // 4, n_tiles // plan.splits,
        ),
        {
            "BN": plan.rows, "BM": 8 if M <= 8 else max(16, triton.next_power_of_2(M)), "BK": plan.words,
            "STAGES": plan.stages, "FP8": weight.kind == "fp8", "INT4": is_int4, "GATED": gated,
            "PRECISION": "ieee" if exact else "tf32", "num_warps": plan.warps,
            **product_options(weight),
        },
    )  # fmt: skip


def _words(tensor: Tensor) -> Tensor:
    """Rows as 32-bit words."""
    return tensor.view(torch.uint8).view(torch.int32)
