"""Random float32 values that are the same on every machine, from integer bit streams and exact float operations."""

import hashlib
import math

import numpy as np
import torch
from torch import Tensor

SEED = 45


def draw(name: str, shape: tuple[int, ...], std: float, mean: float = 0.0) -> Tensor:
    """Uniform values with this mean and standard deviation, 24 bits a value, from a stream seeded by `name`."""
    stream = np.random.PCG64(int.from_bytes(hashlib.sha256(f"{SEED}:{name}".encode()).digest()[:8], "little"))
    bits = stream.random_raw(math.prod(shape)) >> np.uint64(40)
    unit = (bits.astype(np.float32) - np.float32(2**23)) / np.float32(2**23)
    values = unit * np.float32(std * math.sqrt(3)) + np.float32(mean)
    return torch.from_numpy(values.reshape(shape))
