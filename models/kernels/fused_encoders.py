"""The layers of the vision and audio encoders made of matrix products and kernels, in the form of `fused_decoder`."""

from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.checkpoint.quantized import QuantizedMatrix
from models.kernels.attention import slot_attention
from models.kernels.packed_linear import Linear, pack_biases, pack_weights
from models.kernels.quantized_gemm import quantized_linear
from models.kernels.rows import CacheRows, add_layer_norm, qkv_rows
from models.layers.apm import Apm, AudioAttention, AudioLayer
from models.layers.kv_cache import CacheView, KVCache
from models.layers.quantized import Weight
from models.layers.vpm import VisionAttention, VisionLayer, Vpm

WeightBias = tuple[Tensor, Tensor]
Product = tuple[Weight, Tensor]  # weight and bias


class _Layer(NamedTuple):
    norm: WeightBias
    qkv: Product
    out: Product
    mlp_norm: WeightBias
    fc1: Product
    fc2: Product


class FusedVision:
    """Runs the layers of one `vpm`."""

    def __init__(self, vpm: Vpm):
        layers = cast("list[VisionLayer]", list(vpm.encoder.layers))
        self.heads, self.eps = layers[0].self_attn.heads, layers[0].layer_norm1.eps
        self.post, self.post_eps = _norm(vpm.post_layernorm), vpm.post_layernorm.eps
        self.layers = [
            _layer(one.layer_norm1, one.self_attn, one.layer_norm2, one.mlp.fc1, one.mlp.fc2) for one in layers
        ]

    def __call__(self, x: Tensor, mask: Tensor) -> Tensor:
        """Shapes as `Backend.vision_layers`."""
        last, n_rows = mask.sum(1) - 1, x.shape[1]
        stream, added = x.contiguous(), None
        for layer in self.layers:
            stream, x = add_layer_norm(stream, added, *layer.norm, self.eps)
            q, k, v = _linear(x, *layer.qkv).unflatten(-1, (3, self.heads, -1)).unbind(2)
            attended = slot_attention(q, k.transpose(1, 2), v.transpose(1, 2), None, None, last, most=n_rows)
            stream, x = add_layer_norm(stream, _linear(attended, *layer.out), *layer.mlp_norm, self.eps)
            added = _linear(_gelu_tanh(x, *layer.fc1), *layer.fc2)
        return add_layer_norm(stream, added, *self.post, self.post_eps)[1]


class FusedAudio:
    """Runs the layers of one `apm` over its slot cache."""

    def __init__(self, apm: Apm):
        layers = cast("list[AudioLayer]", list(apm.layers))
        self.heads, self.eps = layers[0].self_attn.heads, layers[0].self_attn_layer_norm.eps
        self.post, self.post_eps = _norm(apm.layer_norm), apm.layer_norm.eps
        self.layers = [
            _layer(one.self_attn_layer_norm, one.self_attn, one.final_layer_norm, one.fc1, one.fc2) for one in layers
        ]

    def __call__(self, x: Tensor, view: CacheView, cache: KVCache) -> Tensor:
        """Shapes and effects as `Backend.audio_layers`; view: without a mask."""
        assert view.last is not None, "view: expected first and last rows, got a mask"
        last = view.last[:, 0].contiguous()
        stream, added = x.contiguous(), None
        for layer, k_cache, v_cache in zip(self.layers, cache.k, cache.v, strict=True):
            stream, x = add_layer_norm(stream, added, *layer.norm, self.eps)
            rows = CacheRows(view.row_slots, view.row_index, k_cache, v_cache)
            q = qkv_rows(_linear(x, *layer.qkv), self.heads, self.heads, rows)
            attended = slot_attention(q, k_cache, v_cache, view.slots, view.first, last, most=view.kv_len)
            stream, x = add_layer_norm(stream, _linear(attended, *layer.out), *layer.mlp_norm, self.eps)
            added = _linear(F.gelu(_linear(x, *layer.fc1)), *layer.fc2)
        return add_layer_norm(stream, added, *self.post, self.post_eps)[1]


def _linear(x: Tensor, weight: Weight, bias: Tensor) -> Tensor:
    """x [B, T, K] times weight [N, K], plus bias. Returns: [B, T, N]."""
    if isinstance(weight, QuantizedMatrix):
        return quantized_linear(x.flatten(0, 1), weight, bias).view(*x.shape[:2], -1)
    return F.linear(x, weight, bias)


def _gelu_tanh(x: Tensor, weight: Weight, bias: Tensor) -> Tensor:
    """A linear layer and GELU by its tanh approximation; on a GPU the product's epilogue computes the GELU."""
    if x.device.type != "cuda" or isinstance(weight, QuantizedMatrix):
        return F.gelu(_linear(x, weight, bias), approximate="tanh")
    return torch._addmm_activation(bias, x.flatten(0, 1), weight.T, use_gelu=True).view(*x.shape[:2], -1)


def _layer(
    norm: nn.LayerNorm,
    attention: VisionAttention | AudioAttention,
    mlp_norm: nn.LayerNorm,
    fc1: Linear,
    fc2: Linear,
) -> _Layer:
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    qkv = pack_weights(projections), pack_biases(projections)
    out, hidden, last = (_weight_bias(layer) for layer in (attention.out_proj, fc1, fc2))
    return _Layer(_norm(norm), qkv, out, _norm(mlp_norm), hidden, last)


def _weight_bias(layer: Linear) -> Product:
    assert layer.bias is not None, "layer: expected a bias"
    return layer.weight, layer.bias


def _norm(layer: nn.LayerNorm) -> WeightBias:
    return layer.weight, layer.bias
