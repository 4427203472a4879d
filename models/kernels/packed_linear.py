"""Packed linear layers: several linear layers with one input as one matrix product, without a copy of their weights."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from models.checkpoint.quantized import concatenated
from models.layers.quantized import QuantizedLinear, Weight

Linear = nn.Linear | QuantizedLinear


def pack_weights(layers: Sequence[Linear]) -> Weight:
    """The weights [N1 + N2 + ..., K] of layers with one input, in one tensor or one quantised matrix.

    The layers stay usable: their own weights become views of the packed one. The memory of the separate weights goes
    back to the device at once: an allocator that keeps it would hold all packed weights twice, because the next packed
    weight is larger than any of the freed ones.
    """
    packed = _pack(layers)
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    return packed


def _pack(layers: Sequence[Linear]) -> Weight:
    counts = [layer.out_features for layer in layers]
    quantized = [layer for layer in layers if isinstance(layer, QuantizedLinear)]
    if quantized:
        assert len(quantized) == len(layers), "layers: expected all or none to be quantised"
        matrix = concatenated([layer.weight for layer in quantized])
        for layer, part in zip(quantized, matrix.split(counts), strict=True):
            layer.replace_weight(part)
        return matrix
    plain = [layer for layer in layers if isinstance(layer, nn.Linear)]
    packed = torch.cat([layer.weight.detach() for layer in plain])
    for one, rows in zip(plain, packed.split(counts), strict=True):
        one.weight.data = rows
    return packed


def pack_biases(layers: Sequence[Linear]) -> Tensor:
    """The biases [N1 + N2 + ...] of the same layers, as a copy; zeros for a layer without a bias."""
    like = next(layer.bias for layer in layers if layer.bias is not None)
    return torch.cat([like.new_zeros(layer.out_features) if layer.bias is None else layer.bias for layer in layers])
