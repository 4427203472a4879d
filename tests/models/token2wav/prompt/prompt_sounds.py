"""Prompt sounds for tests: tones of changing pitch and level, in any number of channels."""

import wave
from pathlib import Path

import numpy as np


def prompt(seconds: float, rate: int = 16_000, channels: int = 1, seed: int = 0) -> np.ndarray:
    """[channels, n] float32 with different channels."""
    rng = np.random.default_rng(seed)
    time = np.arange(round(seconds * rate)) / rate
    rows = []
    for channel in range(channels):
        pitch = 110.0 * (channel + 1) + 40.0 * np.sin(3.0 * time + seed)
        tone = np.sin(2 * np.pi * np.cumsum(pitch) / rate) + 0.5 * np.sin(6 * np.pi * np.cumsum(pitch) / rate)
        rows.append(0.3 * (0.3 + np.sin(5.0 * time) ** 2) * tone + 0.02 * rng.standard_normal(len(time)))
    return np.stack(rows).astype(np.float32)


def write_pcm16(path: Path, sound: np.ndarray, rate: int) -> Path:
    """[channels, n] as a 16-bit WAV file, written without the library under test."""
    with wave.open(str(path), "wb") as file:
        file.setnchannels(len(sound))
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(pcm16(sound).T.tobytes())
    return path


def pcm16(sound: np.ndarray) -> np.ndarray:
    return np.round(sound * 32767).astype("<i2")
