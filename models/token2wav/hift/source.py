"""The vocoder's excitation: harmonics of the fundamental frequency in voiced frames, noise in unvoiced frames.

Contains frequencies, phases and noise at 24 kHz. Does not contain mel frames, chunks or slots.

Within half a frame the frequency of a harmonic is constant, so its phase is linear. The starts of these lines are
accumulated in float64 and reduced to one turn, after which float32 is precise enough for the samples.
"""

import math
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.layers.transformer import Derived
from models.token2wav.settings import SAMPLE_RATE, SAMPLES_PER_FRAME

N_HARMONICS = 9  # the fundamental is the first
NOISE_SAMPLES = 2**19  # 22 s, repeated

_HALF = SAMPLES_PER_FRAME // 2
_SINE = 0.1
_VOICED_NOISE, _UNVOICED_NOISE = 0.003, _SINE / 3
_VOICED_ABOVE_HZ = 10.0
_NOISE_SEED = 20_240


class PhaseLines(NamedTuple):
    """Phase in half-frames of 240 samples: sample k has the phase `start + rate * (k + shift)` in turns."""

    start: Tensor  # [B, T, 2, 9] float64
    rate: Tensor  # [B, T, 2, 9] float64, turns per sample
    shift: float


def harmonic_rates(f0: Tensor) -> Tensor:
    """Turns per sample of each harmonic, below one: [B, T, 9] for f0 [B, T] float64 in Hz."""
    rate = f0[..., None] * torch.arange(1, N_HARMONICS + 1, device=f0.device) / SAMPLE_RATE
    return rate - rate.floor()


def held_lines(rate: Tensor, n_frames: Tensor) -> PhaseLines:
    """Phase interpolated between the centres of frames, constant before the first and after the last centre.

    The phase at the centre of frame i is the sum of 480 samples at the rate of each frame up to i.

    Args:
        rate: [B, T, 9] turns per sample.
        n_frames: [B] int64 valid frames.
    Source: golden `hift_*`.
    """
    lines = _interpolated(rate, n_frames)
    first = _frame_index(rate) == 0
    last = _frame_index(rate) == n_frames[:, None, None] - 1
    start, slope = lines.start.unbind(2), lines.rate.unbind(2)
    early = torch.where(first, start[1], start[0])
    slopes = torch.where(first, 0.0, slope[0]), torch.where(last, 0.0, slope[1])
    return PhaseLines(torch.stack((early, start[1]), 2), torch.stack(slopes, 2), lines.shift)


def continued_lines(rate: Tensor, n_frames: Tensor, edge: Tensor, phase: Tensor) -> tuple[PhaseLines, Tensor]:
    """As `held_lines`, but the rate continues at both ends, and the phase at the start of one frame is given.

    Args:
        rate: [B, T, 9] turns per sample.
        n_frames: [B] int64 valid frames.
        edge: [B] int64 the frame whose phase is given, below n_frames.
        phase: [B] float64 phase of the fundamental at the start of that frame, in turns. Harmonic h has h times this
            phase.
    Returns: the lines; [B] float64 in [0, 1), the phase of the fundamental at the end of the row.
    """
    lines = _interpolated(rate, n_frames)
    fundamental, turning = lines.start[..., 0], rate[..., 0]
    missing = phase - _pick(fundamental[:, :, 0], edge)
    last = n_frames - 1
    end = _pick(fundamental[:, :, 1], last) + _HALF * _pick(turning, last) + missing
    number = torch.arange(1, N_HARMONICS + 1, device=rate.device)
    start = lines.start + (missing - missing.floor())[:, None, None, None] * number
    return lines._replace(start=start), end - end.floor()


def running_lines(rate: Tensor, phase: Tensor) -> PhaseLines:
    """Phase accumulated sample by sample, with a separate start phase for each harmonic above the fundamental.

    Args:
        rate: [B, T, 9] turns per sample.
        phase: [B, 9] start phases in radians; the fundamental's is ignored.
    Source: golden `s3gen_source_*`.
    """
    turns = phase.double() / (2 * math.pi)
    turns = F.pad(turns[:, 1:], (1, 0))[:, None]
    begin = SAMPLES_PER_FRAME * (rate.cumsum(1) - rate) + turns
    return PhaseLines(torch.stack((begin, begin + _HALF * rate), 2), torch.stack((rate, rate), 2), 1.0)


def _interpolated(rate: Tensor, n_frames: Tensor) -> PhaseLines:
    """Lines between the centres of frames; the outermost lines are extended at their frame's rate."""
    middle = SAMPLES_PER_FRAME * rate.cumsum(1)
    following = torch.cat((rate[:, 1:], rate[:, -1:]), dim=1)
    following = torch.where(_frame_index(rate) == n_frames[:, None, None] - 1, rate, following)
    start = torch.stack((middle - _HALF * rate, middle), 2)
    return PhaseLines(start, torch.stack((rate, following), 2), 0.5)


def _frame_index(rate: Tensor) -> Tensor:
    return torch.arange(rate.shape[1], device=rate.device)[:, None]


def _pick(values: Tensor, index: Tensor) -> Tensor:
    """values [B, T] at index [B]. A row without frames has index -1 and an undefined result."""
    return values.gather(1, index.clamp(0, values.shape[1] - 1)[:, None]).squeeze(1)


class HarmonicSource(Derived):
    """A mix of harmonics and noise in one channel."""

    noise: Tensor  # [NOISE_SAMPLES] float32

    def __init__(self) -> None:
        super().__init__()
        self.l_linear = nn.Linear(N_HARMONICS, 1)
        self.register_buffer("noise", torch.empty(NOISE_SAMPLES), persistent=False)

    def derive(self, device: torch.device | str, dtype: torch.dtype) -> None:
        # A weighted sum of independent noise is noise: one number per sample replaces one per harmonic.
        normal = torch.randn(NOISE_SAMPLES, generator=torch.Generator().manual_seed(_NOISE_SEED))
        self.noise = normal.to(device) * self.l_linear.weight.to(device, torch.float32).norm()

    def mix(self, noise: Tensor) -> Tensor:
        """The mix [B, N] float32 of one noise per harmonic, noise [B, N, 9]."""
        return (noise.float() * self.l_linear.weight.float()).sum(-1)

    def mixed_noise(self, position: Tensor, n_samples: int) -> Tensor:
        """[B, n_samples] float32 mixed noise from a fixed table, starting at position [B] int64."""
        return self.noise[(position[:, None] + torch.arange(n_samples, device=position.device)) % NOISE_SAMPLES]

    def forward(self, f0: Tensor, lines: PhaseLines, noise: Tensor, n_frames: Tensor) -> tuple[Tensor, Tensor]:
        """The excitation, and which frames are voiced.

        Args:
            f0: [B, T] Hz.
            lines: phases of the harmonics.
            noise: [B, 480 T] float32, mixed.
            n_frames: [B] int64 valid frames.
        Returns: [B, 480 T] float32 in (-1, 1), 0 beyond n_frames; [B, T] bool.
        """
        B, T = f0.shape
        voiced = f0 > _VOICED_ABOVE_HZ
        k = torch.arange(_HALF, device=f0.device) + lines.shift
        start = (lines.start - lines.start.floor()).float()[:, :, :, None]  # [B, T, 2, 1, 9]
        turns = start + lines.rate.float()[:, :, :, None] * k[:, None]
        sines = ((turns - turns.floor()) * (2 * math.pi)).sin()
        harmonics = (sines * self.l_linear.weight.float()).sum(-1)  # [B, T, 2, 240]
        sine, amount = torch.where(voiced, _SINE, 0.0), torch.where(voiced, _VOICED_NOISE, _UNVOICED_NOISE)
        mixed = harmonics * sine[..., None, None] + noise.view(harmonics.shape) * amount[..., None, None]
        valid = (torch.arange(T, device=f0.device) < n_frames[:, None])[..., None, None]
        source = torch.where(valid, torch.tanh(mixed + self.l_linear.bias.float()), 0.0)
        return source.view(B, T * SAMPLES_PER_FRAME), voiced


SourceKind = Literal["interp", "cumsum"]


def phase_lines(kind: SourceKind, f0: Tensor, n_frames: Tensor, phase: Tensor | None = None) -> PhaseLines:
    """Lines of a whole utterance.

    Args:
        kind: `interp` as `held_lines`; `cumsum`, which older vocoders use, as `running_lines`.
        f0: [B, T] float64 in Hz.
        n_frames: [B] int64 valid frames.
        phase: [B, 9] start phases for `cumsum`.
    """
    rate = harmonic_rates(f0)
    if kind == "interp":
        return held_lines(rate, n_frames)
    assert phase is not None, "cumsum: expected a start phase for each harmonic, got none"
    return running_lines(rate, phase)
