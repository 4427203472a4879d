"""Several matrix products of one input as one product, without a second copy of their weights.

Knows linear layers. Does not know what they compute.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def join(layers: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Weights [N1 + N2 + ..., K] and biases [N1 + N2 + ...] of layers with one input, in one tensor each.

    The layers keep working: their own weights become views of the joined ones. A layer without a bias counts as one of
    zeros beside others that have one; without any the joined bias is None.
    """
    weight = _joined([layer.weight for layer in layers])
    if all(layer.bias is None for layer in layers):
        return weight, None
    biases = [torch.zeros_like(layer.weight[:, 0]) if layer.bias is None else layer.bias for layer in layers]
    return weight, torch.cat(biases)


def _joined(weights: Sequence[nn.Parameter]) -> Tensor:
    joined = torch.cat([weight.detach() for weight in weights])
    for weight, rows in zip(weights, joined.split([len(weight) for weight in weights]), strict=True):
        weight.data = rows
    return joined
