"""Checksum of a tensor in three numbers, and its tolerance."""

from collections.abc import Sequence

import torch
from torch import Tensor

TOLERANCE = 2e-3  # of a sum's size, 1 at least
CANCELLING = 1e-5  # of the sum of magnitudes: rounding error of sums whose terms cancel


def checksum(values: Tensor) -> list[float]:
    """[sum x, sum |x|, sum x_k cos(k / 10)] over the row-major flattening, k from 0; float64."""
    x = values.detach().cpu().double().flatten()
    waves = torch.cos(0.1 * torch.arange(len(x), dtype=torch.float64))
    return [float(x.sum()), float(x.abs().sum()), float(x @ waves)]


def allowed(sums: Sequence[float]) -> Tensor:
    """Tolerance of each sum."""
    expected = torch.tensor(sums, dtype=torch.float64)
    return (TOLERANCE * expected.abs().clamp_min(1)).clamp_min(CANCELLING * float(expected[1]))
