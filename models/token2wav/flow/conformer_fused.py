"""The conformer's layers on a GPU for few rows: five kernel launches per layer, cached keys read in place.

Contains the order of the launches and the kernel of attention with distance scores. Results equal `ConformerLayer` up
to rounding, except that the residual stream stays in float32. Requires Triton.
"""

from contextlib import nullcontext
from copy import deepcopy
from itertools import chain
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from models.kernels.launch import launch_options
from models.kernels.quantized_gemm import quantized_linear
from models.layers.quantized import QuantizedLinear
from models.token2wav.flow.block_table import SlotMapping
from models.token2wav.flow.conformer import (
    TABLE_END,
    TABLE_FIRST,
    ConformerLayer,
    LayerCaches,
    UpsampleConformer,
    run_layers,
)
from models.token2wav.flow.fused_linear import MAX_ROWS, Epilogue, LinearWeights, Norm, product

_EPS = 1e-12
# Of graphs for many rows. Without cuDNN, which plans each shape for a tenth of a second and is not faster here.
_ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_QUERIES, _KEYS = 16, 64  # per tile
_WARPS = 4


class _Layer(NamedTuple):
    """One layer's weights in the form that its kernels read."""

    norm_attention: Norm
    qkv: LinearWeights  # packed
    content_bias: Tensor  # [H, hd] added to queries that are multiplied by keys
    distance_bias: Tensor  # [H, hd] added to queries that are multiplied by distances
    table: Tensor  # [distances, H hd] projected distances
    out: LinearWeights
    norm_ff: Norm
    w_1: LinearWeights
    w_2: LinearWeights


class FusedLayers:
    """A replacement of `conformer.run_layers` for one encoder; calls it where there are too many rows."""

    def __init__(self, encoder: UpsampleConformer):
        stacks = encoder.encoders, encoder.up_encoders
        self.layers = {stack: _layers(stack) for stack in stacks}
        self._plain = {stack: _for_many_rows(stack) for stack in stacks}

    def __call__(
        self, stack: nn.ModuleList, x: Tensor, mapping: SlotMapping, caches: LayerCaches
    ) -> tuple[Tensor, Tensor | None]:
        """As `run_layers`. If it returns None for the rows, it has written them to the caches."""
        B, T, D = x.shape
        width = mapping.cached.shape[1]
        if B * T > MAX_ROWS or 1 - T < TABLE_FIRST or T + width > TABLE_END:
            with sdpa_kernel(_ATTENTION) if x.is_cuda and torch.cuda.is_current_stream_capturing() else nullcontext():
                return run_layers(self._plain[stack], x, mapping, caches)
        rows, dtype = x.reshape(B * T, D).float(), x.dtype
        layers = self.layers[stack]
        inner = len(layers[0].w_1.weight)
        qkv, attended, hidden = (rows.new_empty(B * T, n, dtype=dtype) for n in (3 * D, D, inner))
        mapping = mapping._replace(cached=mapping.cached.contiguous(), fresh=mapping.fresh.contiguous())
        for layer, cache in zip(layers, caches, strict=True):
            product(rows, layer.qkv, qkv, norm=layer.norm_attention)
            _attend(qkv, layer, mapping, cache, attended)
            product(attended, layer.out, rows, epilogue=Epilogue(base=rows))
            product(rows, layer.w_1, hidden, norm=layer.norm_ff, epilogue=Epilogue("silu"))
            product(hidden, layer.w_2, rows, epilogue=Epilogue(base=rows))
        return rows.to(dtype).view(B, T, D), None


@triton.jit
def _meet(
    q, q_far, k, v, valid, nearest, limit, table, head, acc, top, total,
    SCALE: tl.constexpr, H: tl.constexpr, HD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of keys [HD, BN] and values [BN, HD]; `nearest` is the table row for the first query and last key."""
    d = tl.arange(0, HD)
    row = nearest + tl.arange(0, 2 * BN)
    seen = (row >= 0) & (row < limit)
    far = tl.load(table + row[None, :] * H * HD + head * HD + d[:, None], mask=seen[None, :], other=0.0)
    by_row = tl.dot(q_far, far, input_precision=PRECISION)
    place = tl.arange(0, BM)[:, None] + BN - 1 - tl.arange(0, BN)[None, :]
    scores = (tl.dot(q, k, input_precision=PRECISION) + tl.gather(by_row, place, 1)) * SCALE
    scores = tl.where(valid[None, :], scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    weights = tl.exp(scores - new_top[:, None])
    shrink = tl.exp(top - new_top)
    acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
    return acc, new_top, total * shrink + tl.sum(weights, 1)


@triton.jit(do_not_specialize=["T", "width"])
def _attend_kernel(
    qkv, content_bias, distance_bias, table, cached, n_cached, fresh, n_new, cache, out, T, width, n_rows,
    FIRST: tl.constexpr, LIMIT: tl.constexpr, SCALE: tl.constexpr, H: tl.constexpr, HD: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    b, head = tl.program_id(1) // H, tl.program_id(1) % H
    begin = tl.program_id(0) * BM
    t = begin + tl.arange(0, BM)
    d = tl.arange(0, HD)
    within = (t < T)[:, None]
    near, far = tl.load(content_bias + head * HD + d), tl.load(distance_bias + head * HD + d)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    own = qkv + b.to(tl.int64) * T * 3 * H * HD + head * HD
    q = tl.load(own + t[:, None] * 3 * H * HD + d[None, :], mask=within, other=0.0)
    q_far = q + far[None, :]
    q += near[None, :]
    keys = cache + head * HD
    values = keys + n_rows.to(tl.int64) * H * HD
    acc = tl.zeros((BM, HD), tl.float32)
    top = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    before, count = tl.load(n_cached + b).to(tl.int32), tl.load(n_new + b).to(tl.int32)
    for start in range(0, before, BN):
        column = start + tl.arange(0, BN)
        valid = column < before
        row = tl.load(cached + b * width + column, mask=valid, other=0)
        k = tl.load(keys + row[None, :] * H * HD + d[:, None], mask=valid[None, :], other=0.0)
        v = tl.load(values + row[:, None] * H * HD + d[None, :], mask=valid[:, None], other=0.0)
        nearest = before + begin - start - BN + 1 - FIRST
        acc, top, total = _meet(
            q, q_far, k, v, valid, nearest, LIMIT, table, head, acc, top, total, SCALE, H, HD, BM, BN, PRECISION
        )
    # The new keys are in qkv. The program of the first queries also stores them in the cache for later chunks.
    for start in range(0, count, BN):
        column = start + tl.arange(0, BN)
        valid = column < count
        source = own + column * 3 * H * HD
        k = tl.load(source[None, :] + H * HD + d[:, None], mask=valid[None, :], other=0.0)
        v = tl.load(source[:, None] + 2 * H * HD + d[None, :], mask=valid[:, None], other=0.0)
        if begin == 0:
            row = tl.load(fresh + b * T + column, mask=valid, other=0)
            tl.store(keys + row[None, :] * H * HD + d[:, None], k, mask=valid[None, :])
            tl.store(values + row[:, None] * H * HD + d[None, :], v, mask=valid[:, None])
        nearest = begin - start - BN + 1 - FIRST
        acc, top, total = _meet(
            q, q_far, k, v, valid, nearest, LIMIT, table, head, acc, top, total, SCALE, H, HD, BM, BN, PRECISION
        )
    # A row of padding attends to no key and stays zero.
    acc /= tl.where(total == 0.0, 1.0, total)[:, None]
    at = (b * T + t).to(tl.int64)[:, None]
    tl.store(out + at * H * HD + head * HD + d[None, :], acc.to(out.dtype.element_ty), mask=within)


def _attend(qkv: Tensor, layer: _Layer, mapping: SlotMapping, cache: Tensor, out: Tensor) -> None:
    """The attention of `RelativeAttention` without its linear layers.

    Args:
        qkv: [B T, 3 H hd].
        mapping: contiguous row addresses.
        cache: [2, n_rows, H, hd]; receives the new keys and values.
        out: [B T, H hd].
    """
    heads, head_dim = layer.content_bias.shape
    cached, fresh = mapping.cached, mapping.fresh
    B, T = fresh.shape
    exact = qkv.dtype == torch.float32 and not torch.backends.cuda.matmul.allow_tf32
    _attend_kernel[(triton.cdiv(T, _QUERIES), B * heads)](
        qkv, layer.content_bias, layer.distance_bias, layer.table, cached, mapping.n_cached, fresh, mapping.n_new,
        cache, out, T, cached.shape[1], cache.shape[1],
        FIRST=TABLE_FIRST, LIMIT=TABLE_END - TABLE_FIRST, SCALE=head_dim**-0.5, H=heads, HD=head_dim,
        BM=_QUERIES, BN=_KEYS, PRECISION="ieee" if exact else "tf32", num_warps=_WARPS, num_stages=2,
        **launch_options(qkv.device),
    )  # fmt: skip


class _KernelLinear(nn.Module):
    """A quantised layer that runs in the project's kernels, for any number of rows."""

    def __init__(self, layer: QuantizedLinear):
        super().__init__()
        self._weight, self._bias = layer.weight, layer.bias

    def forward(self, x: Tensor) -> Tensor:
        return quantized_linear(x.flatten(0, -2), self._weight, self._bias).view(*x.shape[:-1], -1)


def _for_many_rows(stack: nn.ModuleList) -> nn.ModuleList:
    """The stack with `_KernelLinear` in place of quantised layers; it shares all tensors of `stack`."""
    kernels = {id(one): _KernelLinear(one) for one in stack.modules() if isinstance(one, QuantizedLinear)}
    if not kernels:
        return stack
    tensors = {id(one): one for one in chain(stack.parameters(), stack.buffers())}
    return deepcopy(stack, {**tensors, **kernels})


def _layers(stack: nn.ModuleList) -> list[_Layer]:
    return [_layer(layer) for layer in stack if isinstance(layer, ConformerLayer)]


def _layer(layer: ConformerLayer) -> _Layer:
    attn, ff = layer.self_attn, layer.feed_forward
    return _Layer(
        norm_attention=Norm(layer.norm_mha.weight, layer.norm_mha.bias, _EPS),
        qkv=LinearWeights.of(attn.linear_q, attn.linear_k, attn.linear_v),
        content_bias=attn.pos_bias_u,
        distance_bias=attn.pos_bias_v,
        table=attn.table,
        out=LinearWeights.of(attn.linear_out),
        norm_ff=Norm(layer.norm_ff.weight, layer.norm_ff.bias, _EPS),
        w_1=LinearWeights.of(ff.w_1),
        w_2=LinearWeights.of(ff.w_2),
    )
