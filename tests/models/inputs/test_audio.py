"""Validation of sound, counts, mel filters, and log-mel of clips against its definition."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.errors import AudioError
from models.inputs.audio import (
    LogMel,
    conv_length,
    frame_count,
    mel_filters,
    placeholder_groups,
    split_clip,
    token_count,
    validate_audio,
)
from models.inputs.audio_sizes import CLIP_SAMPLES
from tests.models.inputs.mel_reference import clip, raw_frames

TOLERANCE = 1e-6  # both sides compute in float64 and round to float32 at the end


def noise(n: int, seed: int = 0) -> np.ndarray:
    """[n] float32 from silence to full scale, with a tone that leaves most bins far below the loudest."""
    rng = np.random.default_rng(seed)
    swell = np.abs(np.sin(np.arange(n) / 3000.0)) ** 4
    return (0.05 * swell * rng.standard_normal(n) + 0.4 * swell * np.sin(np.arange(n) * 0.6)).astype(np.float32)


def assert_near(got: torch.Tensor, expected: np.ndarray, tolerance: float = TOLERANCE) -> None:
    assert tuple(got.shape) == expected.shape, f"expected shape {expected.shape}, got {tuple(got.shape)}"
    worst = np.abs(got.double().numpy() - expected).max()
    assert worst <= tolerance, f"expected within {tolerance}, got max diff {worst}"


@pytest.mark.parametrize(
    "wave",
    [
        noise(50),
        noise(50).astype(np.float64),
        noise(50).astype(">f4"),
        noise(100)[::2],
        torch.from_numpy(noise(50)).double(),
        torch.from_numpy(noise(50)).half(),
    ],
)
def test_accepts_mono_float_sound(wave):
    got = validate_audio(wave)
    assert got.dtype == torch.float32 and got.shape == (50,) and got.is_contiguous()
    assert_near(got, np.asarray(wave, dtype=np.float64), 1e-7)


def test_validation_copies_arrays():
    wave = noise(10)
    wave.flags.writeable = False
    validate_audio(wave)[0] = 9.0
    assert wave[0] != 9.0


@pytest.mark.parametrize(
    "wave, expected",
    [
        ([0.0, 0.1], "expected a NumPy array or tensor, got list"),
        (np.zeros(5, np.int16), "expected float samples in [-1, 1], got int16"),
        (torch.zeros(5, dtype=torch.int16), "expected float samples in [-1, 1], got torch.int16"),
        (np.zeros((2, 5), np.float32), "expected mono sound, one dimension, got shape (2, 5)"),
        (np.full((), 0.5, np.float32), "expected mono sound, one dimension, got shape ()"),
        (np.zeros(0, np.float32), "expected at least one sample, got none"),
        (np.array([0.0, np.nan, np.inf], np.float32), "expected finite samples, got 2 of 3 NaN or infinite"),
        (np.array([1e300]), "expected finite samples, got 1 of 1 NaN or infinite"),
    ],
)
def test_refuses_other_sound(wave, expected):
    with pytest.raises(AudioError) as error:
        validate_audio(wave, what="reference voice")
    assert str(error.value) == f"reference voice: {expected}"


def test_long_clips_are_split_at_30_s():
    wave = torch.arange(2 * CLIP_SAMPLES + 7).float()
    parts = split_clip(wave)
    assert [len(part) for part in parts] == [CLIP_SAMPLES, CLIP_SAMPLES, 7]
    assert torch.equal(torch.cat(parts), wave)


@pytest.mark.parametrize("n_frames, rows, tokens", [(0, 0, 0), (8, 4, 0), (9, 5, 1), (100, 50, 10), (102, 51, 10)])
def test_encoder_rows_and_embeddings_of_frames(n_frames, rows, tokens):
    assert (conv_length(n_frames), token_count(n_frames)) == (rows, tokens)


def test_one_second_is_ten_embeddings_in_every_unit_layout():
    assert {token_count(n) for n in (100, 102, 104)} == {10}


@given(st.integers(1, 100 * 16_000))
def test_chunked_groups_have_the_same_total(n_samples):
    total = token_count(frame_count(n_samples))
    whole, groups = (placeholder_groups(n_samples, chunked=chunked) for chunked in (False, True))
    assert whole == ([total] if total else [])
    assert sum(groups) == total and all(n == 10 for n in groups[:-1]) and all(0 < n <= 10 for n in groups)


def test_filters_have_unit_area_and_one_peak():
    filters = mel_filters()
    assert filters.shape == (201, 80) and filters.dtype == torch.float64
    assert filters.ge(0).all() and filters[0].eq(0).all() and filters[-1].abs().max() < 1e-12
    centres = filters.argmax(dim=0)
    assert centres.diff().ge(0).all()
    # Wide filters have enough bins for the sum to approximate the area.
    areas = filters[:, 50:].sum(dim=0) * 40.0
    assert (areas - 1).abs().max() < 0.02, f"expected areas near 1, got {areas}"


def test_a_tone_is_loudest_in_its_filter():
    tone = torch.sin(torch.arange(16_000) * (2 * torch.pi * 1000.0 / 16_000))
    mel = LogMel().log_mel(tone[None], torch.tensor([16_000]))[0, :, 50]
    expected = mel_filters()[25].argmax()  # bin 25 is 1 kHz
    assert mel.argmax() == expected, f"expected {expected}, got {mel.argmax()}"


@pytest.mark.parametrize("n", [161, 3200, 3201, 16_000, 50_123])
@pytest.mark.parametrize("mode", ["dynamic", "fixed"])
def test_clips_equal_the_definition(n, mode):
    wave, mel = noise(n), LogMel()
    n_samples = torch.tensor([n])
    buffer = np.zeros(CLIP_SAMPLES, np.float32)
    buffer[:n] = wave
    expected = clip(raw_frames(buffer), mode == "dynamic")[: -(-n // 160)].T
    assert_near(mel.log_mel(torch.from_numpy(wave)[None], n_samples, mode)[0], expected)
    expected = clip(raw_frames(wave), mode == "dynamic").T
    got = mel.log_mel(torch.from_numpy(wave)[None], n_samples, mode, padded=False)[0]
    assert_near(got[:, : n // 160], expected)
    assert got[:, n // 160 :].eq(0).all()


@pytest.mark.parametrize("n", [CLIP_SAMPLES - 100, CLIP_SAMPLES])
def test_clip_of_30_s_is_mirrored_at_the_end_of_the_buffer(n):
    wave = noise(n)
    wave[-20:] = 0.9
    buffer = np.zeros(CLIP_SAMPLES, np.float32)
    buffer[:n] = wave
    got = LogMel().log_mel(torch.from_numpy(wave)[None], torch.tensor([n]))[0]
    assert_near(got, clip(raw_frames(buffer), dynamic=True).T)


def test_the_loudest_bin_may_be_after_the_returned_frames():
    wave = np.zeros(1600, np.float32)
    wave[-1] = 1.0  # nearer to the centre of frame 10 than of frame 9, the last one returned
    buffer = np.zeros(CLIP_SAMPLES, np.float32)
    buffer[:1600] = wave
    raw = raw_frames(buffer)
    assert raw[10].max() > raw[:10].max() + 1
    got = LogMel().log_mel(torch.from_numpy(wave)[None], torch.tensor([1600]))[0]
    assert_near(got, clip(raw, dynamic=True)[:10].T)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(200, 6000), min_size=2, max_size=4), st.booleans(), st.integers(0, 9))
def test_rows_are_independent_of_each_other_and_of_padding(lengths, padded, seed):
    mel, N = LogMel(), max(lengths) + 37
    waves = torch.full((len(lengths), N), float("nan"))
    for row, n in enumerate(lengths):
        waves[row, :n] = torch.from_numpy(noise(n, seed + row))
    got = mel.log_mel(waves, torch.tensor(lengths), padded=padded)
    assert got.isfinite().all() and got.shape == (len(lengths), 80, frame_count(N))
    for row, n in enumerate(lengths):
        alone = mel.log_mel(waves[row : row + 1, :n], torch.tensor([n]), padded=padded)[0]
        assert_near(got[row, :, : alone.shape[1]], alone.double().numpy())
        assert got[row, :, alone.shape[1] :].eq(0).all()


def test_modes_differ_and_are_stateless():
    mel, wave, n = LogMel(), torch.from_numpy(noise(8000))[None], torch.tensor([8000])
    before = mel.log_mel(wave, n, "dynamic")
    fixed = mel.log_mel(wave, n, "fixed")
    assert not torch.equal(before, fixed)
    assert torch.equal(before, mel.log_mel(wave, n, "dynamic"))
    assert fixed.min() == -1.5
