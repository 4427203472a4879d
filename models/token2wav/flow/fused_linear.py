"""Fused linear layers for few rows: a norm before the matrix product, activation and residual after it, in one kernel.

Contains the kernel and its tile sizes. Does not contain the networks that use it. Requires Triton.

For about a hundred rows, a matrix product takes less time than its launch and the loading of its weights. Therefore the
weights are read while the previous kernel runs (programmatic dependent launch), or prefetched where a program has too
little room for its part of them, and the inner axis is split among the warps of a program, which shortens each warp's
chain of additions.
"""

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, nn

from models.checkpoint.quantized import QuantizedMatrix
from models.kernels.launch import has_large_tiles, launch_options
from models.kernels.packed_linear import Linear, pack_biases, pack_weights
from models.kernels.quantized_gemm import quantized_linear, readable_values
from models.kernels.tile_ops import widened
from models.layers.quantized import QuantizedLinear, Weight

MAX_AHEAD = 4  # most tiles of a weight that a program reads ahead
MAX_ROWS = 128  # with more, the library's products and separate norms take less time


class LinearTiles(NamedTuple):
    """Tile sizes of one matrix product. Up to MAX_AHEAD tiles of `inner` that cover the inner axis mean no loop."""

    rows: int
    columns: int
    inner: int
    split: int  # parts of `inner` that are accumulated separately
    warps: int
    stages: int


class LinearWeights(NamedTuple):
    """Weight [N, K] and bias [N] of a linear layer, or of several packed along N. A quantised one needs a bias."""

    weight: Weight
    bias: Tensor | None

    @classmethod
    def of(cls, *layers: Linear) -> "LinearWeights":
        """The weights of one layer, or a packed copy of the weights of several layers with a bias.

        Quantised layers must have the same kind; their own weights become views of the packed one.
        """
        if len(layers) == 1:
            return cls(layers[0].weight, layers[0].bias)
        if any(isinstance(layer, QuantizedLinear) for layer in layers):
            return cls(pack_weights(layers), pack_biases(layers))
        weights = [layer.weight for layer in layers if isinstance(layer, nn.Linear)]
        return cls(torch.cat(weights), torch.cat([layer.bias for layer in layers if layer.bias is not None]))

    def product(self, a: Tensor) -> Tensor:
        """a [M, K] weight^T + bias for many rows, by PyTorch's product or, if quantised, `quantized_linear`."""
        if isinstance(self.weight, QuantizedMatrix):
            return quantized_linear(a, self.weight, self.bias)
        return F.linear(a, self.weight, self.bias)

    def product_with_gelu(self, a: Tensor) -> Tensor:
        """As `product`, then GELU in its tanh approximation. The layer must have a bias."""
        if isinstance(self.weight, QuantizedMatrix):
            return F.gelu(self.product(a), approximate="tanh")
        assert self.bias is not None, "expected a layer with a bias"
        # As the epilogue of the library's product the activation saves a launch.
        return torch._addmm_activation(self.bias, a, self.weight.T, use_gelu=True)


class Norm(NamedTuple):
    """A layer norm over the inner axis, multiplied by `plus` + scale, plus shift."""

    scale: Tensor  # [K]
    shift: Tensor  # [K]
    eps: float
    plus: float = 0.0


class Epilogue(NamedTuple):
    """Operations after the matrix product: base + gate * activation(product)."""

    activation: Literal["", "gelu", "silu"] = ""  # gelu by its tanh approximation
    base: Tensor | None = None  # [M, N]; may be the output
    gate: Tensor | None = None  # [N]


@triton.jit
def _fetch(weight, n, N, K: tl.constexpr, LINES: tl.constexpr, LINE: tl.constexpr):
    """Prefetch rows n of a weight into the L2 cache."""
    lines = weight + tl.minimum(n, N - 1).to(tl.int64)[:, None] * K + tl.minimum(tl.arange(0, LINES) * LINE, K - 1)
    ask: tl.constexpr = "prefetch.global.L2 [$1]; mov.u32 $0, 0;"
    tl.inline_asm_elementwise(ask, "=r,l", [lines.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _sum_of_parts(parts, SPLIT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """The sum [BM, BN] of parts [SPLIT, BM, BN]; SPLIT is a power of two, at most 16. Unlike `tl.sum`, which exchanges
    one number after the other between warps, it moves all parts of a number to one thread at once.
    """
    total = tl.permute(parts, (1, 2, 0))
    if SPLIT >= 16:
        left, right = tl.split(tl.reshape(total, (BM, BN, SPLIT // 2, 2)))
        total = left + right
    if SPLIT >= 8:
        left, right = tl.split(tl.reshape(total, (BM, BN, 4, 2)))
        total = left + right
    if SPLIT >= 4:
        left, right = tl.split(tl.reshape(total, (BM, BN, 2, 2)))
        total = left + right
    if SPLIT >= 2:
        left, right = tl.split(tl.reshape(total, (BM, BN, 2)))
        total = left + right
    else:
        total = tl.reshape(total, (BM, BN))
    return total


@triton.jit
def _weight_tile(w_at, k_w, w_rows, K: tl.constexpr, start, QUANTISED: tl.constexpr, dtype: tl.constexpr):
    """Columns start + k_w of a weight's rows: [SPLIT, KS, BN]; of a quantised weight the values without scale."""
    tile = tl.load(w_at + start, mask=w_rows & (k_w + start < K), other=0.0)
    if QUANTISED:
        tile = widened(tile, dtype)
    return tile


@triton.jit
def _row_tile(a_at, k_a, a_rows, K: tl.constexpr, start):
    """Columns start + k_a of the rows: [SPLIT, BM, KS]."""
    return tl.load(a_at + start, mask=a_rows & (k_a + start < K), other=0.0)


# The number of rows differs between buckets, so the kernel is not specialized for it.
@triton.jit(do_not_specialize=["M", "n_a"])
def _product_kernel(
    a, scale, shift, weight, row_scale, bias, base, gate, out, M, N, n_a,
    K: tl.constexpr, EPS: tl.constexpr, PLUS: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr, ADD: tl.constexpr, GATED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, LINES: tl.constexpr,
    LINE: tl.constexpr, AHEAD: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr, QUANTISED: tl.constexpr,
):  # fmt: skip
    """One tile of base + gate * activation(norm(a) weight^T + bias). AHEAD: all of the weight's tiles are read before
    the wait, and all tiles of a at once. QUANTISED: row_scale multiplies the sums; otherwise it is None.
    """
    dtype: tl.constexpr = bias.dtype.element_ty if QUANTISED else weight.dtype.element_ty
    KS: tl.constexpr = BK // SPLIT
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    part = tl.arange(0, SPLIT)[:, None, None] * KS
    k_a = part + tl.arange(0, KS)[None, None, :]
    k_w = part + tl.arange(0, KS)[None, :, None]
    a_at = a + (m % n_a).to(tl.int64)[None, :, None] * K + k_a
    w_at = weight + n.to(tl.int64)[None, None, :] * K + k_w
    a_rows, w_rows = (m < M)[None, :, None], (n < N)[None, None, :]
    # Nothing but `a` and `base` is written by kernels in flight, so all else is read before the wait.
    TILES: tl.constexpr = (K + BK - 1) // BK
    tl.static_assert(not (AHEAD and TILES > 4))
    tl.static_assert(not (NORM and TILES > 1))
    if AHEAD:
        w_0 = _weight_tile(w_at, k_w, w_rows, K, 0, QUANTISED, dtype)
        if TILES > 1:
            w_1 = _weight_tile(w_at, k_w, w_rows, K, BK, QUANTISED, dtype)
        if TILES > 2:
            w_2 = _weight_tile(w_at, k_w, w_rows, K, 2 * BK, QUANTISED, dtype)
        if TILES > 3:
            w_3 = _weight_tile(w_at, k_w, w_rows, K, 3 * BK, QUANTISED, dtype)
    elif PDL:
        _fetch(weight, n, N, K, LINES, LINE)
    if QUANTISED:
        weight_scale = tl.load(row_scale + n, mask=n < N, other=0.0)
    if NORM:
        by = tl.load(scale + k_a, mask=k_a < K, other=0.0).to(tl.float32) + PLUS
        plus = tl.load(shift + k_a, mask=k_a < K, other=0.0).to(tl.float32)
    if BIAS:
        offset = tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    if GATED:
        factor = tl.load(gate + n, mask=n < N, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    inside = (m < M)[:, None] & (n < N)[None, :]
    place = m.to(tl.int64)[:, None] * N + n[None, :]
    if ADD:
        before = tl.load(base + place, mask=inside, other=0.0).to(tl.float32)
    acc = tl.zeros((SPLIT, BM, BN), tl.float32)
    if AHEAD:
        x = _row_tile(a_at, k_a, a_rows, K, 0)
        if TILES > 1:
            x_1 = _row_tile(a_at, k_a, a_rows, K, BK)
        if TILES > 2:
            x_2 = _row_tile(a_at, k_a, a_rows, K, 2 * BK)
        if TILES > 3:
            x_3 = _row_tile(a_at, k_a, a_rows, K, 3 * BK)
        if NORM:
            x = x.to(tl.float32)
            mean = tl.sum(tl.sum(x, 2), 0) / K
            x = tl.where(k_a < K, x - mean[None, :, None], 0.0)
            variance = tl.sum(tl.sum(x * x, 2), 0) / K
            x = x * tl.rsqrt(variance + EPS)[None, :, None] * by + plus
        acc = tl.dot(x.to(dtype), w_0, acc, input_precision=PRECISION)
        if TILES > 1:
            acc = tl.dot(x_1.to(dtype), w_1, acc, input_precision=PRECISION)
        if TILES > 2:
            acc = tl.dot(x_2.to(dtype), w_2, acc, input_precision=PRECISION)
        if TILES > 3:
            acc = tl.dot(x_3.to(dtype), w_3, acc, input_precision=PRECISION)
    else:
        for start in range(0, K, BK):
            x = _row_tile(a_at, k_a, a_rows, K, start)
            w = _weight_tile(w_at, k_w, w_rows, K, start, QUANTISED, dtype)
            acc = tl.dot(x.to(dtype), w, acc, input_precision=PRECISION)
    y = _sum_of_parts(acc, SPLIT, BM, BN)
    if QUANTISED:
        y *= weight_scale[None, :]
    if BIAS:
        y += offset[None, :]
    if ACTIVATION == "gelu":
        y *= tl.sigmoid(1.5957691216057308 * (y + 0.044715 * y * y * y))
    if ACTIVATION == "silu":
        y *= tl.sigmoid(y)
    if GATED:
        y *= factor[None, :]
    if ADD:
        y += before
    tl.store(out + place, y.to(out.dtype.element_ty), mask=inside)


def product_tiles(M: int, K: int, n_bytes: int, *, norm: bool, is_large: bool) -> LinearTiles:
    """Tile sizes for M rows of a layer with K columns.

    Args:
        n_bytes: size of one element of the product's inputs.
        norm: a norm precedes the product.
        is_large: programs may hold large tiles, see `has_large_tiles`.
    """
    whole = triton.next_power_of_2(K)
    if n_bytes > 2:
        tiles = LinearTiles(16, 16, whole, 1, 4, 1) if norm else LinearTiles(16, 32, min(whole, 64), 1, 4, 2)
    elif is_large and (norm or K <= MAX_AHEAD * 512):
        tiles = _large_tiles(M, whole, norm)
    elif norm:
        tiles = LinearTiles(16, 32, whole, 4, 4, 1) if M <= 64 else LinearTiles(32, 32, whole, 4, 8, 1)
    elif M <= 64:
        tiles = LinearTiles(16, 16, 512, 4, 4, 3) if K > 512 else LinearTiles(16, 16, whole, 4, 4, 1)
    else:
        tiles = LinearTiles(32, 32, 256, 4, 4, 4) if K > 512 else LinearTiles(32, 16, whole, 4, 4, 1)
    inner = max(tiles.inner, 16)
    return tiles._replace(inner=inner, split=min(tiles.split, inner // 16))


def _large_tiles(M: int, whole: int, norm: bool) -> LinearTiles:
    """Of 16-bit weights, on one H200. More warps with shorter parts take less time for norm and product."""
    few = M <= 32
    if norm:
        return LinearTiles(16, 32, whole, 4, 4, 1) if few and whole <= 512 else LinearTiles(16, 64, whole, 8, 8, 1)
    if whole <= 512:
        return LinearTiles(16, 32, whole, 8, 8, 1)
    return LinearTiles(16, 16 if few else 32, 512, 16, 16, 1)


def _is_ahead(K: int, tiles: LinearTiles, is_large: bool) -> bool:
    """Whether a program reads all tiles of its weight ahead: one tile, or few where there is room for them."""
    n_tiles = triton.cdiv(K, tiles.inner)
    return n_tiles == 1 or (n_tiles <= MAX_AHEAD and is_large)


_NO_EPILOGUE = Epilogue()


def product(
    a: Tensor,
    linear: LinearWeights,
    out: Tensor,
    *,
    norm: Norm | None = None,
    epilogue: Epilogue = _NO_EPILOGUE,
    tiles: LinearTiles | None = None,
) -> Tensor:
    """out = base + gate * activation(norm(a) weight^T + bias), accumulated in float32. All tensors are contiguous.

    Args:
        a: [R, K]. If `out` has more rows, reading starts again at the first row.
        linear: weight [N, K], which may be quantised as int8 or fp8, and bias [N].
        out: [M, N] of any float type.
        norm: of the rows of `a`; K is then one tile.
        epilogue: activation, gate and base.
        tiles: None = `product_tiles`.
    Returns: out.
    """
    (weight, bias), (activation, base, gate) = linear, epilogue
    row_scale = None
    if isinstance(weight, QuantizedMatrix):
        assert bias is not None and weight.zeros is None, f"weight: expected int8 or fp8 with a bias, got {weight.kind}"
        n_bytes, row_scale, weight = bias.element_size(), weight.scale, readable_values(weight)
    else:
        n_bytes = weight.element_size()
    (M, N), K = out.shape, weight.shape[1]
    is_large = has_large_tiles(weight.device)
    tiles = tiles or product_tiles(M, K, n_bytes, norm=norm is not None, is_large=is_large)
    allow_tf32 = torch.backends.cuda.matmul.allow_tf32
    line = 128 // weight.element_size()  # elements per cache line
    scale, shift, eps, plus = norm or Norm(a, a, 0.0)
    _product_kernel[(triton.cdiv(N, tiles.columns), triton.cdiv(M, tiles.rows))](
        a, scale, shift, weight, row_scale, out if bias is None else bias, out if base is None else base,
        out if gate is None else gate, out, M, N, len(a),
        K=K, EPS=eps, PLUS=plus, NORM=norm is not None, BIAS=bias is not None, ACTIVATION=activation,
        ADD=base is not None, GATED=gate is not None, BM=tiles.rows, BN=tiles.columns, BK=tiles.inner,
        SPLIT=tiles.split, PRECISION="tf32" if allow_tf32 or n_bytes <= 2 else "ieee",
        LINES=triton.next_power_of_2(triton.cdiv(K, line)), LINE=line, AHEAD=_is_ahead(K, tiles, is_large),
        QUANTISED=row_scale is not None, num_warps=tiles.warps, num_stages=tiles.stages, **launch_options(out.device),
    )  # fmt: skip
    return out
