"""Products of few rows with what surrounds them, one launch each: a norm before, activation or residual behind.

Knows rows, weights and tiles. Does not know what they are for. Import only where Triton is.

A product of a hundred rows is over before a GPU has started it and loaded its weights. So weights are asked for while
the kernel before is still at work (programmatic dependent launch), and the inner axis is split among a program's
warps, which leaves none of them with a long chain of additions.
"""

from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from models.kernels.launch import launch_options

MAX_ROWS = 128  # beyond, separate products and norms are faster in any case


class LinearTiles(NamedTuple):
    """How one product is cut; at least the whole inner axis in `inner` means that there is no loop."""

    rows: int
    columns: int
    inner: int
    split: int  # parts of `inner` that are summed up apart
    warps: int
    stages: int


class Norm(NamedTuple):
    """A norm over the inner axis, times `plus` + scale, plus shift; both [K]."""

    scale: Tensor
    shift: Tensor
    eps: float
    plus: float = 0.0


@triton.jit
def _fetch(weight, n, N, K: tl.constexpr, LINES: tl.constexpr, LINE: tl.constexpr):
    """Ask for rows n of a weight, so that they are in the cache when they are read."""
    lines = weight + tl.minimum(n, N - 1).to(tl.int64)[:, None] * K + tl.minimum(tl.arange(0, LINES) * LINE, K - 1)
    ask: tl.constexpr = "prefetch.global.L2 [$1]; mov.u32 $0, 0;"
    tl.inline_asm_elementwise(ask, "=r,l", [lines.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1)


# The number of rows differs between buckets and is kept out of what a kernel is compiled for.
@triton.jit(do_not_specialize=["M", "n_a"])
def _product_kernel(
    a, scale, shift, weight, bias, base, gate, out, M, N, n_a,
    K: tl.constexpr, EPS: tl.constexpr, PLUS: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr, ADD: tl.constexpr, GATED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, LINES: tl.constexpr,
    LINE: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    KS: tl.constexpr = BK // SPLIT
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    part = tl.arange(0, SPLIT)[:, None, None] * KS
    k_a = part + tl.arange(0, KS)[None, None, :]
    k_w = part + tl.arange(0, KS)[None, :, None]
    a_at = a + (m % n_a).to(tl.int64)[None, :, None] * K + k_a
    w_at = weight + n.to(tl.int64)[None, None, :] * K + k_w
    a_rows, w_rows = (m < M)[None, :, None], (n < N)[None, None, :]
    if BK >= K:
        w = tl.load(w_at, mask=w_rows & (k_w < K), other=0.0)
        if NORM:
            by = tl.load(scale + k_a, mask=k_a < K, other=0.0).to(tl.float32) + PLUS
            plus = tl.load(shift + k_a, mask=k_a < K, other=0.0).to(tl.float32)
        if PDL:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        x = tl.load(a_at, mask=a_rows & (k_a < K), other=0.0)
        if NORM:
            x = x.to(tl.float32)
            mean = tl.sum(tl.sum(x, 2), 0) / K
            x = tl.where(k_a < K, x - mean[None, :, None], 0.0)
            variance = tl.sum(tl.sum(x * x, 2), 0) / K
            x = x * tl.rsqrt(variance + EPS)[None, :, None] * by + plus
        acc = tl.dot(x.to(weight.dtype.element_ty), w, input_precision=PRECISION)
    else:
        if PDL:
            _fetch(weight, n, N, K, LINES, LINE)
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        acc = tl.zeros((SPLIT, BM, BN), tl.float32)
        for start in range(0, K, BK):
            x = tl.load(a_at + start, mask=a_rows & (k_a + start < K), other=0.0)
            w = tl.load(w_at + start, mask=w_rows & (k_w + start < K), other=0.0)
            acc = tl.dot(x.to(weight.dtype.element_ty), w, acc, input_precision=PRECISION)
    y = tl.sum(acc, 0)
    if BIAS:
        y += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    if ACTIVATION == "gelu":
        y *= tl.sigmoid(1.5957691216057308 * (y + 0.044715 * y * y * y))
    if ACTIVATION == "silu":
        y *= tl.sigmoid(y)
    if GATED:
        y *= tl.load(gate + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    inside = (m < M)[:, None] & (n < N)[None, :]
    place = m.to(tl.int64)[:, None] * N + n[None, :]
    if ADD:
        y += tl.load(base + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, y.to(out.dtype.element_ty), mask=inside)


def product_tiles(M: int, N: int, K: int, n_bytes: int, norm: bool) -> LinearTiles:
    """Tiles for M rows of a product K -> N with weights of `n_bytes` a number."""
    whole = triton.next_power_of_2(K)
    few = M <= 64
    if n_bytes > 2:
        tiles = LinearTiles(16, 16, whole, 1, 4, 1) if norm else LinearTiles(16, 32, min(whole, 64), 1, 4, 2)
    elif norm:
        tiles = LinearTiles(16, 32, whole, 4, 4, 1) if few else LinearTiles(32, 32, whole, 4, 8, 1)
    elif few:
        tiles = LinearTiles(16, 16, 512, 4, 4, 3) if K > 512 else LinearTiles(16, 16, whole, 4, 4, 1)
    else:
        tiles = LinearTiles(32, 32, 256, 4, 4, 4) if K > 512 else LinearTiles(32, 16, whole, 4, 4, 1)
    inner = max(tiles.inner, 16)
    return tiles._replace(inner=inner, split=min(tiles.split, inner // 16))


def product(
    a: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    *,
    norm: Norm | None = None,
    activation: Literal["", "gelu", "silu"] = "",
    base: Tensor | None = None,
    gate: Tensor | None = None,
    tiles: LinearTiles | None = None,
) -> Tensor:
    """out = base + gate * activation(norm(a) weight^T + bias), summed up in float32; all contiguous.

    Args:
        a: [R, K], read again from its first row on if `out` has more rows. weight: [N, K]. bias, gate: [N].
        norm: of the rows of `a`, whose K is one tile then. activation: gelu by its tanh approximation.
        out: [M, N] of any float type. base: [M, N], may be `out`.
    Returns: out.
    """
    (M, N), K = out.shape, weight.shape[1]
    tiles = tiles or product_tiles(M, N, K, weight.element_size(), norm is not None)
    allow_tf32 = torch.backends.cuda.matmul.allow_tf32
    line = 128 // weight.element_size()  # numbers in a line of the cache
    scale, shift, eps, plus = norm or Norm(a, a, 0.0)
    _product_kernel[(triton.cdiv(N, tiles.columns), triton.cdiv(M, tiles.rows))](
        a, scale, shift, weight, out if bias is None else bias, out if base is None else base,
        out if gate is None else gate, out, M, N, len(a),
        K=K, EPS=eps, PLUS=plus, NORM=norm is not None, BIAS=bias is not None, ACTIVATION=activation,
        ADD=base is not None, GATED=gate is not None, BM=tiles.rows, BN=tiles.columns, BK=tiles.inner,
        SPLIT=tiles.split, PRECISION="tf32" if allow_tf32 or weight.element_size() <= 2 else "ieee",
        LINES=triton.next_power_of_2(triton.cdiv(K, line)), LINE=line,
        num_warps=tiles.warps, num_stages=tiles.stages, **launch_options(out.device),
    )  # fmt: skip
    return out
