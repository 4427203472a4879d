"""Rotary position embedding: angles, and the rotation of query and key rows, in float32.

The layout is half-split: pair i consists of entries i and i + half. Does not contain caches.
"""

import torch
from torch import Tensor


def rotary_frequencies(head_dim: int, theta: float, device: torch.device | str) -> Tensor:
    """Angle per position of each pair: [head_dim / 2] float32, in radians."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64, device=device).float() / head_dim
    return 1.0 / (theta**exponents)


def rotary_phases(positions: Tensor, frequencies: Tensor) -> Tensor:
    """Angles [..., head_dim / 2] float32, in radians, of each pair at positions [...] int64."""
    return positions.unsqueeze(-1).float() * frequencies


def rotary_angles(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of `rotary_phases`, the arguments of `rotate`."""
    phases = rotary_phases(positions, frequencies)
    return phases.cos(), phases.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (x[i], x[i + half]) by its angle, in float32.

    Args:
        x: [..., head_dim].
        cos, sin: broadcastable to [..., head_dim / 2].
    Returns: [..., head_dim] in x's dtype.
    """
    left, right = x.float().chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x.dtype)
