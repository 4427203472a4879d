"""Triton kernels between a transformer layer's matrix products: residual add, norms, gating, writes to a slot cache.

They round where the modules of `models.layers.transformer` round. A product may be given as partial sums: [P, ...]
float32, with one dimension more than the product; they are summed in order, and the sum is rounded to the model's dtype
as the product itself would be. Requires Triton.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from models.checkpoint.precision import Kind
from models.kernels.launch import launch_options
from models.kernels.paired_rows import PairedRows, empty_pairs, store_pairs

SILU_BLOCK = 1024  # columns of one program


@triton.jit
def _sum_parts(source, part_stride, inside, dtype: tl.constexpr, PARTS: tl.constexpr):
    """The sum of PARTS partial sums in float32, rounded to dtype."""
    total = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        total += tl.load(source + part * part_stride, mask=inside, other=0.0)
    return total.to(dtype).to(tl.float32)


@triton.jit
def _add_norm_kernel(
    x, added, weight, bias, stream, normed, steps, sums, x_stride, added_stride, part_stride, W, eps,
    PARTS: tl.constexpr, CENTRED: tl.constexpr, BLOCK: tl.constexpr, PAIRED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row. PARTS: 0 = nothing to add. CENTRED: layer norm; otherwise RMS norm. PAIRED: its norm is stored as pairs.

    normed, steps, sums: as in `PairedRows` if PAIRED.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < W
    dtype: tl.constexpr = x.dtype.element_ty
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    gain = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    if CENTRED:
        shift = tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    value = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if PARTS > 0:
        value += _sum_parts(added + row * added_stride + columns, part_stride, inside, dtype, PARTS)
        rounded = value.to(dtype)
        tl.store(stream + row * W + columns, rounded, mask=inside)
        value = rounded.to(tl.float32)
    if CENTRED:
        value = tl.where(inside, value - tl.sum(value, 0) / W, 0.0)
        value = value * tl.rsqrt(tl.sum(value * value, 0) / W + eps) * gain + shift
    else:
        value = (value * tl.rsqrt(tl.sum(value * value, 0) / W + eps)).to(dtype).to(tl.float32) * gain
    if PAIRED:
        GROUPS: tl.constexpr = BLOCK // 128
        FP8: tl.constexpr = normed.dtype.element_ty != tl.int8
        exists = tl.arange(0, GROUPS) * 128 < W
        store_pairs(
            value.to(dtype).to(tl.float32), normed, steps, sums, row, 0, tl.num_programs(0), W, exists, FP8, GROUPS
        )
    else:
        tl.store(normed + row * W + columns, value.to(dtype), mask=inside)


def _add_norm(
    x: Tensor,
    added: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    normed: Tensor | PairedRows,
    warps: int = 0,
) -> Tensor:
    """Write the norm to `normed`. Returns: the sum."""
    W = x.shape[-1]
    rows = x.reshape(-1, W)
    stream, parts, n_parts = x, rows, 0
    if added is not None:
        n_parts = 1 if added.dim() == x.dim() else len(added)
        parts = added.reshape(n_parts, -1, W)
        assert parts.shape[1] == len(rows), f"added: expected [P, *{list(x.shape)}], got {list(added.shape)}"
        stream = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not len(rows):
        return stream
    target = normed if isinstance(normed, PairedRows) else (normed, None, None)
    _add_norm_kernel[(len(rows),)](
        rows, parts, weight, weight if bias is None else bias, stream, *target,
        rows.stride(0), parts.stride(-2), parts.stride(0), W, eps,
        PARTS=n_parts, CENTRED=bias is not None, BLOCK=triton.next_power_of_2(W),
        PAIRED=isinstance(normed, PairedRows), num_warps=warps or (8 if W > 2048 else 4), **launch_options(x.device),
    )  # fmt: skip
    return stream


def add_rms_norm(x: Tensor, added: Tensor | None, weight: Tensor, eps: float, warps: int = 0) -> tuple[Tensor, Tensor]:
    """Add a layer's output to the residual stream and normalize the sum as `models.layers.transformer.RMSNorm` does.

    Args:
        x: [..., W].
        added: [..., W], or partial sums of it, or None.
        weight: [W].
        warps: of a program; 0 = chosen by W. It changes the last bits of the norm.
    Returns: x + added (x itself if `added` is None) and its norm, both [..., W] in x's dtype.
    """
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return _add_norm(x, added, weight, None, eps, normed, warps), normed


def add_rms_norm_pairs(
    x: Tensor, added: Tensor | None, weight: Tensor, eps: float, kind: Kind, warps: int = 0
) -> tuple[Tensor, PairedRows]:
    """Like `add_rms_norm`, with the norm as pairs for a weight of `kind`; W a multiple of 128."""
    normed = empty_pairs(x.shape, kind, x.device)
    return _add_norm(x, added, weight, None, eps, normed, warps), normed


def add_layer_norm(x: Tensor, added: Tensor | None, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Like `add_rms_norm`, with `nn.LayerNorm` over the last dimension; bias: [W]."""
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return _add_norm(x, added, weight, bias, eps, normed), normed


@triton.jit
def _qkv_rows_kernel(
    qkv, q_weight, k_weight, cos, sin, row_slots, row_index, k_cache, v_cache, q,
    qkv_stride, part_stride, slot_stride, head_stride, row_stride, H, KV, eps,
    HALF: tl.constexpr, PARTS: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One head of one row. Heads are ordered q, k, v."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d = tl.arange(0, HALF)
    inside = d < HALF
    dtype: tl.constexpr = k_cache.dtype.element_ty
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    source = qkv + row * qkv_stride + head * 2 * HALF + d
    left = _sum_parts(source, part_stride, inside, dtype, PARTS)
    right = _sum_parts(source + HALF, part_stride, inside, dtype, PARTS)
    if head < H + KV:
        if NORM:
            gain = k_weight
            if head < H:
                gain = q_weight
            scale = tl.rsqrt((tl.sum(left * left, 0) + tl.sum(right * right, 0)) / (2 * HALF) + eps)
            left = (left * scale).to(dtype).to(tl.float32) * tl.load(gain + d).to(tl.float32)
            right = (right * scale).to(dtype).to(tl.float32) * tl.load(gain + HALF + d).to(tl.float32)
            left, right = left.to(dtype).to(tl.float32), right.to(dtype).to(tl.float32)
        c, s = tl.load(cos + row * HALF + d), tl.load(sin + row * HALF + d)
        left, right = left * c - right * s, right * c + left * s
    target = q + (row * H + head) * 2 * HALF
    if head >= H:
        target = k_cache + (head - H).to(tl.int64) * head_stride
        if head >= H + KV:
            target = v_cache + (head - H - KV).to(tl.int64) * head_stride
        target += tl.load(row_slots + row) * slot_stride + tl.load(row_index + row) * row_stride
    tl.store(target + d, left.to(dtype))
    tl.store(target + HALF + d, right.to(dtype))


@triton.jit
def _kv_rows_kernel(
    qkv, row_slots, row_index, k_cache, v_cache, qkv_stride, slot_stride, head_stride, row_stride, k_column, width,
    D: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Copy the keys and values of one row to the caches."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    place = tl.load(row_slots + row) * slot_stride + tl.load(row_index + row) * row_stride
    place += (column // D).to(tl.int64) * head_stride + column % D
    source = qkv + row * qkv_stride + k_column + column
    tl.store(k_cache + place, tl.load(source, mask=inside), mask=inside)
    tl.store(v_cache + place, tl.load(source + width, mask=inside), mask=inside)


class HeadNorms(NamedTuple):
    """RMS norms of each head's query and key. q, k: [D] weights."""

    q: Tensor
    k: Tensor
    eps: float


class CacheRows(NamedTuple):
    """Where new rows go in one layer's slot cache.

    row_slots, row_index: [B, T] int64 as in `CacheView`. Padding rows share one place; which of them remains there is
    undefined.
    k, v: [S, kv_heads, L, D] with equal strides and contiguous rows.
    """

    row_slots: Tensor
    row_index: Tensor
    k: Tensor
    v: Tensor


def qkv_rows(
    qkv: Tensor,
    heads: int,
    kv_heads: int,
    rows: CacheRows,
    angles: tuple[Tensor, Tensor] | None = None,
    norms: HeadNorms | None = None,
) -> Tensor:
    """Split a packed product into queries, keys and values: head norms, rotary embedding, writes to a slot cache.

    Args:
        qkv: [B, T, (heads + 2 kv_heads) * D] in the caches' dtype, or partial sums of it; D a power of two.
        rows: where keys and values are written, in place.
        angles: cos and sin [B, T, D / 2] float32 as `models.layers.rotary.rotary_angles` returns them; None = no
            rotation, and then neither norms nor partial sums are allowed.
        norms: None = no norms.
    Returns: queries [B, T, heads, D]; without `angles`, a view of qkv.
    """
    k_cache, v_cache = rows.k, rows.v
    D = k_cache.shape[-1]
    B, T, width = qkv.shape[-3:]
    parts = qkv.reshape(len(qkv) if qkv.dim() == 4 else 1, B * T, width)
    assert k_cache.stride() == v_cache.stride() and k_cache.stride(-1) == 1, "caches: expected equal strides"
    assert width == (heads + 2 * kv_heads) * D, f"qkv: expected {heads} + 2 * {kv_heads} heads of {D}, got {width}"
    if angles is None:
        assert norms is None and qkv.dim() == 3, "angles: expected them with norms and partial sums, got None"
        if B * T:
            _kv_rows_kernel[(B * T,)](
                parts, rows.row_slots.contiguous(), rows.row_index.contiguous(), k_cache, v_cache,
                parts.stride(1), *k_cache.stride()[:3], heads * D, kv_heads * D,
                D=D, BLOCK=triton.next_power_of_2(kv_heads * D), num_warps=4, **launch_options(qkv.device, B * T),
            )  # fmt: skip
        return qkv[..., : heads * D].unflatten(-1, (heads, D))
    q = torch.empty(B, T, heads, D, dtype=k_cache.dtype, device=qkv.device)
    if not B * T:
        return q
    cos, sin = angles
    q_weight, k_weight, eps = norms or HeadNorms(k_cache, k_cache, 0.0)  # without norms, not read
    _qkv_rows_kernel[(B * T, heads + 2 * kv_heads)](
        parts, q_weight, k_weight, cos.contiguous(), sin.contiguous(),
        rows.row_slots.contiguous(), rows.row_index.contiguous(), k_cache, v_cache, q,
        parts.stride(1), parts.stride(0), *k_cache.stride()[:3], heads, kv_heads, eps,
        HALF=D // 2, PARTS=len(parts), NORM=norms is not None,
        # Without fusion each product and sum of the rotation is rounded, as separate PyTorch operations round them.
        num_warps=1, enable_fp_fusion=False, **launch_options(qkv.device, B * T * (heads + 2 * kv_heads)),
    )  # fmt: skip
    return q


@triton.jit
def _silu_mul_kernel(gate_up, out, row_stride, inner, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < inner
    dtype: tl.constexpr = out.dtype.element_ty
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    gate = tl.load(gate_up + row * row_stride + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * row_stride + inner + columns, mask=inside, other=0.0).to(tl.float32)
    value = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32) * up
    tl.store(out + row * inner + columns, value.to(dtype), mask=inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, rounded after each operation. gate_up: [..., 2 I], gate first. Returns: [..., I]."""
    inner = gate_up.shape[-1] // 2
    rows = gate_up.reshape(-1, 2 * inner)
    out = torch.empty(*gate_up.shape[:-1], inner, dtype=gate_up.dtype, device=gate_up.device)
    if len(rows):
        block = min(SILU_BLOCK, triton.next_power_of_2(inner))
        _silu_mul_kernel[(len(rows), triton.cdiv(inner, block))](
            rows, out, rows.stride(0), inner, BLOCK=block, num_warps=4, **launch_options(gate_up.device)
        )
    return out
