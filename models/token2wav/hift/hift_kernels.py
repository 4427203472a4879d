"""Triton kernels of HiFT: convolutions along time with what lies between them, for several blocks in one launch.

Knows rows [B, L, C] with channels last, their lengths, taps and tiles. Does not know stages or weights (`hift_fused`).
Import only where Triton is.

What lies beyond a row's length counts as zero to every convolution, and may hold anything.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from models.kernels.launch import launch_options

SMALL_GRID = 264  # programs, two for each multiprocessor of an H200
BLOCK_ROWS = 16  # of a program that goes by element


class ConvTiles(NamedTuple):
    rows: int
    columns: int
    inner: int
    warps: int
    stages: int


class ConvStep(NamedTuple):
    """One convolution of each of J blocks of the same width and dilation."""

    weight: Tensor  # [sum of taps, C, C] by block, tap, output and input channel
    bias: Tensor  # [J, C]
    taps: Tensor  # [J] int32
    first: Tensor  # [J] int32, where a block's taps begin in `weight`
    dilation: int


@triton.jit
def _snake(x, alpha):
    """As `hift.Snake`. The sine's square repeats every half turn, which a short series covers; tl.sin is long code."""
    turns = x * alpha * 0.3183098861837907
    r = turns - tl.floor(turns + 0.5)
    s = r * r
    series = 0.08214588661112823 + s * -0.00737043094571435
    series = 2.550164039877345 + s * (-0.5992645293207921 + s * series)
    sine = r * (3.141592653589793 + s * (-5.16771278004997 + s * series))
    return x + sine * sine * (1.0 / (alpha + 1e-9))


# Numbers that differ between buckets are kept out of what a kernel is compiled for.
@triton.jit(do_not_specialize=["B", "L", "J", "stream_block", "dilation"])
def _conv_kernel(
    x, lengths, weight, bias, taps, first, alpha, stream, stream_out, out, B, L, J, stream_block, dilation,
    C: tl.constexpr, ADD: tl.constexpr, SNAKE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # The last block has the most taps, so its programs start first.
    block, b = J - 1 - tl.program_id(2) // B, tl.program_id(2) % B
    n_taps, begin = tl.load(taps + block), tl.load(first + block)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    length = tl.load(lengths + b)
    rows = x + (block * B + b).to(tl.int64) * L * C
    matrix = weight + begin.to(tl.int64) * C * C
    PARTS: tl.constexpr = (C + BK - 1) // BK
    acc = tl.zeros((BM, BN), tl.float32)
    for step in range(0, n_taps * PARTS, 1):
        tap, c = step // PARTS, step % PARTS * BK + k
        at = m + (tap - n_taps // 2) * dilation
        seen = (at >= 0) & (at < length)
        values = tl.load(rows + at[:, None] * C + c[None, :], mask=seen[:, None] & (c < C)[None, :], other=0.0)
        by = tl.load(
            matrix + tap * C * C + n[None, :] * C + c[:, None], mask=(n < C)[None, :] & (c < C)[:, None], other=0.0
        )
        acc = tl.dot(values, by, acc, input_precision=PRECISION)
    inside = (m < L)[:, None] & (n < C)[None, :]
    y = acc + tl.load(bias + block * C + n, mask=n < C, other=0.0).to(tl.float32)[None, :]
    within = m[:, None] * C + n[None, :]
    own = (block * B + b).to(tl.int64) * L * C + within
    if ADD:
        from_row = (block * stream_block + b).to(tl.int64) * L * C
        y += tl.load(stream + from_row + within, mask=inside, other=0.0)
        tl.store(stream_out + own, y, mask=inside)
    if SNAKE:
        y = _snake(y, tl.load(alpha + block * C + n, mask=n < C, other=1.0)[None, :])
        tl.store(out + own, y.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["B", "L", "n_rows"])
def _enter_kernel(
    x, bias, added, alpha, stream, out, B, L, n_rows,
    C: tl.constexpr, ADD: tl.constexpr, SHIFT: tl.constexpr, J: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, BLOCK)[None, :]
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    inside = (m < B * L)[:, None] & (c < C)
    # With a shift the first row is the mirror image of the one after its neighbour.
    t = tl.abs(m % L - SHIFT)
    source = ((m // L) * n_rows + t).to(tl.int64)[:, None] * C + c
    place = m.to(tl.int64)[:, None] * C + c
    y = tl.load(x + source, mask=inside, other=0.0).to(tl.float32)
    y += tl.load(bias + c, mask=c < C, other=0.0).to(tl.float32)
    if ADD:
        y += tl.load(added + place, mask=inside, other=0.0)
    tl.store(stream + place, y, mask=inside)
    for block in tl.static_range(J):
        value = _snake(y, tl.load(alpha + block * C + c, mask=c < C, other=1.0))
        to = out + block * (B * L).to(tl.int64) * C + place
        tl.store(to, value.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["B", "L"])
def _leave_kernel(
    x, bias, lengths, out, B, L,
    C: tl.constexpr, BIAS: tl.constexpr, J: tl.constexpr, SLOPE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, BLOCK)[None, :]
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    stored = (m < B * L)[:, None] & (c < C)
    length = tl.load(lengths + m // L, mask=m < B * L, other=0)
    place = m.to(tl.int64)[:, None] * C + c
    y = tl.load(x + place, mask=stored, other=0.0).to(tl.float32)
    for block in tl.static_range(1, J):
        y += tl.load(x + block * (B * L).to(tl.int64) * C + place, mask=stored, other=0.0)
    y /= J
    if BIAS:
        y += tl.load(bias + c, mask=c < C, other=0.0).to(tl.float32)
    y = tl.where(y > 0.0, y, y * SLOPE)
    y = tl.where((m % L < length)[:, None], y, 0.0)
    tl.store(out + place, y.to(out.dtype.element_ty), mask=stored)


def conv_tiles(L: int, C: int, n_groups: int, n_bytes: int) -> ConvTiles:
    """Tiles for rows of L frames and C channels, `n_groups` = batch rows times blocks."""
    width = max(triton.next_power_of_2(C), 16)
    inner = min(width, 64 if n_bytes > 2 else 128)
    if triton.cdiv(L, 64) * triton.cdiv(C, 64) * n_groups > SMALL_GRID:
        return ConvTiles(128, min(width, 128), min(inner, 64), 8, 3)
    if triton.cdiv(L, 64) * triton.cdiv(C, 64) * n_groups > SMALL_GRID // 3:
        return ConvTiles(64, min(width, 64), inner, 4, 3)
    return ConvTiles(32, min(width, 32), inner, 4, 4)


def conv(
    x: Tensor,
    lengths: Tensor,
    step: ConvStep,
    alpha: Tensor | None,
    stream: Tensor | None = None,
    tiles: ConvTiles | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """One convolution of each block, then what the next one reads.

    Args:
        x: [J, B, L, C] in the weights' type. lengths: [B] int64.
        alpha: [J, C] float32 of the activation behind it; None = there is none.
        stream: [J, B, L, C], or [1, B, L, C] for all blocks, float32, to add.
    Returns: the activated rows [J, B, L, C]; the sum with the stream, float32. What was not asked for is None.
    """
    _, B, L, C = x.shape
    J = len(step.taps)
    tiles = tiles or conv_tiles(L, C, B * J, x.element_size())
    out = None if alpha is None else torch.empty_like(x)
    total = None if stream is None else torch.empty(J, B, L, C, dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(L, tiles.rows), triton.cdiv(C, tiles.columns), J * B)
    _conv_kernel[grid](
        x, lengths, step.weight, step.bias, step.taps, step.first, step.bias if alpha is None else alpha,
        x if stream is None else stream, x if total is None else total, x if out is None else out,
        B, L, J, 0 if stream is None or len(stream) == 1 else B, step.dilation,
        C=C, ADD=stream is not None, SNAKE=alpha is not None, BM=tiles.rows, BN=tiles.columns, BK=tiles.inner,
        PRECISION=_precision(x), num_warps=tiles.warps, num_stages=tiles.stages, **launch_options(x.device),
    )  # fmt: skip
    return out, total


def enter(
    x: Tensor, bias: Tensor, alpha: Tensor, L: int, dtype: torch.dtype, added: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """What blocks start from: x [B, L or L - 1, C] plus bias [C] plus `added` [B, L, C].

    Of one frame less than L, a mirrored one comes in front.
    Returns: the sum [1, B, L, C] float32, and activated for each of J blocks, alpha [J, C]: [J, B, L, C] of `dtype`.
    """
    B, n_rows, C = x.shape
    stream = torch.empty(1, B, L, C, dtype=torch.float32, device=x.device)
    out = torch.empty(len(alpha), B, L, C, dtype=dtype, device=x.device)
    _enter_kernel[(triton.cdiv(B * L, BLOCK_ROWS),)](
        x, bias, stream if added is None else added, alpha, stream, out, B, L, n_rows,
        C=C, ADD=added is not None, SHIFT=L - n_rows, J=len(alpha), ROWS=BLOCK_ROWS,
        BLOCK=triton.next_power_of_2(C), **launch_options(x.device),
    )  # fmt: skip
    return stream, out


def leave(x: Tensor, bias: Tensor | None, lengths: Tensor, slope: float, dtype: torch.dtype) -> Tensor:
    """The mean of blocks x [J, B, L, C] plus bias [C], leaky below zero, zero beyond the lengths: [B, L, C]."""
    J, B, L, C = x.shape
    out = torch.empty(B, L, C, dtype=dtype, device=x.device)
    _leave_kernel[(triton.cdiv(B * L, BLOCK_ROWS),)](
        x, x if bias is None else bias, lengths, out, B, L,
        C=C, BIAS=bias is not None, J=J, SLOPE=slope, ROWS=BLOCK_ROWS, BLOCK=triton.next_power_of_2(C),
        **launch_options(x.device),
    )  # fmt: skip
    return out


def _precision(x: Tensor) -> str:
    return "tf32" if torch.backends.cudnn.allow_tf32 or x.element_size() <= 2 else "ieee"
