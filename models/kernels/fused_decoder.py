"""The decoder stack made of matrix products and the kernels between them.

Computes what `TorchBackend.decoder_layers` computes, to rounding; tests compare the two. Up to 64 rows, a layer is
eight launches, nine if its attention is split into parts; above 64 rows it is one more. Pairs of 8-bit numbers for the
down projection take a launch, and those for the projection after attention, unless attention is split and its heads
have 128 columns. It is designed to be captured as one CUDA graph: without one, launching takes longer than computing.
Requires Triton.
"""

from typing import NamedTuple, cast

import torch.nn.functional as F
from torch import Tensor, nn

from models.checkpoint.precision import Kind
from models.checkpoint.quantized import QuantizedMatrix
from models.kernels.attention import AttentionInputs, slot_attention, slot_attention_pairs
from models.kernels.bf12 import Bf12Matrix, encode
from models.kernels.bf12_gemm import bf12_gated_linear, bf12_linear, bf12_parts
from models.kernels.new_rows import new_rows
from models.kernels.packed_linear import pack_weights
from models.kernels.paired_rows import PairedRows, takes_pairs
from models.kernels.quantized_gemm import quantized_gated_linear, quantized_linear, quantized_parts
from models.kernels.rows import CacheRows, HeadNorms, add_rms_norm, add_rms_norm_pairs, qkv_rows, silu_mul
from models.kernels.skinny_gemm import MAX_ROWS, skinny_gated_linear, skinny_linear, skinny_parts
from models.layers.kv_cache import KVCache
from models.layers.quantized import Weight
from models.layers.transformer import DecoderLayer, LayerStack, RMSNorm

STEP_WARPS = 16  # of a norm, with one new row for each slot


class CopiedWeight(NamedTuple):
    """A weight, and a copy of it in 12 bits for products of few rows."""

    weight: Tensor
    copy: Bf12Matrix


DecoderWeight = Weight | CopiedWeight


class _Layer(NamedTuple):
    """One layer's weights in the form that its products take."""

    norm: Tensor
    qkv: DecoderWeight
    head_norms: HeadNorms | None
    o: DecoderWeight
    mlp_norm: Tensor
    gate_up: DecoderWeight
    down: DecoderWeight


class FusedDecoder:
    """Runs one decoder stack. Its qkv and gate-up weights are packed once; all weights stay shared with the stack."""

    def __init__(self, stack: LayerStack, *, copied: bool = False):
        """copied: keep copies in 12 bits of the weights of bfloat16 numbers (`with_copy`)."""
        layers = cast("list[DecoderLayer]", list(stack.layers))
        attention = layers[0].self_attn
        self.heads, self.kv_heads, self.eps = attention.heads, attention.kv_heads, stack.norm.eps
        self.frequencies, self.norm = stack.frequencies, stack.norm.weight
        self.layers = [_layer(layer, copied=copied) for layer in layers]
        self.has_copies = any(isinstance(weight, CopiedWeight) for layer in self.layers for weight in layer)

    def __call__(self, embeds: Tensor, cache: KVCache, slots: Tensor, n_new: Tensor, kv_len: int) -> Tensor:
        """Shapes and effects as `LayerStack.forward`."""
        new = new_rows(cache, slots, n_new, embeds.shape[1], kv_len, self.frequencies)
        angles = new.cos, new.sin
        first = new.first if new.pages is None or cache.has_windows else None
        stream, added = embeds.contiguous(), None
        for layer, k_cache, v_cache in zip(self.layers, cache.k, cache.v, strict=True):
            stream, x = self._add_norm(stream, added, layer.norm, layer.qkv)
            rows = CacheRows(new.row_slots, new.row_index, k_cache, v_cache)
            q = qkv_rows(_linear_parts(x, layer.qkv), self.heads, self.kv_heads, rows, angles, layer.head_norms)
            inputs = AttentionInputs(q, k_cache, v_cache, slots, first, new.last)
            kind = _pairs_of(stream, layer.o)
            attended: Tensor | PairedRows
            if kind is None:
                attended = slot_attention(*inputs, most=kv_len, pages=new.pages)
            else:
                attended = slot_attention_pairs(inputs, kind, most=kv_len, pages=new.pages)
            stream, x = self._add_norm(stream, _linear_parts(attended, layer.o), layer.mlp_norm, layer.gate_up)
            added = _linear_parts(_gated(x, layer.gate_up), layer.down)
        return add_rms_norm(stream, added, self.norm, self.eps, _norm_warps(stream))[1]

    def _add_norm(
        self, stream: Tensor, added: Tensor | None, norm: Tensor, weight: DecoderWeight
    ) -> tuple[Tensor, Tensor | PairedRows]:
        """As `add_rms_norm`, the norm in the form that the product with `weight` takes."""
        kind = _pairs_of(stream, weight)
        if kind is None:
            return add_rms_norm(stream, added, norm, self.eps, _norm_warps(stream))
        return add_rms_norm_pairs(stream, added, norm, self.eps, kind, _norm_warps(stream))


def with_copy(weight: Weight) -> DecoderWeight:
    """The weight with its copy in 12 bits; alone if it has none (`models.kernels.bf12.encode`)."""
    copy = None if isinstance(weight, QuantizedMatrix) else encode(weight)
    return weight if isinstance(weight, QuantizedMatrix) or copy is None else CopiedWeight(weight, copy)


def linear(x: Tensor, weight: DecoderWeight) -> Tensor:
    """x [..., K] times weight [N, K]: a skinny GEMM for few rows, PyTorch's product for more. Returns: [..., N]."""
    rows = x.reshape(-1, x.shape[-1])
    if isinstance(weight, QuantizedMatrix):
        out = quantized_linear(rows, weight)
    elif len(rows) > MAX_ROWS:
        out = F.linear(rows, weight.weight if isinstance(weight, CopiedWeight) else weight)
    elif isinstance(weight, CopiedWeight):
        out = bf12_linear(rows, weight.copy)
    else:
        out = skinny_linear(rows, weight)
    return out.view(*x.shape[:-1], -1)


def _norm_warps(stream: Tensor) -> int:
    """Warps for the norm of a row. With one new row for each slot, few programs run, and more warps take less time."""
    return STEP_WARPS if stream.shape[1] == 1 else 0


def _pairs_of(stream: Tensor, weight: DecoderWeight) -> Kind | None:
    """The kind of a weight that multiplies the rows of `stream` as pairs."""
    if isinstance(weight, QuantizedMatrix) and takes_pairs(weight, stream.shape[0] * stream.shape[1], stream.dtype):
        return weight.kind
    return None


def _linear_parts(x: Tensor | PairedRows, weight: DecoderWeight) -> Tensor:
    """The product [B, T, N], or partial sums of it [P, B, T, N] for few rows."""
    B, T, K = x.shape
    if isinstance(x, PairedRows):
        assert isinstance(weight, QuantizedMatrix), "weight: expected a quantised one for pairs"
        parts = quantized_parts(x, weight)
    elif B * T > MAX_ROWS:
        return linear(x, weight)
    else:
        parts = _few_parts(x.view(-1, K), weight)
    return parts.view(B, T, -1) if len(parts) == 1 else parts.view(len(parts), B, T, -1)


def _few_parts(rows: Tensor, weight: DecoderWeight) -> Tensor:
    if isinstance(weight, CopiedWeight):
        return bf12_parts(rows, weight.copy)
    return quantized_parts(rows, weight) if isinstance(weight, QuantizedMatrix) else skinny_parts(rows, weight)


def _gated(x: Tensor | PairedRows, weight: DecoderWeight) -> Tensor:
    """silu(gate) * up of a packed product; the gate's rows come first in the weight."""
    B, T, K = x.shape
    if isinstance(x, PairedRows):
        assert isinstance(weight, QuantizedMatrix), "weight: expected a quantised one for pairs"
        return quantized_gated_linear(x, weight).view(B, T, -1)
    if B * T > MAX_ROWS:
        return silu_mul(linear(x, weight))
    rows = x.view(-1, K)
    if isinstance(weight, QuantizedMatrix):
        return quantized_gated_linear(rows, weight).view(B, T, -1)
    if isinstance(weight, CopiedWeight):
        return bf12_gated_linear(rows, weight.copy).view(B, T, -1)
    return skinny_gated_linear(rows, weight).view(B, T, -1)


def _layer(layer: DecoderLayer, *, copied: bool) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    qkv = pack_weights((attention.q_proj, attention.k_proj, attention.v_proj))
    gate_up = pack_weights((mlp.gate_proj, mlp.up_proj))
    o, down = attention.o_proj.weight, mlp.down_proj.weight
    return _Layer(
        norm=layer.input_layernorm.weight,
        qkv=with_copy(qkv) if copied else qkv,
        head_norms=_head_norms(attention.q_norm, attention.k_norm),
        o=with_copy(o) if copied else o,
        mlp_norm=layer.post_attention_layernorm.weight,
        gate_up=with_copy(gate_up) if copied else gate_up,
        down=with_copy(down) if copied else down,
    )


def _head_norms(q_norm: RMSNorm | nn.Identity, k_norm: RMSNorm | nn.Identity) -> HeadNorms | None:
    if isinstance(q_norm, nn.Identity) or isinstance(k_norm, nn.Identity):
        return None
    return HeadNorms(q_norm.weight, k_norm.weight, q_norm.eps)
