"""Time grids of the flow's Euler solve. Contains arithmetic only."""

import math
from typing import Literal

import torch
from torch import Tensor

from models.errors import SettingsError

Grid = Literal["cosine", "linear"]


def time_grid(n_steps: int, kind: Grid = "cosine") -> Tensor:
    """The n_steps + 1 times from 0 (noise) to 1 (mel), [n_steps + 1] float64 on the CPU.

    Args:
        n_steps: Euler steps.
        kind: `cosine` places more steps near 0, where the velocity changes most. `linear` is the grid that few-step
            distilled estimators are trained with.
    Raises: SettingsError below one step.
    """
    if n_steps < 1:
        raise SettingsError("euler steps", expected="at least 1", got=n_steps)
    times = torch.linspace(0, 1, n_steps + 1, dtype=torch.float64)
    return 1 - torch.cos(times * (math.pi / 2)) if kind == "cosine" else times
