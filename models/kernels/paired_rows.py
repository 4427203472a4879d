"""Rows as pairs of 8-bit numbers, which tensor cores multiply with quantised weights as these are stored.

A number x of a group of 128 columns is high + low in steps of the group, a power of two that follows from the group's
largest number:

| weight | high, low | x / step | error at most |
|---|---|---|---|
| int8, int4 | int8 | 256 high + low, a whole number up to 2 ** 14 | 2 ** -14 of the largest number |
| fp8 | float8_e4m3fn | high + low / 16, up to 2 ** 8 | 2 ** -16 of the largest number |

So bfloat16 numbers from 1/64 of the largest on are exact, for fp8 from 1/8192 on. Numbers of groups whose largest is
below 2 ** -97 lose more, down to all of them. Requires Triton.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from models.checkpoint.precision import Kind
from models.checkpoint.quantized import QuantizedMatrix
from models.kernels.launch import SMALL_WEIGHT, launch_options, multiplies_pairs
from models.kernels.skinny_gemm import MAX_ROWS

GROUP = 128  # columns with one step
LEAST = tl.constexpr(30)  # exponent of the largest number of a group, as float32 has it, of a group of zeros
ROUND = tl.constexpr(12582912.0)  # 1.5 * 2 ** 23: adding it rounds a number below 2 ** 22 to a whole one
_GROUPS = 4  # of a program


class PairedRows(NamedTuple):
    """Rows [..., K] as pairs.

    Attributes:
        values: [..., 2, K], the high numbers first; int8 or float8_e4m3fn.
        steps: [K / 128, M] float32, M the product of the leading dimensions.
        sums: [K / 128, M] int32: sums of x / step, which the zeros of int4 multiply; not read with other
            weights.
    """

    values: Tensor
    steps: Tensor
    sums: Tensor

    @property
    def shape(self) -> torch.Size:
        """Shape of the rows."""
        return self.values.shape[:-2] + self.values.shape[-1:]

    @property
    def n_rows(self) -> int:
        return self.steps.shape[1]

    @property
    def is_fp8(self) -> bool:
        return self.values.dtype is torch.float8_e4m3fn


@triton.jit
def store_pairs(x, values, steps, sums, m, k, M, K, inside, FP8: tl.constexpr, GROUPS: tl.constexpr):
    """Store numbers of one row as pairs.

    Args:
        x: [GROUPS * 128] float32, zeros outside.
        m, k: the row, and the first column.
        inside: whether each group exists, [GROUPS].
    """
    x = tl.reshape(x, (GROUPS, 128))
    # The largest bits are those of the largest number, or of infinity or NaN, which make the whole group NaN.
    exponent = tl.maximum(tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1) >> 23, LEAST)
    BITS: tl.constexpr = 7 if FP8 else 13  # of x / step, before the point, less one
    step = ((exponent - BITS) << 23).to(tl.float32, bitcast=True)
    step = tl.where(exponent == 255, float("nan"), step)
    x *= ((254 + BITS - exponent) << 23).to(tl.float32, bitcast=True)[:, None]
    whole = ((x + ROUND) - ROUND).to(tl.int32)
    if FP8:
        # Rounded to four bits as float32, which are exact in fp8; numbers too small for that lose up to 2 ** -10.
        bits = x.to(tl.int32, bitcast=True)
        rounded = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
        high = rounded.to(values.dtype.element_ty)
        low = ((x - rounded) * 16.0).to(values.dtype.element_ty)
    else:
        upper = (whole + 128) >> 8
        high, low = upper.to(tl.int8), (whole - upper * 256).to(tl.int8)
    group = tl.arange(0, GROUPS)
    to = values + m.to(tl.int64) * (2 * K) + k + (group[:, None] * 128 + tl.arange(0, 128)[None, :])
    tl.store(to, high, mask=inside[:, None])
    tl.store(to + K, low, mask=inside[:, None])
    place = (k // 128 + group) * M + m
    tl.store(steps + place, step, mask=inside)
    tl.store(sums + place, tl.sum(whole, 1), mask=inside)


@triton.jit(do_not_specialize=["M"])
def _pairs_kernel(
    x, values, steps, sums, M, K, x_stride, FP8: tl.constexpr, GROUPS: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Some groups of one row."""
    m, k = tl.program_id(0), tl.program_id(1) * (GROUPS * 128)
    column = k + tl.arange(0, GROUPS * 128)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    number = tl.load(x + m.to(tl.int64) * x_stride + column, mask=column < K, other=0.0).to(tl.float32)
    inside = k + tl.arange(0, GROUPS) * 128 < K
    store_pairs(number, values, steps, sums, m, k, M, K, inside, FP8, GROUPS)


def empty_pairs(shape: Sequence[int], kind: Kind, device: torch.device) -> PairedRows:
    """Pairs without values for rows of `shape`, [..., K], that a weight of `kind` multiplies."""
    *lead, K = shape
    n_rows, dtype = math.prod(lead), torch.float8_e4m3fn if kind == "fp8" else torch.int8
    return PairedRows(
        torch.empty(*lead, 2, K, dtype=dtype, device=device),
        torch.empty(K // GROUP, n_rows, dtype=torch.float32, device=device),
        torch.empty(K // GROUP, n_rows, dtype=torch.int32, device=device),
    )


def paired_rows(x: Tensor, kind: Kind) -> PairedRows:
    """The pairs of x [..., K], rows contiguous, K a multiple of 128, for a weight of `kind`."""
    pairs, K = empty_pairs(x.shape, kind, x.device), x.shape[-1]
    rows = x.reshape(-1, K)
    assert K % GROUP == 0 and rows.stride(1) == 1, f"x: expected contiguous rows of groups of {GROUP}, got {x.shape}"
    if len(rows):
        grid = (len(rows), triton.cdiv(K, _GROUPS * GROUP))
        _pairs_kernel[grid](
            rows, *pairs, len(rows), K, rows.stride(0), FP8=pairs.is_fp8, GROUPS=_GROUPS, num_warps=_GROUPS,
            **launch_options(x.device, grid[0] * grid[1]),
        )  # fmt: skip
    return pairs


def takes_pairs(weight: Tensor | QuantizedMatrix, n_rows: int, dtype: torch.dtype) -> bool:
    """Whether `weight` multiplies n_rows rows of `dtype` as pairs.

    A product of a small weight takes about as long as making the pairs.
    """
    if not isinstance(weight, QuantizedMatrix) or dtype is not torch.bfloat16 or n_rows > MAX_ROWS:
        return False
    N, K = weight.shape
    if not multiplies_pairs(weight.device) or N * K <= SMALL_WEIGHT or K % GROUP:
        return False
    return weight.zeros is None or (weight.group == GROUP and N % 4 == 0)
