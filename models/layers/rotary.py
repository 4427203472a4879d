"""Rotary positions: angles and turning of query and key rows, in float32.

Knows the half-split layout (pair i is made of entries i and i + half). Knows no caches.
"""

import torch
from torch import Tensor


def rotary_frequencies(head_dim: int, theta: float, device: torch.device | str) -> Tensor:
    """Angle per position of each rotated pair. Returns: [head_dim / 2] float32, radians."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64, device=device).float() / head_dim
    return 1.0 / (theta**exponents)


def rotary_phases(positions: Tensor, frequencies: Tensor) -> Tensor:
    """Angle of each pair at each position. positions: [...] int64. Returns: [..., head_dim / 2] float32, radians."""
    return positions.unsqueeze(-1).float() * frequencies


def rotary_angles(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of `rotary_phases`, as `rotate` takes them."""
    phases = rotary_phases(positions, frequencies)
    return phases.cos(), phases.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x[i], x[i + half]) by its angle, in float32; result in x's dtype.

    x: [..., head_dim]; cos, sin: broadcastable to [..., head_dim / 2].
    """
    left, right = x.float().chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x.dtype)
