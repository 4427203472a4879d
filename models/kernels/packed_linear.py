"""Packed linear layers: several linear layers with one input as one matrix product, without a copy of their weights."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def pack_weights(layers: Sequence[nn.Linear]) -> Tensor:
    """The weights [N1 + N2 + ..., K] of layers with one input, in one tensor.

    The layers stay usable: their own weights become views of the packed tensor.
    """
    packed = torch.cat([layer.weight.detach() for layer in layers])
    for layer, rows in zip(layers, packed.split([len(layer.weight) for layer in layers]), strict=True):
        layer.weight.data = rows
    return packed


def pack_biases(layers: Sequence[nn.Linear]) -> Tensor:
    """The biases [N1 + N2 + ...] of the same layers, as a copy; zeros for a layer without a bias."""
    return torch.cat([torch.zeros_like(layer.weight[:, 0]) if layer.bias is None else layer.bias for layer in layers])
