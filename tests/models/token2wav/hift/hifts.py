"""A small HiFT with random weights, large enough that each of them affects the sound."""

import math

import torch
from torch import Tensor

from models.layers.weights import assign_weights, on_meta
from models.token2wav.hift.hift import Hift, weight_dtype
from models.token2wav.settings import HiftConfig

CONFIG = HiftConfig(n_mels=6, base_channels=16, f0_channels=5)


def make_hift(dtype: torch.dtype = torch.float32, seed: int = 0, config: HiftConfig = CONFIG) -> Hift:
    """A HiFT with voiced and unvoiced frames."""
    with on_meta():
        hift = Hift(config)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, meta in hift.state_dict().items():
        tensor = torch.randn(meta.shape, generator=generator)
        if name.endswith(".alpha"):
            tensor = tensor.abs() + 0.2
        elif name.endswith(".bias"):
            tensor *= 0.1
        else:
            tensor *= _gain(name) / math.sqrt(math.prod(meta.shape[1:]))
        tensors[name] = tensor.to(weight_dtype(name, dtype))
    return assign_weights(hift, tensors, "cpu", dtype)


def random_mel(n_rows: int, n_frames: int, seed: int = 1, n_mels: int = CONFIG.n_mels) -> Tensor:
    return torch.randn(n_rows, n_mels, n_frames, generator=torch.Generator().manual_seed(seed))


def _gain(name: str) -> float:
    if name == "f0_predictor.classifier.weight":
        return 20.0
    if name == "conv_post.weight":
        return 0.3
    return 0.5 if "convs" in name else 1.5
