"""Accepted prompt sounds, and the errors for other sounds."""

import numpy as np
import pytest
import torch

from models.errors import AudioError
from models.token2wav.prompt.prompt_sound import check_prompt
from tests.models.compare import assert_same
from tests.models.token2wav.prompt.prompt_sounds import prompt

RATE = 16_000


@pytest.mark.parametrize("channels", [1, 2, 8])
@pytest.mark.parametrize("form", [np.float64, np.dtype(">f4"), np.float16, torch.float64, torch.bfloat16])
def test_any_float_form_becomes_float32(channels: int, form: object) -> None:
    sound = prompt(0.6, channels=channels)
    given = torch.from_numpy(sound).to(form) if isinstance(form, torch.dtype) else sound.astype(form)
    got = check_prompt(given, RATE)
    expected = given.float() if isinstance(given, torch.Tensor) else torch.from_numpy(given.astype(np.float32))
    assert_same(got, expected)


def test_one_channel_needs_no_axis() -> None:
    sound = prompt(0.6)
    assert_same(check_prompt(sound[0], RATE), check_prompt(sound, RATE))


def test_accepts_array_views() -> None:
    sound = prompt(1.0, channels=2)
    expected = torch.from_numpy(sound[:, ::-1].copy())
    assert_same(check_prompt(sound[:, ::-1], RATE), expected)
    assert_same(check_prompt(torch.from_numpy(sound).T.contiguous().T, RATE), torch.from_numpy(sound))


@pytest.mark.parametrize("rate", [8_000, 11_025, 44_100, np.int64(192_000)])
def test_accepts_the_shortest_and_the_longest_sound(rate: int) -> None:
    least, most = -(-rate // 2), 30 * rate
    for n in (least, most):
        assert check_prompt(np.zeros(n, np.float32), rate).shape == (1, n)
    for n in (least - 1, most + 1):
        with pytest.raises(
            AudioError, match=r"^prompt sound: duration: expected 0\.5 to 30 s, got (0\.49|0\.500|30\.0)"
        ):
            check_prompt(np.zeros(n, np.float32), rate)


GOOD = prompt(0.6)


def with_sample(value: float) -> np.ndarray:
    sound = prompt(0.6, channels=2).astype(np.float64)
    sound[1, 77] = value
    return sound


@pytest.mark.parametrize(
    ("wave", "message"),
    [
        ([0.0] * 9000, "expected a NumPy array or tensor, got list"),
        (None, "expected a NumPy array or tensor, got NoneType"),
        (b"RIFF", "expected a NumPy array or tensor, got bytes"),
        (np.zeros(9000, np.int16), "expected float samples in [-1, 1], got int16"),
        (np.zeros(9000, bool), "expected float samples in [-1, 1], got bool"),
        (np.zeros(9000, complex), "expected float samples in [-1, 1], got complex128"),
        (np.array(["a"] * 9000), "expected float samples in [-1, 1], got <U1"),
        (np.array([None] * 9000), "expected float samples in [-1, 1], got object"),
        (torch.zeros(9000, dtype=torch.int32), "expected float samples in [-1, 1], got torch.int32"),
        (np.float32(0.5), "expected a NumPy array or tensor, got float32"),
        (np.zeros(()), "expected shape [n] or [channels, n], got ()"),
        (np.zeros((1, 2, 9000)), "expected shape [n] or [channels, n], got (1, 2, 9000)"),
        (np.zeros(0), "expected at least one sample, got none"),
        (np.zeros((2, 0)), "expected at least one sample, got none"),
        (np.zeros((0, 9000)), "expected at least one sample, got none"),
        (np.zeros((9, 9000)), "channels: expected at most 8, got 9"),
        (np.zeros((9000, 2)), "channels: expected at most 8, got 9000"),
        (with_sample(np.nan), "expected finite samples, got 1 of 19200 NaN or infinite"),
        (with_sample(-np.inf), "expected finite samples, got 1 of 19200 NaN or infinite"),
        (with_sample(1e300), "expected finite samples, got 1 of 19200 NaN or infinite"),
        (with_sample(-4.5), "expected float samples in [-1, 1], got a peak of 4.5"),
        (GOOD * 32767, "expected float samples in [-1, 1], got a peak of"),
    ],
)
def test_refuses_invalid_sounds(wave: object, message: str) -> None:
    with pytest.raises(AudioError) as caught:
        check_prompt(wave, RATE, what="me.wav")
    got = str(caught.value)
    assert got.startswith("me.wav: ") and message in got, f"expected {message}, got {got}"


@pytest.mark.parametrize("rate", [0, -16_000, 7_999, 192_001, 10**30, 16_000.0, True, None, "16000", float("nan")])
def test_refuses_invalid_rates(rate: object) -> None:
    with pytest.raises(AudioError) as caught:
        check_prompt(GOOD, rate)
    assert str(caught.value) == f"prompt sound: sample rate: expected 8000 to 192000 Hz, got {rate!r}"
