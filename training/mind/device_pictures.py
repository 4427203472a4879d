"""Pictures on the training device with new light, noise and place for every use."""

import torch
from torch import Tensor

SHIFT = 8  # pixels at most, in both directions
GAIN, TINT = (0.85, 1.15), (0.96, 1.04)
NOISE = 6.0  # largest standard deviation, in levels


def degrade_pictures(pictures: Tensor, generator: torch.Generator) -> Tensor:
    """Pictures [P, 448, 448, 3] as uint8 levels: shifted, lighter or darker, tinted, with noise."""
    n, side, device = len(pictures), pictures.shape[1], pictures.device

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(n, *shape, generator=generator, device=device)

    shift = torch.randint(-SHIFT, SHIFT + 1, (2, n, 1), generator=generator, device=device)
    down, across = (torch.arange(side, device=device) + shift).clamp(0, side - 1)
    moved = pictures[torch.arange(n, device=device)[:, None, None], down[:, :, None], across[:, None]]
    levels = moved * (uniform(*GAIN, 1, 1, 1) * uniform(*TINT, 1, 1, 3))
    noise = torch.randn(levels.shape, generator=generator, device=device, dtype=levels.dtype)
    return (levels + uniform(0, NOISE, 1, 1, 1) * noise).clamp(0, 255).to(torch.uint8)
