"""Triton kernels of HiFT: convolutions over time and the operations between them, for several blocks in one launch.

Contains kernels over rows [B, L, C] (channels last) and tile sizes. Does not contain stages or weights (`hift_fused`).
Requires Triton.

Every convolution treats values beyond a row's length as zero, so these values may be undefined.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from models.kernels.launch import has_large_tiles, launch_options

SMALL_GRID = 264  # programs: two per multiprocessor of an H200
BLOCK_ROWS = 16  # rows per program of the element-wise kernels


class ConvTiles(NamedTuple):
    """Tile sizes of one launch of convolutions."""

    rows: int
    columns: int
    inner: int
    warps: int
    stages: int


class ConvStep(NamedTuple):
    """One convolution of each of J blocks of the same width and dilation."""

    weight: Tensor  # [sum of taps, C, C]: block and tap, output channel, input channel
    bias: Tensor  # [J, C]
    taps: Tensor  # [J] int32 kernel sizes
    first: Tensor  # [J] int32 index of each block's first tap in `weight`
    dilation: int


@triton.jit
def _snake(x, alpha):
    """As `hift.Snake`. The square of the sine has a period of half a turn, which a short series covers; tl.sin compiles
    to much more code.
    """
    turns = x * alpha * 0.3183098861837907
    r = turns - tl.floor(turns + 0.5)
    s = r * r
    series = 0.08214588661112823 + s * -0.00737043094571435
    series = 2.550164039877345 + s * (-0.5992645293207921 + s * series)
    sine = r * (3.141592653589793 + s * (-5.16771278004997 + s * series))
    return x + sine * sine * (1.0 / (alpha + 1e-9))


# The kernels are not specialized for numbers that differ between buckets.
@triton.jit(do_not_specialize=["B", "L", "J", "stream_block", "dilation"])
def _conv_kernel(
    x, lengths, weight, bias, taps, first, alpha, stream, stream_out, out, B, L, J, stream_block, dilation,
    C: tl.constexpr, ADD: tl.constexpr, SNAKE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # The programs of the last block start first, because it has the most taps.
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
def _activate_kernel(
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
    # With a shift of 1 the first row mirrors the row after the next one, as reflection padding does.
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
def _average_kernel(
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


def conv_tiles(L: int, C: int, n_groups: int, n_bytes: int, *, is_large: bool) -> ConvTiles:
    """Tile sizes for rows of L frames and C channels.

    Args:
        n_groups: batch rows times blocks.
        n_bytes: size of one weight element.
        is_large: programs may hold large tiles, see `has_large_tiles`.
    """
    width = max(triton.next_power_of_2(C), 16)
    inner = min(width, 64 if n_bytes > 2 else 128)
    if triton.cdiv(L, 64) * triton.cdiv(C, 64) * n_groups > SMALL_GRID:
        return ConvTiles(128, min(width, 128), min(inner, 64 if n_bytes <= 2 or is_large else 32), 8, 3)
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
    """One convolution of each block, the residual connection and the next activation.

    Args:
        x: [J, B, L, C] in the weights' type.
        lengths: [B] int64 valid frames.
        step: the convolutions.
        alpha: [J, C] float32 of the activation that follows; None = no activation.
        stream: [J, B, L, C], or [1, B, L, C] for all blocks, float32 residual stream; None = no residual connection.
        tiles: None = `conv_tiles`.
    Returns: the activated output [J, B, L, C], or None without `alpha`; the sum with the stream [J, B, L, C] float32,
        or None without `stream`.
    """
    _, B, L, C = x.shape
    J = len(step.taps)
    tiles = tiles or conv_tiles(L, C, B * J, x.element_size(), is_large=has_large_tiles(x.device))
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


def activate(
    x: Tensor, bias: Tensor, alpha: Tensor, L: int, dtype: torch.dtype, added: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The input of J residual blocks: x + bias + added, and its activation for each block.

    Args:
        x: [B, L, C], or [B, L - 1, C], which is extended by reflection at the front.
        bias: [C].
        alpha: [J, C] float32 of the blocks' first activations.
        L: frames of the result.
        dtype: of the activated result.
        added: [B, L, C] float32; None = 0.
    Returns: the sum [1, B, L, C] float32; the activated sum [J, B, L, C].
    """
    B, n_rows, C = x.shape
    stream = torch.empty(1, B, L, C, dtype=torch.float32, device=x.device)
    out = torch.empty(len(alpha), B, L, C, dtype=dtype, device=x.device)
    _activate_kernel[(triton.cdiv(B * L, BLOCK_ROWS),)](
        x, bias, stream if added is None else added, alpha, stream, out, B, L, n_rows,
        C=C, ADD=added is not None, SHIFT=L - n_rows, J=len(alpha), ROWS=BLOCK_ROWS,
        BLOCK=triton.next_power_of_2(C), **launch_options(x.device),
    )  # fmt: skip
    return stream, out


def average(x: Tensor, bias: Tensor | None, lengths: Tensor, slope: float, dtype: torch.dtype) -> Tensor:
    """Leaky ReLU of the mean over blocks plus bias, [B, L, C]; zero beyond the lengths.

    Args:
        x: [J, B, L, C].
        bias: [C]; None = 0.
        lengths: [B] int64 valid frames.
        slope: of the leaky ReLU below zero.
        dtype: of the result.
    """
    J, B, L, C = x.shape
    out = torch.empty(B, L, C, dtype=dtype, device=x.device)
    _average_kernel[(triton.cdiv(B * L, BLOCK_ROWS),)](
        x, x if bias is None else bias, lengths, out, B, L,
        C=C, BIAS=bias is not None, J=J, SLOPE=slope, ROWS=BLOCK_ROWS, BLOCK=triton.next_power_of_2(C),
        **launch_options(x.device),
    )  # fmt: skip
    return out


def _precision(x: Tensor) -> str:
    return "tf32" if torch.backends.cudnn.allow_tf32 or x.element_size() <= 2 else "ieee"
