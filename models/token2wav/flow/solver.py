"""Time grids of the flow: where the Euler steps stand between noise and mel. Knows arithmetic only."""

import math
from typing import Literal

import torch
from torch import Tensor

from models.errors import SettingsError

Grid = Literal["cosine", "linear"]


def time_grid(n_steps: int, kind: Grid = "cosine") -> Tensor:
    """The n_steps + 1 times from 0 to 1, float64 on the CPU.

    `cosine` spends its steps at the beginning, where the velocity turns most; `linear` is what few-step
    distilled estimators were trained with. Raises: SettingsError below one step.
    """
    if n_steps < 1:
        raise SettingsError("euler steps", expected="at least 1", got=n_steps)
    times = torch.linspace(0, 1, n_steps + 1, dtype=torch.float64)
    return 1 - torch.cos(times * (math.pi / 2)) if kind == "cosine" else times
