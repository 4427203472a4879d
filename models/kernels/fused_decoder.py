"""The decoder stack as it runs on a GPU: matrix products and the kernels between them.

Up to 64 rows a layer is eight launches, nine where its attention is cut into parts; beyond, one more.

Knows weights and order. Computes what `Backbone` computes, to rounding: tests hold the two against each other. Made to
be captured as one CUDA graph; without one, launching it is what takes the time. Import only where Triton is.
"""

from typing import TYPE_CHECKING, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from models.kernels.attention import slot_attention
from models.kernels.packed_linear import join
from models.kernels.rows import add_rms_norm, qkv_rows, silu_mul
from models.kernels.skinny_gemm import MAX_ROWS, skinny_gated_linear, skinny_linear, skinny_parts
from models.layers.kv_cache import KVCache
from models.layers.rotary import rotary_angles

if TYPE_CHECKING:
    from models.layers.transformer import Backbone, DecoderLayer, RMSNorm


class _Layer(NamedTuple):
    """One layer's weights as its products take them."""

    norm: Tensor
    qkv: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


class FusedDecoder:
    """Runs one backbone. Its weights stay where they are; those of joined products are laid side by side once."""

    def __init__(self, backbone: "Backbone"):
        attention = backbone.layers[0].self_attn
        self.heads, self.kv_heads, self.eps = attention.heads, attention.kv_heads, backbone.norm.eps
        self.frequencies, self.norm = backbone.frequencies, backbone.norm.weight
        self.layers = [_layer(layer) for layer in backbone.layers]

    def __call__(self, embeds: Tensor, cache: KVCache, slots: Tensor, n_new: Tensor, kv_len: int) -> Tensor:
        """Shapes and effects as `Backbone.forward`."""
        view = cache.view(slots, n_new, embeds.shape[1], kv_len, masked=False)
        cos, sin = rotary_angles(view.positions, self.frequencies)
        rows, heads = (view.row_slots, view.row_index), (self.heads, self.kv_heads)
        stream, added = embeds.contiguous(), None
        for layer, k_cache, v_cache in zip(self.layers, cache.k, cache.v, strict=True):
            stream, x = add_rms_norm(stream, added, layer.norm, self.eps)
            qkv = _product(x, layer.qkv)
            q = qkv_rows(qkv, *heads, layer.q_norm, layer.k_norm, self.eps, cos, sin, *rows, k_cache, v_cache)
            attended = slot_attention(q, k_cache, v_cache, slots, view.first, view.last, most=kv_len)
            stream, x = add_rms_norm(stream, _product(attended, layer.o), layer.mlp_norm, self.eps)
            added = _product(_gated(x, layer.gate_up), layer.down)
        cache.advance(slots, n_new)
        return add_rms_norm(stream, added, self.norm, self.eps)[1]

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """As `Backbone.product`."""
        rows = x.reshape(-1, x.shape[-1])
        out = skinny_linear(rows, weight) if len(rows) <= MAX_ROWS else F.linear(rows, weight)
        return out.view(*x.shape[:-1], -1)


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """[B, T, N], or partial sums of it [P, B, T, N] where the rows are few."""
    B, T, K = x.shape
    if B * T > MAX_ROWS:
        return F.linear(x, weight)
    parts = skinny_parts(x.view(-1, K), weight)
    return parts.view(B, T, -1) if len(parts) == 1 else parts.view(len(parts), B, T, -1)


def _gated(x: Tensor, weight: Tensor) -> Tensor:
    """silu(gate) * up of a product whose weight holds both, gate in front."""
    B, T, K = x.shape
    if B * T > MAX_ROWS:
        return silu_mul(F.linear(x, weight))
    return skinny_gated_linear(x.view(-1, K), weight).view(B, T, -1)


def _layer(layer: "DecoderLayer") -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    return _Layer(
        norm=layer.input_layernorm.weight,
        qkv=join((attention.q_proj, attention.k_proj, attention.v_proj))[0],
        q_norm=_weight(attention.q_norm),
        k_norm=_weight(attention.k_norm),
        o=attention.o_proj.weight,
        mlp_norm=layer.post_attention_layernorm.weight,
        gate_up=join((mlp.gate_proj, mlp.up_proj))[0],
        down=mlp.down_proj.weight,
    )


def _weight(norm: "RMSNorm | nn.Identity") -> Tensor | None:
    return None if isinstance(norm, nn.Identity) else norm.weight
