"""The vision and audio encoders' layers as they run on a GPU; see `fused_decoder`, whose manner this follows."""

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.kernels.attention import slot_attention
from models.kernels.packed_linear import join
from models.kernels.rows import add_layer_norm, qkv_rows
from models.layers.kv_cache import CacheView, KVCache

if TYPE_CHECKING:
    from models.layers.apm import Apm
    from models.layers.vpm import Vpm

Pair = tuple[Tensor, Tensor]


class _Layer(NamedTuple):
    norm: Pair
    qkv: Pair
    out: Pair
    mlp_norm: Pair
    fc1: Pair
    fc2: Pair


class FusedVision:
    """Runs the layers of one `vpm`."""

    def __init__(self, vpm: "Vpm"):
        layers = vpm.encoder.layers
        self.heads, self.eps = layers[0].self_attn.heads, layers[0].layer_norm1.eps
        self.post, self.post_eps = _pair(vpm.post_layernorm), vpm.post_layernorm.eps
        self.layers = [
            _layer(one.layer_norm1, one.self_attn, one.layer_norm2, one.mlp.fc1, one.mlp.fc2) for one in layers
        ]

    def __call__(self, x: Tensor, mask: Tensor) -> Tensor:
        """Embedded patches x [B, L, D], mask [B, L] true for the first ones of a row. Returns: as `Vpm.forward`."""
        last, n_rows = mask.sum(1) - 1, x.shape[1]
        stream, added = x.contiguous(), None
        for layer in self.layers:
            stream, x = add_layer_norm(stream, added, *layer.norm, self.eps)
            q, k, v = F.linear(x, *layer.qkv).unflatten(-1, (3, self.heads, -1)).unbind(2)
            attended = slot_attention(q, k.transpose(1, 2), v.transpose(1, 2), None, None, last, most=n_rows)
            stream, x = add_layer_norm(stream, F.linear(attended, *layer.out), *layer.mlp_norm, self.eps)
            added = F.linear(_gelu_tanh(x, *layer.fc1), *layer.fc2)
        return add_layer_norm(stream, added, *self.post, self.post_eps)[1]


class FusedAudio:
    """Runs the layers of one `apm` over its slot cache."""

    def __init__(self, apm: "Apm"):
        layers = apm.layers
        self.heads, self.eps = layers[0].self_attn.heads, layers[0].self_attn_layer_norm.eps
        self.post, self.post_eps = _pair(apm.layer_norm), apm.layer_norm.eps
        self.layers = [
            _layer(one.self_attn_layer_norm, one.self_attn, one.final_layer_norm, one.fc1, one.fc2) for one in layers
        ]

    def __call__(self, x: Tensor, view: CacheView, cache: KVCache) -> Tensor:
        """Rows x [B, T, D] with positions, view without a mask. Returns: [B, T, D] after the final norm."""
        rows, heads = (view.row_slots, view.row_index), (self.heads, self.heads)
        last = view.last[:, 0].contiguous()
        stream, added = x.contiguous(), None
        for layer, k_cache, v_cache in zip(self.layers, cache.k, cache.v, strict=True):
            stream, x = add_layer_norm(stream, added, *layer.norm, self.eps)
            qkv = F.linear(x, *layer.qkv)
            q = qkv_rows(qkv, *heads, None, None, self.eps, None, None, *rows, k_cache, v_cache)
            attended = slot_attention(q, k_cache, v_cache, view.slots, view.first, last, most=view.kv_len)
            stream, x = add_layer_norm(stream, F.linear(attended, *layer.out), *layer.mlp_norm, self.eps)
            added = F.linear(F.gelu(F.linear(x, *layer.fc1)), *layer.fc2)
        return add_layer_norm(stream, added, *self.post, self.post_eps)[1]


def _gelu_tanh(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """GELU by its tanh approximation of a product, which the product's own epilogue computes on a GPU."""
    if x.device.type != "cuda":
        return F.gelu(F.linear(x, weight, bias), approximate="tanh")
    return torch._addmm_activation(bias, x.flatten(0, 1), weight.T, use_gelu=True).view(*x.shape[:2], -1)


def _layer(norm: nn.LayerNorm, attention: nn.Module, mlp_norm: nn.LayerNorm, fc1: nn.Linear, fc2: nn.Linear) -> _Layer:
    qkv = join((attention.q_proj, attention.k_proj, attention.v_proj))
    return _Layer(_pair(norm), qkv, _pair(attention.out_proj), _pair(mlp_norm), _pair(fc1), _pair(fc2))


def _pair(layer: nn.Linear | nn.LayerNorm) -> Pair:
    return layer.weight, layer.bias
