"""STFT and inverse STFT of 24 kHz sound as products with fixed real bases, for rows of different length.

Contains windows of 16 samples with a hop of 4. Does not contain the networks that use the spectra.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from models.layers.transformer import Derived

N_FFT = 16
HOP = 4
N_BINS = N_FFT // 2 + 1

_OVERLAP = N_FFT // HOP


class Spectral(Derived):
    """Centred transforms with a periodic Hann window and reflection at the ends of each row."""

    analysis: Tensor  # [18, 16] float32
    synthesis: Tensor  # [16, 18] float32
    levels: Tensor  # [3, 4] float32 reciprocal of the overlapping windows' sum: inner hops, first hop, last hop

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("analysis", torch.empty(2 * N_BINS, N_FFT), persistent=False)
        self.register_buffer("synthesis", torch.empty(N_FFT, 2 * N_BINS), persistent=False)
        self.register_buffer("levels", torch.empty(3, HOP), persistent=False)

    def derive(self, device: torch.device | str, dtype: torch.dtype) -> None:
        sample = torch.arange(N_FFT, dtype=torch.float64)
        window = 0.5 - 0.5 * torch.cos(2 * math.pi * sample / N_FFT)
        # The integer product is reduced to one turn, so that multiples of a quarter turn are exact.
        angle = torch.arange(N_BINS)[:, None] * torch.arange(N_FFT) % N_FFT * (2 * math.pi / N_FFT)
        waves = torch.cat((angle.double().cos(), -angle.double().sin()))
        doubled = torch.full((N_BINS,), 2.0, dtype=torch.float64)
        doubled[0] = doubled[-1] = 1.0  # the other bins also represent their conjugates
        squares = window.square().view(_OVERLAP, HOP)
        full = squares.sum(0)
        levels = torch.stack((full, full - squares[-1], full - squares[0]))
        self.analysis = (waves * window).to(device, torch.float32)
        synthesis = (waves * doubled.repeat(2)[:, None] / N_FFT * window).T
        self.synthesis = synthesis.contiguous().to(device, torch.float32)
        self.levels = levels.reciprocal().to(device, torch.float32)

    def stft(self, wave: Tensor, n_samples: Tensor) -> Tensor:
        """Spectra centred on every fourth sample, both ends included.

        Args:
            wave: [B, N] float32.
            n_samples: [B] int64 valid samples, a multiple of 4, at least 16 (or 0).
        Returns: [B, 18, N / 4 + 1], real parts first; 0 beyond n_samples / 4.
        """
        B, n_windows = len(wave), wave.shape[1] // HOP + 1
        window = torch.arange(n_windows, device=wave.device)
        sample = torch.arange(N_FFT, device=wave.device)[:, None] - N_FFT // 2 + HOP * window
        last = n_samples[:, None, None] - 1
        # Windows beyond the end read undefined samples; they are zeroed below.
        mirrored = (last - (last - sample.abs()).abs()).clamp(min=0)
        frames = wave.gather(1, mirrored.flatten(1)).view(mirrored.shape)  # [B, 16, windows]
        spectra = torch.bmm(self.analysis.expand(B, -1, -1), frames)
        return torch.where(HOP * window <= n_samples[:, None, None], spectra, 0.0)

    def istft(self, magnitude: Tensor, phase: Tensor, n_samples: Tensor) -> Tensor:
        """Sound from magnitudes and phases; windows beyond n_samples / 4 are ignored.

        Args:
            magnitude: [B, 9, L] float32.
            phase: [B, 9, L] float32.
            n_samples: [B] int64 valid samples, at most 4 (L - 1).
        Returns: [B, 4 (L - 1)] float32; 0 beyond n_samples.
        """
        B, _, n_windows = magnitude.shape
        hop = torch.arange(n_windows, device=magnitude.device)
        n_hops = n_samples[:, None, None] // HOP
        spectra = torch.cat((magnitude * phase.cos(), magnitude * phase.sin()), dim=1)
        spectra = torch.where(hop <= n_hops, spectra, 0.0)
        frames = torch.bmm(self.synthesis.expand(B, -1, -1), spectra)
        # Each hop is the sum of the four windows that cover it; the first and the last hop lack one of them.
        parts = F.pad(frames, (1, 1)).view(B, _OVERLAP, HOP, n_windows + 2)
        ends = [_OVERLAP - 1 - part for part in range(_OVERLAP)]
        wave = sum(parts[:, part, :, begin : begin + n_windows - 1] for part, begin in enumerate(ends))
        assert isinstance(wave, Tensor)
        hop = hop[:-1, None]
        inner, first, final = self.levels
        level = torch.where(hop == 0, first, torch.where(hop == n_hops - 1, final, inner))
        return torch.where(hop < n_hops, wave.transpose(1, 2) * level, 0.0).flatten(1)
