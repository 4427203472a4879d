"""Features of a prompt's sound: inputs of the speaker encoder, the flow and the speech tokenizer.

Contains samples and frames of whole sounds. Does not contain files, channels, voices or networks.

Filters and the energies for the speaker encoder are computed in float64. The spectra of the two log-mels are float32,
window included. This changes the fifth digit of a quiet bin next to a loud one in the same way as the public
implementation does, and a speech token may depend on it.
"""

import soxr
import torch
from torch import Tensor

from models.errors import AudioError
from models.inputs.audio import DYNAMIC_RANGE, N_FFT, RAW_FLOOR, mel_filters, mirror
from models.inputs.audio_sizes import HOP
from models.token2wav.settings import RATE_16K, SAMPLE_RATE, SAMPLES_PER_FRAME

FBANK_WINDOW = 400
FBANK_HOP = 160
FBANK_FFT = 512
FBANK_LOW_HZ = 20.0
PRE_EMPHASIS = 0.97

MEL_WINDOW = 1920
MEL_FLOOR = 1e-5


def resample(wave: Tensor, from_rate: int, to_rate: int) -> Tensor:
    """Sound at another rate, without delay and without frequencies above half the lower rate.

    Args:
        wave: [n] float on the CPU.
        from_rate: Hz.
        to_rate: Hz.
    Returns: [about n * to_rate / from_rate] float32.
    Raises: AudioError if a rate is not positive.
    """
    for rate in (from_rate, to_rate):
        if rate <= 0:
            raise AudioError("sample rate", expected="a positive number of Hz", got=rate)
    if from_rate == to_rate:
        return wave.float()
    return torch.from_numpy(soxr.resample(wave.float().numpy(), from_rate, to_rate, quality="HQ"))


def fbank(wave: Tensor, n_mels: int = 80) -> Tensor:
    """Log filter-bank energies as in Kaldi, without dither; whole windows only.

    Args:
        wave: [n] at 16 kHz in [-1, 1].
        n_mels: filters.
    Returns: [1 + (n - 400) // 160, n_mels] float32.
    Raises: AudioError below 400 samples.
    Source: Kaldi's feature extraction; golden `features_*`.
    """
    _require_window(wave, FBANK_WINDOW, RATE_16K)
    frames = wave.double().unfold(0, FBANK_WINDOW, FBANK_HOP)
    frames = frames - frames.mean(1, keepdim=True)
    before = torch.cat((frames[:, :1], frames[:, :-1]), dim=1)  # the first sample precedes itself
    frames = (frames - PRE_EMPHASIS * before) * povey_window(FBANK_WINDOW).to(wave.device)
    power = torch.fft.rfft(frames, FBANK_FFT).abs().square()[:, :-1]  # the filter bank excludes the highest bin
    energies = power @ kaldi_filters(n_mels).T.to(wave.device)
    log_energies: Tensor = energies.clamp_min(torch.finfo(torch.float32).eps).log().float()
    return log_energies


def remove_mean(features: Tensor) -> Tensor:
    """[T, n_mels] minus each bin's mean over time."""
    return features - features.mean(0, keepdim=True)


def prompt_mel(wave: Tensor, n_mels: int = 80) -> Tensor:
    """Log-mel at the flow's frame rate: frame f is centred on sample 480 f + 240.

    Args:
        wave: [n] at 24 kHz.
        n_mels: mel bins.
    Returns: [n // 480, n_mels] float32.
    Raises: AudioError below 1920 samples.
    Source: golden `features_*`.
    """
    _require_window(wave, MEL_WINDOW, SAMPLE_RATE)
    spectrum = _spectra(wave, MEL_WINDOW, SAMPLES_PER_FRAME, outside=(MEL_WINDOW - SAMPLES_PER_FRAME) // 2)
    magnitude = (spectrum.real.square() + spectrum.imag.square() + 1e-9).sqrt()
    filters = mel_filters(n_mels, MEL_WINDOW, SAMPLE_RATE).T.to(magnitude)
    return (magnitude @ filters.T).clamp_min(MEL_FLOOR).log()


def log_mel_128(wave: Tensor, n_mels: int = 128) -> Tensor:
    """Log-mel of the speech tokenizer: as Whisper's, with reflection at the ends, clipped relative to the loudest bin.

    Args:
        wave: [n] at 16 kHz.
        n_mels: mel bins.
    Returns: [n_mels, n // 160] float32.
    Raises: AudioError below 400 samples.
    Source: golden `features_*`.
    """
    _require_window(wave, N_FFT, RATE_16K)
    # Without the frame that is centred on the end of the sound.
    power = _spectra(wave, N_FFT, HOP, outside=N_FFT // 2)[: wave.shape[0] // HOP].abs().square()
    filters = mel_filters(n_mels, N_FFT, RATE_16K).T.to(power)
    raw = (filters @ power.T).clamp_min(10.0**RAW_FLOOR).log10()
    return (torch.maximum(raw, raw.amax() - DYNAMIC_RANGE) + 4.0) / 4.0


def _require_window(wave: Tensor, window: int, rate: int) -> None:
    if wave.shape[0] < window:
        expected = f"at least {window} samples ({1000 * window // rate} ms)"
        raise AudioError("prompt sound", expected=expected, got=wave.shape[0])


def _spectra(wave: Tensor, n_fft: int, hop: int, outside: int) -> Tensor:
    """Spectra [F, n_fft / 2 + 1] complex64 of Hann windows over the sound, extended by reflection.

    Args:
        wave: [n].
        n_fft: window length.
        hop: samples between windows.
        outside: reflected samples at each end.
    """
    n = wave.shape[0]
    index = mirror(torch.arange(-outside, n + outside, device=wave.device), 0, n)
    window = torch.hann_window(n_fft, dtype=torch.float32).to(wave.device)
    spectra: Tensor = torch.fft.rfft(wave.float()[index].unfold(0, n_fft, hop) * window)
    return spectra


def povey_window(n: int) -> Tensor:
    """Kaldi's default window, [n] float64: a symmetric Hann window to the power of 0.85."""
    return torch.hann_window(n, periodic=False, dtype=torch.float64).pow(0.85)


def kaldi_filters(n_mels: int) -> Tensor:
    """Triangular filters of height 1, linear on the mel scale 1127 ln(1 + f / 700), [n_mels, 256] float64."""

    def mel(hz: Tensor) -> Tensor:
        return 1127.0 * torch.log1p(hz / 700.0)

    bins = mel(torch.arange(FBANK_FFT // 2, dtype=torch.float64) * (RATE_16K / FBANK_FFT))
    low, top = mel(torch.tensor([FBANK_LOW_HZ, RATE_16K / 2], dtype=torch.float64)).tolist()
    return _triangles(bins, torch.linspace(low, top, n_mels + 2, dtype=torch.float64))


def _triangles(bins: Tensor, edges: Tensor) -> Tensor:
    """[edges - 2, bins]: filter i rises from edge i to edge i + 1 and falls to edge i + 2."""
    low, centre, high = (part[:, None] for part in (edges[:-2], edges[1:-1], edges[2:]))
    return torch.minimum((bins - low) / (centre - low), (high - bins) / (high - centre)).clamp_min(0)
