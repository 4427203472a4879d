"""Fundamental frequency of mel frames. Knows frames; does not know what is made of the frequency.

All of it is computed in float64: an error of one hertz is half a turn of phase within 25 frames, the ninth harmonic
turns nine times as fast, and neither narrow weights nor TF32 may decide about that. The arithmetic is one percent
of the vocoder's.
"""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.layers.transformer import Derived

_N_LAYERS = 5
_TAPS = 3


class WideConv(Derived):
    """Convolution over three frames with zeros around, as one float64 product."""

    def __init__(self, n_in: int, n_out: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_out, n_in, _TAPS))
        self.bias = nn.Parameter(torch.empty(n_out))
        self.register_buffer("taps", torch.empty(_TAPS * n_in, n_out, dtype=torch.float64), persistent=False)
        self.register_buffer("offset", torch.empty(n_out, dtype=torch.float64), persistent=False)

    def derive(self, device: torch.device | str, dtype: torch.dtype) -> None:
        self.taps = self.weight.to(device, torch.float64).permute(2, 1, 0).reshape(self.taps.shape)
        self.offset = self.bias.to(device, torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, n_in] float64 -> [B, T, n_out]."""
        T = x.shape[1]
        x = F.pad(x, (0, 0, 1, 1))
        return torch.cat([x[:, tap : tap + T] for tap in range(_TAPS)], dim=-1) @ self.taps + self.offset


class F0Predictor(nn.Module):
    def __init__(self, n_mels: int, channels: int):
        super().__init__()
        widths = [n_mels] + [channels] * _N_LAYERS
        layers = [(WideConv(*pair), nn.ELU()) for pair in pairwise(widths)]
        self.condnet = nn.Sequential(*(module for pair in layers for module in pair))
        self.classifier = nn.Linear(channels, 1)

    def forward(self, mel: Tensor, n_frames: Tensor) -> Tensor:
        """Frequency of each frame in Hz, as if every row ended after its last valid frame.

        Args: mel: [B, n_mels, T]; beyond n_frames [B] int64 it may hold anything.
        Returns: [B, T] float64, not negative; 0 beyond n_frames.
        """
        valid = (torch.arange(mel.shape[2], device=mel.device) < n_frames[:, None])[..., None]
        x = mel.double().transpose(1, 2)
        for layer in self.condnet:
            # Zeros beyond the end before every convolution, and again behind its bias.
            x = layer(torch.where(valid, x, 0.0))
        x = (x * self.classifier.weight.double()).sum(-1, keepdim=True) + self.classifier.bias.double()
        return torch.where(valid, x.abs(), 0.0).squeeze(-1)
