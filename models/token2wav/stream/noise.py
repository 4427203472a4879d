"""The noise that every utterance's mel is made from: one fixed table, the same on every machine and in every run."""

import torch
from torch import Tensor

NOISE_FRAMES = 4096  # beyond the longest prompt and what a turn sees of itself


def noise_table(n_mels: int, seed: int) -> Tensor:
    """[NOISE_FRAMES, n_mels] float32 normal numbers, drawn on the CPU."""
    return torch.randn(NOISE_FRAMES, n_mels, generator=torch.Generator().manual_seed(seed))
