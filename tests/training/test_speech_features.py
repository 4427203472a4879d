"""Features of a corpus equal those of the program inside an utterance."""

import math

import torch
from torch import Tensor

from models.token2wav.prompt.features import fbank, log_mel_128, prompt_mel, resample
from training.speech.features import fbank_80, mel_80, mel_128, pitch, to_16k


def sound(n: int, hz: float = 180.0) -> Tensor:
    """A voiced sound at 24 kHz with little noise."""
    time = torch.arange(n) / 24_000
    tone = sum(torch.sin(2 * math.pi * hz * harmonic * time) / harmonic for harmonic in range(1, 12))
    noise = torch.randn(n, generator=torch.Generator().manual_seed(1))
    return 0.05 * tone + 0.001 * noise


def largest(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


def test_mels_equal_the_programs_inside() -> None:
    wave = sound(960 * 30)
    assert largest(mel_80(wave)[3:-3], prompt_mel(wave)[3:-3]) < 1e-3
    low = resample(wave, 24_000, 16_000)[: 640 * 30]
    got = mel_128(low, torch.tensor([30]))
    assert got.shape == (120, 128)
    assert largest(got[3:-3], log_mel_128(low).T[3:-3]) < 1e-2
    energies = fbank(low)
    assert largest(fbank_80(low)[: len(energies)], energies) < 2e-2


def test_to_16k_equals_the_resampler_inside() -> None:
    wave = sound(960 * 20)
    got, expected = to_16k(wave), resample(wave, 24_000, 16_000)
    assert got.shape == expected.shape == (640 * 20,)
    error = (got - expected)[200:-200]
    assert float(error.norm() / expected.norm()) < 0.02, float(error.norm() / expected.norm())


def test_pitch_of_tones_and_of_noise() -> None:
    for hz in (90.0, 180.0, 330.0):
        got = pitch(sound(960 * 20, hz))[2:-4]
        assert largest(got, torch.full_like(got, hz)) < 1.0, f"expected {hz} Hz, got {got}"
    noise = 0.05 * torch.randn(960 * 20, generator=torch.Generator().manual_seed(2))
    assert float((pitch(noise) > 0).float().mean()) < 0.1
