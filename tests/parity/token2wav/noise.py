"""Noise that the vocoder's cases do not store: uniform, of unit variance, reproducible in any language."""

import numpy as np
import torch


def sine_noise(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """The noise that a case adds to the harmonics of its excitation."""
    return hash_noise(shape, 10 * seed + 2)


def hash_noise(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """A hash of each element's index and the seed."""
    step = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        z = np.arange(np.prod(shape), dtype=np.uint64) + np.uint64(seed) * step + step
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    uniform = (z >> np.uint64(40)).astype(np.float64) / 2**24
    return torch.from_numpy(((uniform - 0.5) * 12**0.5).astype(np.float32).reshape(shape))
