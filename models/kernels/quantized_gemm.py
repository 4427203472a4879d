"""Products with quantised weights: Triton kernels that dequantise them in registers, and the library's for many rows.

Up to 64 rows, large weights multiply pairs of 8-bit numbers (`models.kernels.paired_gemm`) on GPUs that have such
products, and others are read as words (`models.kernels.word_gemm`) where their shape allows it. Values are whole
numbers or fp8 numbers, which bfloat16 represents exactly, so up to 128 rows a weight is not rounded a second time:
scales multiply float32 sums, of all columns (int8, fp8) or of a group of columns (int4). With more rows the time is
that of computing, not of reading weights, and a product in registers takes 1.6 to 5 times as long as the library's:
weights are dequantised to memory first. The bits of a row depend on that row and the weights alone, above 64 rows also
on the number of rows. Requires Triton.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from models.checkpoint.quantized import QuantizedMatrix
from models.kernels.launch import has_native_fp8, product_options
from models.kernels.paired_gemm import PairedTiles, paired_product, paired_tiles
from models.kernels.paired_rows import PairedRows, paired_rows, takes_pairs
from models.kernels.skinny_gemm import MAX_ROWS, TileSizes, sum_parts, tile_sizes
from models.kernels.tile_ops import add_dot, less_zero, silu_product, widened
from models.kernels.word_gemm import WordTiles, word_product, word_tiles

WIDE_ROWS = 128  # of x; with more, the weight is dequantised to memory
PAIR_ROWS = 512  # of x, up to which two fp8 rows for each row of x take less time than that
MAX_SPLIT_ROWS = 8192  # rows of a weight up to which a product of up to WIDE_ROWS rows is split

FewTiles = PairedTiles | WordTiles | TileSizes


class ManyTiles(NamedTuple):
    """How a product of many rows is split: rows and columns of a program's part of the result."""

    rows: int
    columns: int
    inner: int
    stages: int = 3
    warps: int = 8
    splits: int = 1  # programs that share a part of the result, each with an equal share of the columns


@triton.jit
def _group_dot(packed, zero, low_x, high_x, dtype: tl.constexpr, PRECISION: tl.constexpr):
    """Product of one group of int4 values [BN, half] with both halves of the columns of x [half, BM], unscaled."""
    total = tl.dot(less_zero(packed & 15, zero, dtype), low_x, input_precision=PRECISION)
    return add_dot(less_zero(packed >> 4, zero, dtype), high_x, total, PRECISION)


@triton.jit(do_not_specialize=["M"])
def _few_kernel(
    x, values, scale, zeros, out, M, N, K, ROWS, x_stride,
    BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, TILES: tl.constexpr, INT4: tl.constexpr,
    GATED: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One tile of weight rows times all of x, in float32 sums. If GATED, N is half of the weight's ROWS.

    A tile of int4 is one group: BK bytes with 2 BK columns. PDL, EARLY: as `product_options` returns them.
    """
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    # Indices beyond the last row read the last row; their results are not stored.
    rows = tl.minimum(n, N - 1).to(tl.int64)
    if PDL:
        if EARLY:
            tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    m = tl.arange(0, BM)
    k = tl.arange(0, BK)
    dtype: tl.constexpr = x.dtype.element_ty
    read = (m < M)[:, None]
    acc = tl.zeros((BN, BM), tl.float32)
    if GATED:
        up = tl.zeros((BN, BM), tl.float32)
    first = tl.program_id(1) * TILES
    for tile in range(first, first + TILES):
        place = values + rows[:, None] * K + (tile * BK + k)[None, :]
        if INT4:
            column = x + m[:, None] * x_stride + (tile * 2 * BK + k)[None, :]
            low_x = tl.trans(tl.load(column, mask=read, other=0.0))
            high_x = tl.trans(tl.load(column + BK, mask=read, other=0.0))
            group = tile * ROWS + rows
            zero = tl.load(zeros + group).to(tl.float32)[:, None]
            part = _group_dot(tl.load(place), zero, low_x, high_x, dtype, PRECISION)
            acc = tl.fma(part, tl.load(scale + group).to(tl.float32)[:, None].broadcast_to(BN, BM), acc)
            if GATED:
                zero = tl.load(zeros + group + N).to(tl.float32)[:, None]
                part = _group_dot(tl.load(place + N.to(tl.int64) * K), zero, low_x, high_x, dtype, PRECISION)
                up = tl.fma(part, tl.load(scale + group + N).to(tl.float32)[:, None].broadcast_to(BN, BM), up)
        else:
            columns = tl.load(x + m[:, None] * x_stride + (tile * BK + k)[None, :], mask=read, other=0.0)
            columns = tl.trans(columns)
            acc = add_dot(widened(tl.load(place), dtype), columns, acc, PRECISION)
            if GATED:
                up = add_dot(widened(tl.load(place + N.to(tl.int64) * K), dtype), columns, up, PRECISION)
    if not INT4:
        acc *= tl.load(scale + rows)[:, None]
        if GATED:
            up *= tl.load(scale + rows + N)[:, None]
    inside = (n < N)[:, None] & (m < M)[None, :]
    if GATED:
        acc = silu_product(acc, up, dtype)
    to = (tl.program_id(1) * M + m)[None, :] * N + n[:, None]
    tl.store(out + to, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M"])
def _many_kernel(
    x, values, scale, zeros, bias, out, M, N, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, TILES: tl.constexpr, INT4: tl.constexpr,
    BIAS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of x weight^T, or of its partial sums [splits, M, N].

    K: stored columns; TILES of BK of them in each split, for int4 groups as in `_few_kernel`.
    """
    # Neighbouring programs share rows of the weight, which are read once into the L2 cache.
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    rows = tl.minimum(n, N - 1).to(tl.int64)
    k = tl.arange(0, BK)
    dtype: tl.constexpr = x.dtype.element_ty
    read = (m < M)[:, None]
    x_stride = K * (2 if INT4 else 1)
    acc = tl.zeros((BM, BN), tl.float32)
    first = tl.program_id(2) * TILES
    for tile in range(first, first + TILES):
        raw = tl.load(values + rows[None, :] * K + (tile * BK + k)[:, None])
        if INT4:
            column = x + m.to(tl.int64)[:, None] * x_stride + (tile * 2 * BK + k)[None, :]
            group = tile * N + rows
            zero = tl.load(zeros + group).to(tl.float32)[None, :]
            low, high = less_zero(raw & 15, zero, dtype), less_zero(raw >> 4, zero, dtype)
            part = tl.dot(tl.load(column, mask=read, other=0.0), low, input_precision=PRECISION)
            part = add_dot(tl.load(column + BK, mask=read, other=0.0), high, part, PRECISION)
            acc = tl.fma(part, tl.load(scale + group).to(tl.float32)[None, :].broadcast_to(BM, BN), acc)
        else:
            column = x + m.to(tl.int64)[:, None] * x_stride + (tile * BK + k)[None, :]
            acc = add_dot(tl.load(column, mask=read, other=0.0), widened(raw, dtype), acc, PRECISION)
    if not INT4:
        acc *= tl.load(scale + rows)[None, :]
    if BIAS:
        acc += tl.load(bias + rows).to(tl.float32)[None, :]
    inside = (m < M)[:, None] & (n < N)[None, :]
    to = (tl.program_id(2) * M + m).to(tl.int64)[:, None] * N + n[None, :]
    tl.store(out + to, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _dequantize_kernel(
    values, scale, zeros, out, N, K, BN: tl.constexpr, BK: tl.constexpr, INT4: tl.constexpr
):  # fmt: skip
    """A tile of a weight. K: stored columns; a tile of int4 is one group: BK bytes with 2 BK columns."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    tile = tl.program_id(1)
    k = tile * BK + tl.arange(0, BK)
    dtype: tl.constexpr = out.dtype.element_ty
    inside = (n < N)[:, None] & (k < K)[None, :]
    rows = n.to(tl.int64)[:, None]
    raw = tl.load(values + rows * K + k[None, :], mask=inside, other=0)
    if INT4:
        zero = tl.load(zeros + tile * N + n, mask=n < N, other=0).to(tl.float32)[:, None]
        by = tl.load(scale + tile * N + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        to = out + rows * (2 * K) + (tile * BK + k)[None, :]
        tl.store(to, (less_zero(raw & 15, zero, tl.float32) * by).to(dtype), mask=inside)
        tl.store(to + BK, (less_zero(raw >> 4, zero, tl.float32) * by).to(dtype), mask=inside)
    else:
        by = tl.load(scale + n, mask=n < N, other=0.0)[:, None]
        tl.store(out + rows * K + k[None, :], (widened(raw, tl.float32) * by).to(dtype), mask=inside)


@triton.jit
def _fp8_rows_kernel(x, out, scale, M, K, BLOCK: tl.constexpr):
    """One row rounded to fp8, then what the rounding took away, each with a scale."""
    row = tl.program_id(0).to(tl.int64)
    top = 0.0
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        top = tl.maximum(top, tl.max(tl.abs(tl.load(x + row * K + k, mask=k < K, other=0.0).to(tl.float32))))
    by = tl.maximum(top / 448.0, 1e-30)
    tl.store(scale + row, by)
    top = 0.0
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        value = tl.load(x + row * K + k, mask=k < K, other=0.0).to(tl.float32)
        rounded = tl.minimum(tl.maximum(value / by, -448.0), 448.0).to(out.dtype.element_ty)
        tl.store(out + row * K + k, rounded, mask=k < K)
        top = tl.maximum(top, tl.max(tl.abs(value - rounded.to(tl.float32) * by)))
    rest = tl.maximum(top / 448.0, 1e-30)
    tl.store(scale + M + row, rest)
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        value = tl.load(x + row * K + k, mask=k < K, other=0.0).to(tl.float32)
        rounded = tl.minimum(tl.maximum(value / by, -448.0), 448.0).to(out.dtype.element_ty)
        value = (value - rounded.to(tl.float32) * by) / rest
        value = tl.minimum(tl.maximum(value, -448.0), 448.0)
        tl.store(out + (M + row) * K + k, value.to(out.dtype.element_ty), mask=k < K)


def quantized_tiles(weight: QuantizedMatrix) -> TileSizes:
    """Tile sizes for few rows. columns: of a tile's bytes; for int4 half a group."""
    N, K = weight.shape
    if weight.zeros is None:
        return tile_sizes(N, K)
    plan = tile_sizes(N, K)
    n_groups = len(weight.scale)
    splits = plan.splits
    while n_groups % splits:
        splits //= 2
    return plan._replace(columns=weight.group // 2, splits=splits)


def few_tiles(weight: QuantizedMatrix, n_rows: int, dtype: torch.dtype, *, gated: bool = False) -> FewTiles:
    """Tile sizes for n_rows rows of x, as pairs or in words where the weight allows it."""
    if takes_pairs(weight, n_rows, dtype):
        return paired_tiles(weight, n_rows, gated=gated)
    plan = word_tiles(weight, n_rows, gated=gated)
    if plan is not None:
        return plan
    return quantized_tiles(weight)._replace(splits=1) if gated else quantized_tiles(weight)


def few_product(
    x: Tensor | PairedRows, weight: QuantizedMatrix, out: Tensor, plan: FewTiles, *, gated: bool = False
) -> None:
    """Write x [M, K], M <= 64, times weight [N, K] to out, [splits, M, N], or if gated [M, N / 2]."""
    if isinstance(plan, PairedTiles):
        pairs = x if isinstance(x, PairedRows) else paired_rows(x, weight.kind)
        paired_product(pairs, weight, out, plan, gated=gated)
        return
    assert isinstance(x, Tensor), "x: expected a tensor for a weight that does not multiply pairs"
    M, (rows, K), N = len(x), weight.shape, out.shape[-1]
    assert M <= MAX_ROWS, f"rows: expected at most {MAX_ROWS}, got {M}"
    assert x.shape[1] == K, f"columns: expected {K}, got {x.shape[1]}"
    if isinstance(plan, WordTiles):
        word_product(x, weight, out, plan, gated=gated)
        return
    assert x.stride(1) == 1 and all(one.is_contiguous() for one in weight.tensors()), "expected contiguous rows"
    stored = weight.values.shape[1]
    _few_kernel[(triton.cdiv(N, plan.rows), plan.splits)](
        x, readable_values(weight), weight.scale, _zeros(weight), out, M, N, stored, rows, x.stride(0),
        BN=plan.rows, BM=max(16, triton.next_power_of_2(M)), BK=plan.columns,
        TILES=stored // plan.splits // plan.columns, INT4=weight.zeros is not None, GATED=gated,
        PRECISION=_precision(x), num_warps=plan.warps, num_stages=plan.stages,
        **product_options(weight),
    )  # fmt: skip


def quantized_parts(x: Tensor | PairedRows, weight: QuantizedMatrix) -> Tensor:
    """As `skinny_parts`: x [M, K], M <= 64. Returns: [P, M, N] float32, or [1, M, N] in x's dtype."""
    n_rows, dtype = _sizes(x)
    plan = few_tiles(weight, n_rows, dtype)
    out_type = dtype if plan.splits == 1 else torch.float32
    out = torch.empty(plan.splits, n_rows, len(weight), dtype=out_type, device=weight.device)
    if n_rows:
        few_product(x, weight, out, plan)
    return out


def _sizes(x: Tensor | PairedRows) -> tuple[int, torch.dtype]:
    """Number and type of the rows of x."""
    return (x.n_rows, torch.bfloat16) if isinstance(x, PairedRows) else (len(x), x.dtype)


def quantized_linear(x: Tensor, weight: QuantizedMatrix, bias: Tensor | None = None) -> Tensor:
    """The product x weight^T + bias for any number of rows.

    Args:
        x: [M, K], rows contiguous.
        weight: [N, K]; K a multiple of 16, for int4 of 32.
        bias: [N].
    Returns: [M, N] in x's dtype.
    """
    if len(x) > MAX_ROWS:
        return _many(x.contiguous(), weight, bias)
    parts = quantized_parts(x, weight)
    out = sum_parts(parts, x.dtype) if len(parts) > 1 else parts[0]
    return out if bias is None else out + bias


def quantized_gated_linear(x: Tensor | PairedRows, weight: QuantizedMatrix) -> Tensor:
    """As `skinny_gated_linear`: x [M, K], M <= 64, weight [2 I, K], the gate's rows first. Returns: [M, I]."""
    n_rows, dtype = _sizes(x)
    out = torch.empty(n_rows, len(weight) // 2, dtype=dtype, device=weight.device)
    if n_rows:
        few_product(x, weight, out, few_tiles(weight, n_rows, dtype, gated=True), gated=True)
    return out


def many_tiles(weight: QuantizedMatrix) -> ManyTiles:
    """Tile sizes of a product in registers; `inner` in bytes of the weight's rows. Measured on one H100."""
    is_int4, stored = weight.zeros is not None, weight.values.shape[1]
    inner = weight.group // 2 if is_int4 else 64
    while stored % inner:
        inner //= 2
    if len(weight) > MAX_SPLIT_ROWS:
        return ManyTiles(64, 128, inner, stages=3 if is_int4 else 4, warps=4)
    # Parts of a small result are too few for all multiprocessors.
    splits = 4
    while stored // inner % splits:
        splits //= 2
    return ManyTiles(128, 64, inner, stages=2 if is_int4 else 3, warps=4, splits=splits)


def _many(x: Tensor, weight: QuantizedMatrix, bias: Tensor | None) -> Tensor:
    (M, K), N = x.shape, len(weight)
    assert weight.shape[1] == K, f"columns: expected {weight.shape[1]}, got {K}"
    is_fp8 = weight.kind == "fp8" and x.dtype is torch.bfloat16 and has_native_fp8(x.device)
    if is_fp8 and M <= PAIR_ROWS and N % 16 == 0 and K % 16 == 0:
        rounded, scale = fp8_rows(x)
        first, rest = torch._scaled_mm(rounded, weight.values.T, scale, weight.scale[None], out_dtype=x.dtype).split(M)
        return first + rest if bias is None else first + rest + bias
    if M > WIDE_ROWS:
        return F.linear(x, dequantized(weight, x.dtype), bias)
    return many_product(x, weight, bias, many_tiles(weight))


def dequantize_tiles(weight: QuantizedMatrix) -> tuple[int, int]:
    """Rows and stored columns of a tile that is dequantised to memory; of int4 the columns of a group."""
    return (32, weight.group // 2) if weight.zeros is not None else (8, 512)


def dequantized(weight: QuantizedMatrix, dtype: torch.dtype) -> Tensor:
    """As `QuantizedMatrix.dequantized`, in one kernel. weight: rows contiguous. Returns: [N, K]."""
    N, K = weight.shape
    stored, is_int4 = weight.values.shape[1], weight.zeros is not None
    out = torch.empty(N, K, dtype=dtype, device=weight.values.device)
    rows, columns = dequantize_tiles(weight)
    _dequantize_kernel[(triton.cdiv(N, rows), triton.cdiv(stored, columns))](
        readable_values(weight), weight.scale, _zeros(weight), out, N, stored,
        BN=rows, BK=columns, INT4=is_int4, num_warps=4,
    )  # fmt: skip
    return out


def many_product(x: Tensor, weight: QuantizedMatrix, bias: Tensor | None, plan: ManyTiles) -> Tensor:
    """`quantized_linear` of contiguous rows x, dequantised in registers.

    The tiles of `plan` must divide the weight's columns. The bias of a split product is added after the sum is rounded.
    """
    M, N, stored = len(x), len(weight), weight.values.shape[1]
    assert x.is_contiguous() and stored % (plan.inner * plan.splits) == 0, f"tiles: expected whole ones, got {plan}"
    is_split = plan.splits > 1
    out = torch.empty(plan.splits, M, N, dtype=torch.float32 if is_split else x.dtype, device=x.device)
    own_bias = None if is_split else bias
    _many_kernel[(triton.cdiv(M, plan.rows), triton.cdiv(N, plan.columns), plan.splits)](
        x, readable_values(weight), weight.scale, _zeros(weight), out if own_bias is None else own_bias, out,
        M, N, stored,
        BM=plan.rows, BN=plan.columns, BK=plan.inner, TILES=stored // plan.splits // plan.inner,
        INT4=weight.zeros is not None, BIAS=own_bias is not None, PRECISION=_precision(x),
        # Tiles of larger numbers would not fit into the shared memory of smaller GPUs.
        num_warps=plan.warps, num_stages=plan.stages if x.element_size() <= 2 else 2,
    )  # fmt: skip
    if not is_split:
        return out[0]
    total = sum_parts(out, x.dtype)
    return total if bias is None else total + bias


def fp8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [M, K] as sums of two fp8 rows with a scale each, nearly as exact as bfloat16.

    Returns: values [2 M, K] float8_e4m3fn, the M rounded rows first, then what their rounding took away; scales
        [2 M, 1] float32.
    """
    M, K = x.shape
    out = torch.empty(2 * M, K, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(2 * M, 1, dtype=torch.float32, device=x.device)
    _fp8_rows_kernel[(M,)](x, out, scale, M, K, BLOCK=min(4096, triton.next_power_of_2(K)), num_warps=8)
    return out, scale


def readable_values(weight: QuantizedMatrix) -> Tensor:
    """Values as the kernels read them: fp8 as bytes, also on GPUs without instructions for fp8."""
    return weight.values.view(torch.uint8) if weight.kind == "fp8" else weight.values


def _zeros(weight: QuantizedMatrix) -> Tensor:
    return weight.scale if weight.zeros is None else weight.zeros


def _precision(x: Tensor) -> str:
    return "ieee" if x.dtype == torch.float32 and not torch.backends.cuda.matmul.allow_tf32 else "tf32"
