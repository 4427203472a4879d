"""Features of a prompt against their definitions.

Tolerances: 1e-5 where both sides use float64; 1e-4 where the code under test uses float32.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.errors import AudioError
from models.inputs.audio import LogMel, mel_filters
from models.token2wav.prompt.features import (
    fbank,
    kaldi_filters,
    log_mel_128,
    prompt_mel,
    remove_mean,
    resample,
)
from tests.models.compare import assert_close, assert_same
from tests.models.token2wav.prompt import features_reference as slow

few = settings(max_examples=10)


def speech(n: int, seed: int = 0) -> Tensor:
    """[n] float32: noise of changing level and a tone, well above silence and below full scale."""
    rng = np.random.default_rng(seed)
    time = np.arange(n)
    swell = 0.1 + np.sin(time / 2500.0) ** 2
    sound = 0.1 * swell * rng.standard_normal(n) + 0.2 * swell * np.sin(time * 0.3)
    return torch.from_numpy(sound.astype(np.float32))


@few
@given(n=st.integers(400, 3000), n_mels=st.sampled_from([24, 40, 80]), seed=st.integers(0, 99))
def test_fbank_equals_its_definition(n, n_mels, seed):
    wave = speech(n, seed) + 0.05
    got, expected = fbank(wave, n_mels), torch.from_numpy(slow.fbank(wave.numpy(), n_mels))
    assert got.dtype == torch.float32 and got.shape == (1 + (n - 400) // 160, n_mels)
    assert_close(got, expected, 1e-5)


@few
@given(n=st.integers(1920, 9000), n_mels=st.sampled_from([16, 80]), seed=st.integers(0, 99))
def test_prompt_mel_equals_its_definition(n, n_mels, seed):
    wave = speech(n, seed)
    got = prompt_mel(wave, n_mels)
    assert got.dtype == torch.float32 and got.shape == (n // 480, n_mels)
    assert_close(got, torch.from_numpy(slow.prompt_mel(wave.numpy(), n_mels)), 1e-4)


@few
@given(n=st.integers(400, 9000), n_mels=st.sampled_from([24, 128]), seed=st.integers(0, 99))
def test_log_mel_equals_the_log_mel_of_whole_clips(n, n_mels, seed):
    wave = speech(n, seed)
    expected = LogMel(n_mels=n_mels).log_mel(wave[None], torch.tensor([n]), "dynamic", padded=False)[0]
    got = log_mel_128(wave, n_mels)
    assert got.dtype == torch.float32 and got.shape == (n_mels, n // 160)
    assert_close(got, expected[:, : n // 160], 1e-4)


def test_log_mel_keeps_eight_decades():
    wave = torch.cat((speech(4000), torch.zeros(4000)))
    got = log_mel_128(wave)
    assert_close(got.amax() - got.amin(), torch.tensor(2.0), 1e-6)


def test_silence_is_the_floor():
    wave = torch.full((4000,), 0.25)  # the speaker encoder removes DC
    assert_same(fbank(wave), torch.full((23, 80), float(np.log(np.float32(2.0**-23)))))
    silence = torch.zeros(4800)
    # 3e-5, the square root of the constant added to the power, weighted by filters of unit area over bins of 12.5 Hz
    floor = (mel_filters(80, 1920, 24_000).sum(0) * 1e-9**0.5).clamp_min(1e-5).log().float()
    assert_close(prompt_mel(silence), floor.expand(10, 80), 1e-6)
    assert_same(log_mel_128(silence), torch.full((128, 30), -1.5))


def test_remove_mean_of_each_bin():
    energies = fbank(speech(16_000))
    got = remove_mean(energies)
    assert_close(got.mean(0), torch.zeros(80), 1e-5)
    assert_close(got[1:] - got[:-1], energies[1:] - energies[:-1], 1e-5)


@pytest.mark.parametrize(
    "feature, window, message",
    [
        (fbank, 400, "at least 400 samples (25 ms), got 399"),
        (log_mel_128, 400, "at least 400 samples (25 ms), got 399"),
        (prompt_mel, 1920, "at least 1920 samples (80 ms), got 1919"),
    ],
)
def test_refuses_a_sound_shorter_than_a_window(feature, window, message):
    assert feature(speech(window)).isfinite().all()
    with pytest.raises(AudioError) as error:
        feature(speech(window - 1))
    assert str(error.value) == f"prompt sound: expected {message}"


@pytest.mark.parametrize("n_mels", [10, 80])
def test_kaldi_filters(n_mels):
    assert_close(kaldi_filters(n_mels), torch.from_numpy(slow.kaldi_bank(n_mels)), 1e-12)


def test_mel_filters_at_either_rate():
    assert_close(mel_filters(80, 1920, 24_000).T, torch.from_numpy(slow.slaney_bank(80, 1920, 24_000)), 1e-12)


def tone(n: int, rate: int, hz: float) -> Tensor:
    return torch.sin(torch.arange(n, dtype=torch.float64) * (2 * torch.pi * hz / rate)).float()


@pytest.mark.parametrize("from_rate, to_rate", [(44_100, 16_000), (48_000, 24_000), (16_000, 24_000), (8000, 16_000)])
def test_resampling_has_no_delay(from_rate, to_rate):
    got = resample(tone(from_rate, from_rate, 1000.0), from_rate, to_rate)
    assert got.dtype == torch.float32 and got.shape == (to_rate,)
    inside = slice(to_rate // 10, -to_rate // 10)
    assert_close(got[inside], tone(to_rate, to_rate, 1000.0)[inside], 1e-4)


def test_resampling_removes_frequencies_above_half_the_lower_rate():
    got = resample(tone(24_000, 24_000, 10_000.0), 24_000, 16_000)
    assert got[1600:-1600].abs().max() < 1e-3


def test_resampling_to_the_same_rate_changes_nothing():
    wave = speech(100)
    assert_same(resample(wave, 16_000, 16_000), wave)


@pytest.mark.parametrize("rates", [(0, 16_000), (16_000, -1)])
def test_refuses_rates_below_one(rates):
    with pytest.raises(AudioError, match=f"sample rate: expected a positive number of Hz, got {min(rates)}"):
        resample(speech(100), *rates)
