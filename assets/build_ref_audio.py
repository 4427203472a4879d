"""Builds `assets/ref_audio/`: two synthetic reference voices of two seconds each; `default.wav` is the default voice.

Run `python -m assets.build_ref_audio` from the root. A voice speaks syllables without meaning: harmonics of a falling
pitch, shaped by the formants of vowels, with some noise. Files are 16 kHz, mono, 16 bits. On other machines single
samples may be rounded differently.
"""

import argparse
import wave
from dataclasses import dataclass
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
RATE = 16_000
SEED = 45
PEAK = 0.6

# Four formants in Hz, and the loudness, of steady sounds; values between two sounds are interpolated.
SOUNDS = {
    "a": (730, 1090, 2440, 3400, 1.0),
    "e": (530, 1840, 2480, 3500, 0.9),
    "i": (270, 2290, 3010, 3600, 0.8),
    "o": (570, 840, 2410, 3300, 0.9),
    "u": (300, 870, 2240, 3300, 0.8),
    "m": (250, 1000, 2200, 3200, 0.35),
    "l": (360, 1300, 2700, 3300, 0.5),
    "-": (500, 1500, 2500, 3400, 0.0),
}
BANDWIDTHS = (80.0, 100.0, 130.0, 180.0)
HIGHER = ((4500.0, 300.0), (5500.0, 400.0), (6500.0, 500.0), (7500.0, 600.0))  # constant formants and bandwidths
FIRST_S = 0.06  # time of the first sound


@dataclass(frozen=True)
class SyntheticVoice:
    """A voice and what it says.

    Attributes:
        sounds: keys of SOUNDS.
        pitch: at the start, in Hz.
        fall: of the pitch, in Hz per second.
        throat: factor on all formants.
        n_harmonics: as many as are below half the sample rate.
        each_s: seconds from one sound to the next.
    """

    sounds: str
    pitch: float
    fall: float
    throat: float
    n_harmonics: int
    each_s: float


SPEAKERS = {
    "default": SyntheticVoice("-malemiolu-melamia-", pitch=128.0, fall=14.0, throat=1.0, n_harmonics=60, each_s=0.108),
    "high": SyntheticVoice("-lamole-umiamelimo-", pitch=218.0, fall=22.0, throat=1.17, n_harmonics=33, each_s=0.104),
}


def synthesize(speaker: SyntheticVoice = SPEAKERS["default"]) -> np.ndarray:
    """[n] float64 in [-1, 1] at 16 kHz."""
    n = round((2 * FIRST_S + speaker.each_s * (len(speaker.sounds) - 1)) * RATE)
    time = np.arange(n) / RATE
    moments = FIRST_S + speaker.each_s * np.arange(len(speaker.sounds))
    tracks = zip(*(SOUNDS[sound] for sound in speaker.sounds), strict=True)
    *formants, loudness = (np.interp(time, moments, track) for track in tracks)
    fall = speaker.pitch - speaker.fall * time
    pitch = fall + 9.0 * np.sin(2 * np.pi * 1.3 * time) + 1.5 * np.sin(2 * np.pi * 5.1 * time)
    phase = 2 * np.pi * np.cumsum(pitch) / RATE
    voiced = sum(
        _response(number * pitch / speaker.throat, formants) / number * np.sin(number * phase)
        for number in range(1, speaker.n_harmonics + 1)
    )
    breath = np.random.PCG64(SEED).random_raw(n).astype(np.float64) / 2**63 - 1
    sound = loudness * (voiced + 0.004 * breath * np.abs(np.sin(phase / 2)))
    return PEAK * sound / np.abs(sound).max()


def _response(frequency: np.ndarray, formants: list[np.ndarray]) -> np.ndarray:
    """Gain of the formants at a frequency: 1 far below them, with a peak near each."""
    loud = np.ones_like(frequency)
    for centre, width in (*zip(formants, BANDWIDTHS, strict=True), *HIGHER):
        loud *= centre**2 / np.hypot(centre**2 - frequency**2, width * frequency)
    return loud


def main(out: Path) -> None:
    """Write a file for each voice; existing files are replaced."""
    out.mkdir(parents=True, exist_ok=True)
    for name, speaker in SPEAKERS.items():
        with wave.open(str(out / f"{name}.wav"), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(RATE)
            file.writeframes(np.round(synthesize(speaker) * 32767).astype("<i2").tobytes())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=HERE / "ref_audio")
    main(parser.parse_args().out)
