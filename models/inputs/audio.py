"""16 kHz sound: validation, log-mel of whole clips, and numbers of audio embeddings.

Streamed sound is in `mel_stream`, the audio encoder in `models.layers.apm`.

Mel frame f covers the 400 samples centred at sample 160 f; beyond both ends the sound is mirrored. Everything up to
the logarithm is computed in float64: float32 loses a quiet bin next to a loud one, and the amount of arithmetic is
small.
"""

import math
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from models.errors import AudioError
from models.inputs.audio_sizes import CLIP_SAMPLES, HOP, SAMPLE_RATE, UNIT_FRAMES, UNIT_TOKENS

N_FFT = 400
HALF_WINDOW = N_FFT // 2
N_MELS = 80
TOP_HZ = 8000  # upper end of the mel filters
CLIP_FRAMES = CLIP_SAMPLES // HOP
RAW_FLOOR = -10.0  # log10 of the smallest power above the noise floor
DYNAMIC_RANGE = 8.0  # decades kept below the loudest bin

CONTEXT = 2  # columns before and after the core columns of every emission
UNIT_COLUMNS = UNIT_FRAMES + 2 * CONTEXT

POOL = 5  # encoder rows averaged into one audio embedding

ClipMode = Literal["dynamic", "fixed"]


def validate_audio(wave: object, *, what: str = "audio") -> Tensor:
    """`wave` as [n] float32 on the CPU.

    Args:
        wave: [n] NumPy array or tensor of any float type, mono at 16 kHz in [-1, 1]. The range is not enforced: decoded
            sound often exceeds it slightly.
        what: name of the sound in errors.
    Raises: AudioError if it is not float, not mono, empty or not finite.
    """
    if isinstance(wave, np.ndarray):
        if not np.issubdtype(wave.dtype, np.floating):
            raise AudioError(what, expected="float samples in [-1, 1]", got=wave.dtype)
        # Copied to native byte order: a tensor cannot share memory with a read-only or byte-swapped array.
        wave = torch.from_numpy(np.array(wave, dtype=np.float64 if wave.itemsize > 4 else np.float32))
    if not isinstance(wave, Tensor):
        raise AudioError(what, expected="a NumPy array or tensor", got=type(wave).__name__)
    if not wave.is_floating_point():
        raise AudioError(what, expected="float samples in [-1, 1]", got=wave.dtype)
    if wave.ndim != 1:
        raise AudioError(what, expected="mono sound, one dimension", got=f"shape {tuple(wave.shape)}")
    if wave.numel() == 0:
        raise AudioError(what, expected="at least one sample", got="none")
    wave = wave.detach().to("cpu", torch.float32).contiguous()
    n_bad = int((~wave.isfinite()).sum())
    if n_bad:
        raise AudioError(what, expected="finite samples", got=f"{n_bad} of {wave.numel()} NaN or infinite")
    return wave


def split_clip(wave: Tensor) -> list[Tensor]:
    """[n] sound as parts of at most 30 s, each one row of `log_mel`."""
    return list(torch.split(wave, CLIP_SAMPLES))


def frame_count(n_samples: int) -> int:
    """Mel frames that `log_mel` returns for a zero-padded clip."""
    return -(-n_samples // HOP)


def conv_length(n_frames: int) -> int:
    """Encoder rows after the two convolutions, the second with stride 2."""
    return (n_frames + 1) // 2


def token_count(n_frames: int) -> int:
    """Audio embeddings of `n_frames` mel frames: whole groups of 5 encoder rows."""
    return conv_length(n_frames) // POOL


def placeholder_groups(n_samples: int, *, chunked: bool) -> list[int]:
    """Embeddings in each placeholder of one clip, counted over the whole clip even beyond 30 s.

    Args:
        chunked: groups of 10 with the remainder in the last, instead of one group.
    Returns: no groups for sound that is too short for one embedding (below 81 ms).
    """
    n_tokens = token_count(frame_count(n_samples))
    size = UNIT_TOKENS if chunked else max(n_tokens, 1)
    return [min(size, n_tokens - start) for start in range(0, n_tokens, size)]


def mel_filters(n_mels: int = N_MELS, n_fft: int = N_FFT, rate: int = SAMPLE_RATE, top_hz: float = TOP_HZ) -> Tensor:
    """Triangular filters of unit area from 0 Hz to `top_hz` on Slaney's mel scale.

    Returns: [n_fft / 2 + 1, n_mels] float64.
    Source: M. Slaney, Auditory Toolbox (1998): linear up to 1 kHz, then 27 steps per factor 6.4.
    """
    step, corner = 200.0 / 3.0, 1000.0
    corner_mel, log_step = corner / step, math.log(6.4) / 27.0
    top = corner_mel + math.log(top_hz / corner) / log_step
    mels = torch.linspace(0.0, top, n_mels + 2, dtype=torch.float64)
    edges = torch.where(mels < corner_mel, mels * step, corner * torch.exp((mels - corner_mel) * log_step))
    bins = torch.linspace(0.0, rate / 2, n_fft // 2 + 1, dtype=torch.float64)[:, None]
    low, centre, high = edges[:-2], edges[1:-1], edges[2:]
    triangles = torch.minimum((bins - low) / (centre - low), (high - bins) / (high - centre)).clamp_min(0)
    return triangles * (2.0 / (high - low))


def mirror(index: Tensor, start: Tensor | int, end: Tensor | int) -> Tensor:
    """Indices with those outside [start, end) reflected at the first or last sample."""
    index = torch.where(index < start, 2 * start - index, index)
    return torch.where(index >= end, 2 * (end - 1) - index, index)


class LogMel:
    """The log-mel transform with its constant float64 tables on one device. Stateless.

    Attributes:
        window: [400], periodic Hann.
        basis: [400, 402], the window times cosines | sines of 201 bins.
        filters: [201, n_mels].
    """

    def __init__(self, device: torch.device | str = "cpu", n_mels: int = N_MELS):
        sample = torch.arange(N_FFT)
        # Full turns are removed in integers, so that the angle is exact before the cosine.
        turn = (sample[:, None] * torch.arange(N_FFT // 2 + 1) % N_FFT).double() * (2 * math.pi / N_FFT)
        window = 0.5 - 0.5 * torch.cos(sample.double() * (2 * math.pi / N_FFT))
        self.window = window.to(device)
        self.basis = (window[:, None] * torch.cat((turn.cos(), turn.sin()), dim=1)).to(device)
        self.filters = mel_filters(n_mels).to(device)
        self.n_mels = n_mels

    def raw(self, frames: Tensor) -> Tensor:
        """[..., n_mels] float32 log10 power of frames [..., 400], at least -10."""
        if frames.device.type == "cpu" and not torch.compiler.is_compiling():
            spectrum: Tensor = torch.fft.rfft(frames.double() * self.window)
            real, imaginary = spectrum.real, spectrum.imag
        else:
            real, imaginary = (frames.double() @ self.basis).chunk(2, dim=-1)
        power = (real.square() + imaginary.square()) @ self.filters
        return power.clamp_min(10.0**RAW_FLOOR).log10().float()

    def clip(self, raw: Tensor, mode: ClipMode, loudest: Tensor | None = None) -> Tensor:
        """Raw values clipped and scaled as in the encoder's training.

        Args:
            raw: [..., n_mels] log10 power.
            mode: `fixed` clips at -10, `dynamic` at 8 below `loudest`.
            loudest: broadcasts to `raw`; required for `dynamic`.
        """
        if mode == "dynamic":
            assert loudest is not None, "dynamic clipping needs the loudest bin"
            raw = torch.maximum(raw, loudest - DYNAMIC_RANGE)
        else:
            raw = raw.clamp_min(RAW_FLOOR)
        return (raw + 4.0) / 4.0

    def log_mel(self, waves: Tensor, n_samples: Tensor, mode: ClipMode = "dynamic", padded: bool = True) -> Tensor:
        """Log-mel of whole clips, one per row.

        Args:
            waves: [B, N] float32, N at most 480 000; samples after a row's length are ignored.
            n_samples: [B] int64, length of each row.
            mode: `dynamic` uses the loudest bin of each row.
            padded: a row is padded with zeros to 30 s and has ceil(n / 160) frames; otherwise it is mirrored at its
                end and has floor(n / 160).
        Returns: [B, n_mels, ceil(N / 160)] float32; columns after a row's frames are zero.
        Source: golden `mel_offline`.
        """
        N, device = waves.shape[1], waves.device
        assert N <= CLIP_SAMPLES, f"log_mel: expected at most {CLIP_SAMPLES} samples, got {N}"
        n_samples = n_samples[:, None, None]
        end = torch.full_like(n_samples, CLIP_SAMPLES) if padded else n_samples
        # The two frames after the returned ones still cover the last samples, so they count for the loudest bin.
        frame = torch.arange(min(frame_count(N) + 2, CLIP_FRAMES), device=device)
        offset = torch.arange(N_FFT, device=device) - HALF_WINDOW
        index = mirror(frame[:, None] * HOP + offset, 0, end)  # [B, F, 400]
        inside = (index >= 0) & (index < n_samples)
        rows = torch.arange(waves.shape[0], device=device)[:, None, None]
        raw = self.raw(torch.where(inside, waves[rows, index.clamp(0, N - 1)], 0))
        exists = frame[None, :, None] < end // HOP
        loudest = torch.where(exists, raw, RAW_FLOOR).amax(dim=(1, 2), keepdim=True)
        kept = frame[None, :, None] < ((n_samples + HOP - 1) // HOP if padded else n_samples // HOP)
        mel = torch.where(kept, self.clip(raw, mode, loudest), 0)
        return mel[:, : frame_count(N)].transpose(1, 2)
