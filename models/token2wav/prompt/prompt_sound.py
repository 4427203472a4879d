"""Limits of a prompt sound, and the check that all users of a prompt rely on.

Contains samples, channels and rates. Does not contain files or the processing of the sound.
"""

from numbers import Integral

import numpy as np
from torch import Tensor

from models.errors import AudioError
from models.inputs.audio import validate_audio

MIN_SECONDS = 0.5
MAX_SECONDS = 30  # longest input of the speech tokenizer
MIN_RATE = 8_000
MAX_RATE = 192_000
MAX_CHANNELS = 8
MAX_PEAK = 4.0  # decoded sound exceeds 1 slightly; sound that was never scaled exceeds 1 by far


def check_prompt(wave: object, rate: object, *, what: str = "prompt sound") -> Tensor:
    """A prompt as [channels, n] float32 on the CPU.

    Args:
        wave: NumPy array or tensor of any float type, [n] or [channels, n], in [-1, 1]; 0.5 to 30 s.
        rate: Hz, a whole number from 8000 to 192000.
        what: names the sound in errors.
    Raises: AudioError for a sound outside the limits.
    """
    if not isinstance(wave, (np.ndarray, Tensor)):
        raise AudioError(what, expected="a NumPy array or tensor", got=type(wave).__name__)
    if wave.ndim not in (1, 2):
        raise AudioError(what, expected="shape [n] or [channels, n]", got=tuple(wave.shape))
    channels, n_samples = wave.shape if wave.ndim == 2 else (1, len(wave))
    rate_hz = check_form(rate, channels, what=what)
    samples = validate_audio(wave.reshape(-1), what=what).view(channels, n_samples)
    check_duration(n_samples, rate_hz, what=what)
    peak = float(samples.abs().max())
    if peak > MAX_PEAK:
        raise AudioError(what, expected="float samples in [-1, 1]", got=f"a peak of {peak:g}")
    return samples


def check_form(rate: object, channels: int, *, what: str) -> int:
    """The rate in Hz. Raises: AudioError if the rate or the number of channels is outside the limits."""
    if not isinstance(rate, Integral) or not MIN_RATE <= int(rate) <= MAX_RATE:
        raise AudioError(f"{what}: sample rate", expected=f"{MIN_RATE} to {MAX_RATE} Hz", got=repr(rate))
    if channels > MAX_CHANNELS:
        raise AudioError(f"{what}: channels", expected=f"at most {MAX_CHANNELS}", got=channels)
    return int(rate)


def check_duration(n_samples: int, rate: int, *, what: str, max_seconds: int = MAX_SECONDS) -> None:
    """Check the duration of a sound. Raises: AudioError if it is too short or too long."""
    if not MIN_SECONDS * rate <= n_samples <= max_seconds * rate:
        expected = f"{MIN_SECONDS} to {max_seconds} s"
        raise AudioError(f"{what}: duration", expected=expected, got=f"{n_samples / rate:.3f} s")
