"""STFT by fixed bases against PyTorch's complex STFT, for rows of different length."""

import torch

from models.token2wav.hift.spectral import Spectral
from tests.models.compare import assert_close
from tests.models.token2wav.hift.hift_reference import slow_istft, slow_stft

LENGTHS = torch.tensor([960, 480, 16, 0, 20])


def spectral() -> Spectral:
    module = Spectral()
    module.derive("cpu", torch.float32)
    return module


def test_stft_reflects_each_row_at_its_end():
    wave = torch.randn(len(LENGTHS), 960, generator=torch.Generator().manual_seed(0))
    for row, n in enumerate(LENGTHS):
        wave[row, n:] = float("nan")
    got = spectral().stft(wave, LENGTHS)
    assert got.shape == (len(LENGTHS), 18, 241)
    for row, n in enumerate(LENGTHS.tolist()):
        if n:
            assert_close(got[row, :, : n // 4 + 1], slow_stft(wave[row, :n]), 2e-6, f"row {row}")
        assert not got[row, :, n // 4 + 1 :].any()


def test_istft_ends_with_each_row():
    generator = torch.Generator().manual_seed(1)
    magnitude = torch.rand(len(LENGTHS), 9, 241, generator=generator)
    phase = torch.randn(len(LENGTHS), 9, 241, generator=generator)
    for row, n in enumerate(LENGTHS):
        magnitude[row, :, n // 4 + 1 :] = float("inf")
        phase[row, :, n // 4 + 1 :] = float("nan")
    got = spectral().istft(magnitude, phase, LENGTHS)
    assert got.shape == (len(LENGTHS), 960)
    for row, n in enumerate(LENGTHS.tolist()):
        if n:
            alone = slow_istft(magnitude[row, :, : n // 4 + 1], phase[row, :, : n // 4 + 1])
            assert_close(got[row, :n], alone, 2e-6, f"row {row}")
        assert not got[row, n:].any()
