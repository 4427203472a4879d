"""The noise that the flow starts from: one fixed table, the same on every machine and in every run."""

import torch
from torch import Tensor

NOISE_FRAMES = 4096  # longer than the longest prompt plus the frames of a turn that a chunk attends to


def noise_table(n_mels: int, seed: int) -> Tensor:
    """[NOISE_FRAMES, n_mels] float32 standard normal values, drawn on the CPU."""
    return torch.randn(NOISE_FRAMES, n_mels, generator=torch.Generator().manual_seed(seed))
