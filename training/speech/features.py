"""Features of a whole corpus at once, on a GPU: mels, filter-bank energies and pitch of one long sound.

The transforms equal those of `models.token2wav.prompt.features`, except that a window at the border of two utterances
sees the neighbour instead of a reflection. Does not contain files.
"""

import math
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from models.inputs.audio import DYNAMIC_RANGE, N_FFT, RAW_FLOOR, mel_filters
from models.inputs.audio_sizes import HOP
from models.token2wav.prompt.features import (
    FBANK_FFT,
    FBANK_WINDOW,
    MEL_FLOOR,
    MEL_WINDOW,
    PRE_EMPHASIS,
    kaldi_filters,
    povey_window,
)
from models.token2wav.settings import RATE_16K, SAMPLE_RATE, SAMPLES_PER_FRAME

FRAMES_AT_ONCE = 20_000
FRAMES_16K = 4  # 10 ms frames of one speech token

_F0_WINDOW = 720
_F0_LOW, _F0_HIGH = 60.0, 500.0
_F0_CLEAR, _F0_VOICED = 0.12, 0.25  # of the normalised difference: certain at once, voiced at all
_F0_QUIET = 0.004  # root mean square below which nothing is voiced


def mel_80(wave: Tensor) -> Tensor:
    """[n / 480, 80] float32 log-mel for wave [n] at 24 kHz, n a multiple of 480."""
    window = torch.hann_window(MEL_WINDOW, device=wave.device)
    filters = mel_filters(80, MEL_WINDOW, SAMPLE_RATE).to(window)

    def mel(frames: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(frames * window)
        magnitude = (spectrum.real.square() + spectrum.imag.square() + 1e-9).sqrt()
        values: Tensor = (magnitude @ filters).clamp_min(MEL_FLOOR).log()
        return values

    outside = (MEL_WINDOW - SAMPLES_PER_FRAME) // 2
    return _framewise(mel, F.pad(wave, (outside, outside)), MEL_WINDOW, SAMPLES_PER_FRAME)


def mel_128(wave: Tensor, lengths: Tensor) -> Tensor:
    """[4 sum(lengths), 128] float32 log-mel of the speech tokenizer, clipped at the loudest bin of each utterance.

    Args:
        wave: [n] at 16 kHz, 640 samples per speech token.
        lengths: [U] int64 speech tokens of each utterance.
    """
    window = torch.hann_window(N_FFT, device=wave.device)
    filters = mel_filters(128, N_FFT, RATE_16K).to(window)

    def raw(frames: Tensor) -> Tensor:
        power = torch.fft.rfft(frames * window).abs().square()
        values: Tensor = (power @ filters).clamp_min(10.0**RAW_FLOOR).log10()
        return values

    outside = N_FFT // 2
    values = _framewise(raw, F.pad(wave, (outside, outside)), N_FFT, HOP)[: len(wave) // HOP]
    owner = torch.arange(len(lengths), device=wave.device).repeat_interleave(FRAMES_16K * lengths)
    loudest = torch.full((len(lengths),), RAW_FLOOR, device=wave.device)
    loudest = loudest.scatter_reduce(0, owner, values.amax(1), "amax")
    return (torch.maximum(values, loudest[owner][:, None] - DYNAMIC_RANGE) + 4.0) / 4.0


def fbank_80(wave: Tensor) -> Tensor:
    """[n / 160, 80] float32 log filter-bank energies for wave [n] at 16 kHz; frame f starts at sample 160 f."""
    window, filters = povey_window(FBANK_WINDOW).to(wave), kaldi_filters(80).T.to(wave)

    def energies(frames: Tensor) -> Tensor:
        frames = frames - frames.mean(1, keepdim=True)
        before = torch.cat((frames[:, :1], frames[:, :-1]), dim=1)
        power = torch.fft.rfft((frames - PRE_EMPHASIS * before) * window, FBANK_FFT).abs().square()[:, :-1]
        values: Tensor = (power @ filters).clamp_min(torch.finfo(torch.float32).eps).log()
        return values

    return _framewise(energies, F.pad(wave, (0, FBANK_WINDOW - HOP)), FBANK_WINDOW, HOP)


def pitch(wave: Tensor) -> Tensor:
    """[n / 480] float32 fundamental frequency in Hz at the centre of each frame, 0 in unvoiced frames.

    The first clear minimum of the cumulative-mean-normalised difference (A. de Cheveigne, H. Kawahara, "YIN", 2002).
    """
    low, high = int(SAMPLE_RATE / _F0_HIGH), math.ceil(SAMPLE_RATE / _F0_LOW)
    length = _F0_WINDOW + high + 1

    def frequency(frames: Tensor) -> Tensor:
        frames = frames - frames.mean(1, keepdim=True)
        size = 2 * length
        head = F.pad(frames[:, :_F0_WINDOW], (0, length - _F0_WINDOW))
        products = torch.fft.irfft(torch.fft.rfft(head, size).conj() * torch.fft.rfft(frames, size), size)
        squares = F.pad(frames.square().cumsum(1), (1, 0))
        lags = torch.arange(high + 1, device=wave.device)
        power = squares[:, _F0_WINDOW + lags] - squares[:, lags]
        difference = (power[:, :1] + power - 2 * products[:, : high + 1]).clamp_min(0)
        normal = difference * lags / difference.cumsum(1).clamp_min(1e-9)
        inner = normal[:, low:high]
        lowest = (inner <= normal[:, low - 1 : high - 1]) & (inner <= normal[:, low + 1 : high + 1])
        clear = lowest & (inner < _F0_CLEAR)
        best = torch.where(clear.any(1), clear.float().argmax(1), torch.where(lowest, inner, 9.0).argmin(1))
        at = best[:, None] + low
        before, here, after = (normal.gather(1, at + step)[:, 0] for step in (-1, 0, 1))
        curve = (before - 2 * here + after).clamp_min(1e-6)
        lag = at[:, 0] + (0.5 * (before - after) / curve).clamp(-1, 1)
        loud = power[:, 0] > _F0_WINDOW * _F0_QUIET**2
        return torch.where(loud & (here < _F0_VOICED), SAMPLE_RATE / lag, 0.0)[:, None]

    before = (length - SAMPLES_PER_FRAME) // 2
    values = _framewise(frequency, F.pad(wave, (before, length)), length, SAMPLES_PER_FRAME)[:, 0]
    values = values[: len(wave) // SAMPLES_PER_FRAME]
    return F.pad(values[None], (1, 1), mode="replicate")[0].unfold(0, 3, 1).median(1).values


def to_16k(wave: Tensor) -> Tensor:
    """[n * 2 / 3] samples at 16 kHz for wave [n] at 24 kHz, n a multiple of 3: a windowed sinc up to 7.6 kHz."""
    half, cutoff = 48, 7600 / SAMPLE_RATE
    tap = torch.arange(-half, half + 1, device=wave.device, dtype=torch.float64)
    kernels = []
    for shift in (0.0, 1.5):
        at = tap - shift
        window = torch.cos(math.pi * at / (2 * half + 4)).square()
        kernels.append(2 * cutoff * torch.sinc(2 * cutoff * at) * window)
    weight = torch.stack(kernels)[:, None].float()
    n_at_once = 3 * 2_000_000
    padded = F.pad(wave, (half, half))
    parts = [
        F.conv1d(padded[None, None, start : start + min(n_at_once, len(wave) - start) + 2 * half], weight, stride=3)
        for start in range(0, len(wave), n_at_once)
    ]
    return torch.cat([part[0].T.flatten()[: 2 * (part.shape[2])] for part in parts])[: len(wave) * 2 // 3]


def _framewise(transform: Callable[[Tensor], Tensor], wave: Tensor, window: int, hop: int) -> Tensor:
    frames = wave.unfold(0, window, hop)
    return torch.cat([transform(part) for part in _parts(frames)])


def _parts(frames: Tensor) -> Iterator[Tensor]:
    for start in range(0, len(frames), FRAMES_AT_ONCE):
        yield frames[start : start + FRAMES_AT_ONCE]
