"""Speech of the person: the function that synthesizes it, a stand-in without an engine, and degradations of sound."""

import random
import zlib
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

RATE = 16_000
CHARS_PER_S = 14.0  # of fluent speech, about 165 words a minute
MIN_S = 0.25

Samples = npt.NDArray[np.float32]
Synthesizer = Callable[[str], Samples]  # text to [n] samples at 16 kHz, without silence at the ends


def spoken_s(text: str) -> float:
    """About how long a text takes to speak."""
    return max(MIN_S, len(text) / CHARS_PER_S)


def noise_bursts(text: str) -> Samples:
    """A stand-in for an engine: a burst of noise for each word, as long as the text takes. The same for each text."""
    rng = np.random.default_rng(zlib.crc32(text.encode()))
    sound = rng.standard_normal(round(spoken_s(text) * RATE)).astype(np.float32)
    swell = 0.1 * np.sin(np.linspace(0, np.pi * len(text.split()), len(sound))) ** 2
    return (swell * sound).astype(np.float32)


def quiet(speed: float) -> Synthesizer:
    """Silence in place of a voice, as long as a text takes, for words that are not given as sound."""
    return lambda text: np.zeros(round(spoken_s(text) / speed * RATE), np.float32)


def degrade(sound: Samples, rng: random.Random) -> Samples:
    """A conversation's sound as microphones give it: a room's echo, a band, noise at 5 to 25 dB, a level of +-12 dB.

    Echo and band apply to some conversations only; digital silence stays nowhere.
    """
    noise = np.random.default_rng(rng.getrandbits(32))
    if rng.random() < 0.4:
        sound = _in_room(sound, rng.uniform(0.08, 0.35), rng.uniform(0.1, 0.5), noise)
    if rng.random() < 0.25:
        sound = _band(sound, rng.uniform(80, 320), rng.uniform(3200, 6500))
    level = float(np.sqrt(np.square(sound).sum() / max(np.count_nonzero(np.abs(sound) > 1e-3), 1))) or 0.05
    hiss = _colored_noise(len(sound), rng.uniform(0, 1), noise)
    sound = sound + hiss * level * 10 ** (-rng.uniform(5, 25) / 20)
    return (sound * 10 ** (rng.uniform(-12, 12) / 20)).clip(-1, 1).astype(np.float32)


def _in_room(sound: Samples, reverb_s: float, share: float, noise: np.random.Generator) -> Samples:
    """The sound with the decaying echo of a room. share: loudness of the echo."""
    n = round(reverb_s * RATE)
    echo = noise.standard_normal(n) * np.exp(-6.9 * np.arange(n) / n)
    echo *= share / np.sqrt(np.square(echo).sum())
    size = 1 << (len(sound) + n).bit_length()
    added = np.fft.irfft(np.fft.rfft(sound, size) * np.fft.rfft(echo, size), size)[: len(sound)]
    return (sound + added).astype(np.float32)


def _band(sound: Samples, low_hz: float, high_hz: float) -> Samples:
    """The sound without what lies outside of a band."""
    spectrum = np.fft.rfft(sound)
    hz = np.fft.rfftfreq(len(sound), 1 / RATE)
    gain = 1 / (1 + (low_hz / np.maximum(hz, 1)) ** 4) / (1 + (hz / high_hz) ** 8)
    return np.fft.irfft(spectrum * gain, len(sound)).astype(np.float32)


def _colored_noise(n: int, slope: float, noise: np.random.Generator) -> Samples:
    """Noise of power one whose amplitude falls with frequency to the power of `slope`."""
    spectrum = np.fft.rfft(noise.standard_normal(n))
    spectrum /= np.maximum(np.fft.rfftfreq(n, 1 / RATE), 50) ** slope
    sound = np.fft.irfft(spectrum, n)
    level = float(np.sqrt(np.square(sound).mean()))
    return (sound / level).astype(np.float32, copy=False)
