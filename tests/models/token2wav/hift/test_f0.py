"""Fundamental frequency against float64 convolutions, for rows of different length and for bfloat16 models."""

import torch

from tests.models.compare import assert_close, assert_same
from tests.models.token2wav.hift.hift_reference import slow_f0
from tests.models.token2wav.hift.hifts import make_hift, random_mel

LENGTHS = torch.tensor([13, 1, 0, 8, 2])


def test_rows_of_one_bucket_equal_each_row_alone():
    hift, mel = make_hift(), random_mel(len(LENGTHS), 13)
    for row, length in enumerate(LENGTHS):
        mel[row, :, length:] = float("nan")
    f0 = hift.f0(mel, LENGTHS)
    assert f0.dtype == torch.float64
    for row, length in enumerate(LENGTHS):
        if length:
            assert_close(f0[row, :length], slow_f0(hift, mel[row, :, :length]), 1e-9, f"row {row}")
        assert not f0[row, length:].any()
    assert 0 < (f0[0] > 10).sum() < 13  # both kinds of frames, which the tests of sound need


def test_bfloat16_models_predict_the_same_bits():
    mel = random_mel(2, 9)
    n_frames = torch.tensor([9, 9])
    assert_same(make_hift(torch.bfloat16).f0(mel, n_frames), make_hift().f0(mel, n_frames))
