"""Media files made by ffmpeg, and what their units contain."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from worker import media
from worker.media import MediaUnit

RATE = 16_000
# A second each; far apart in every channel, so that lossy codecs do not matter.
COLOURS = ["red", "lime", "blue", "white"]
RGB = {"red": (255, 0, 0), "lime": (0, 255, 0), "blue": (0, 0, 255), "white": (255, 255, 255)}


def encode(path: Path, *arguments: str) -> Path:
    """A file encoded by ffmpeg."""
    command = [media.ffmpeg_program(), "-nostdin", "-loglevel", "error", *arguments, "-y", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return path


def slides(*seconds: float, size: str = "64x48", rate: int = 10) -> list[str]:
    """Input arguments: a sequence of colours with their durations."""
    inputs = [
        f"color={colour}:s={size}:r={rate}:d={d}[{i}]"
        for i, (colour, d) in enumerate(zip(COLOURS, seconds, strict=False))
    ]
    joined = "".join(f"[{i}]" for i in range(len(seconds))) + f"concat=n={len(seconds)}"
    return ["-f", "lavfi", "-i", ";".join([*inputs, joined])]


def tone(seconds: float, *, rate: int = 44_100) -> list[str]:
    """Input arguments: 440 Hz at 1/8 of full scale."""
    return ["-f", "lavfi", "-i", f"sine=f=440:r={rate}:d={seconds}"]


def colour(frame: Image.Image) -> str:
    """The nearest of the colours to a frame's centre."""
    pixel = frame.getpixel((frame.width // 2, frame.height // 2))
    return min(RGB, key=lambda name: sum(abs(a - b) for a, b in zip(RGB[name], pixel, strict=True)))


def colours(units: list[MediaUnit]) -> list[list[str]]:
    return [[colour(frame) for frame in unit.frames] for unit in units]


def n_samples(units: list[MediaUnit]) -> list[int]:
    return [unit.n_samples for unit in units]


def assert_tone(sound: np.ndarray, what: str) -> None:
    """Assert that 440 Hz dominates the spectrum."""
    power = np.abs(np.fft.rfft(sound * np.hanning(len(sound)))) ** 2
    loudest = power.argmax() * RATE / len(sound)
    assert abs(loudest - 440) < 5, f"{what}: expected 440 Hz, got {loudest:.0f}"
    level = np.sqrt(2 * np.mean(sound**2))
    assert abs(level - 1 / 8) < 0.02, f"{what}: expected a level of 0.125, got {level:.3f}"


def running(processes: list[subprocess.Popen]) -> list[list[str]]:
    """Command lines of processes without an exit status: running ones and zombies."""
    return [list(process.args) for process in processes if process.returncode is None]


def fake_ffmpeg(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a program named ffmpeg, with this Python code, before the real one."""
    program = folder / "ffmpeg"
    program.write_text(f"#!{sys.executable}\nimport sys\n{script}")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
