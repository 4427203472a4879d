"""Fundamental frequency of mel frames. Does not contain the excitation that is made from it.

Everything is computed in float64: an error of one hertz is half a cycle of phase after 25 frames, and nine times as
much for the ninth harmonic, so narrow weights and TF32 would be audible. The work is one percent of the vocoder's.
"""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.layers.transformer import Derived

_N_LAYERS = 5
_TAPS = 3


class WideConv(Derived):
    """Zero-padded convolution over three frames as one float64 matrix product."""

    taps: Tensor  # [3 n_in, n_out] float64 weight
    offset: Tensor  # [n_out] float64 bias

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
        """[B, T, n_out] float64 for x [B, T, n_in] float64."""
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
        """Frequency of each frame in Hz; equal to the result for each row alone, without its padding.

        Args:
            mel: [B, n_mels, T]; undefined beyond n_frames.
            n_frames: [B] int64 valid frames.
        Returns: [B, T] float64, not negative; 0 beyond n_frames.
        """
        valid = (torch.arange(mel.shape[2], device=mel.device) < n_frames[:, None])[..., None]
        x = mel.double().transpose(1, 2)
        for layer in self.condnet:
            # Each convolution needs zeros beyond the end; the bias of the previous layer makes them non-zero.
            x = layer(torch.where(valid, x, 0.0))
        x = (x * self.classifier.weight.double()).sum(-1, keepdim=True) + self.classifier.bias.double()
        return torch.where(valid, x.abs(), 0.0).squeeze(-1)
