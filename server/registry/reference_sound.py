"""Sound files as clients take them: mono, 16 kHz, float32, base64. Decoded on a thread when first asked for, then kept.

Knows sound files. Does not know what the sound is for.
"""

import asyncio
import base64
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soundfile
import soxr

from models.errors import AudioError
from models.inputs.audio_sizes import SAMPLE_RATE

MAX_S = 30  # workers take no longer voice, and everybody who asks gets all of it


@dataclass(frozen=True)
class SoundFile:
    """A decoded file. data: [n_samples] float32, little endian, base64."""

    n_samples: int
    data: str

    @property
    def duration_s(self) -> float:
        return round(self.n_samples / SAMPLE_RATE, 3)


@dataclass(frozen=True)
class _Kept:
    """stamp: by which a changed file shows."""

    stamp: tuple[int, int]
    sound: SoundFile


class SoundFiles:
    """All that have been asked for: as many as settings and presets name."""

    def __init__(self) -> None:
        self._kept: dict[Path, _Kept] = {}
        self._decoding = asyncio.Lock()  # whoever asks for the same file meanwhile finds it decoded

    async def read(self, path: Path) -> SoundFile:
        """Raises: AudioError for a file that is not there, is no sound, is empty or longer than 30 s."""
        async with self._decoding:
            kept = await asyncio.to_thread(_read, path, self._kept.get(path))
            self._kept[path] = kept
            return kept.sound


def duration_of(path: Path) -> float:
    """s, by the file's header. Raises: AudioError, as `SoundFiles.read` does."""
    with _opened(path) as sound:
        return round(sound.frames / sound.samplerate, 3)


def _read(path: Path, kept: _Kept | None) -> _Kept:
    try:
        found = path.stat()
    except OSError as error:
        raise AudioError(path.name, expected="a readable file", got=error.strerror) from None
    stamp = (found.st_mtime_ns, found.st_size)
    if kept is not None and kept.stamp == stamp:
        return kept
    with _opened(path) as sound:
        try:
            samples = sound.read(dtype="float32", always_2d=True).mean(axis=1)
        except soundfile.LibsndfileError as error:
            raise AudioError(path.name, expected="a sound file", got=error.error_string) from None
        samples = soxr.resample(samples, sound.samplerate, SAMPLE_RATE)
    samples = np.nan_to_num(samples).astype("<f4")
    return _Kept(stamp, SoundFile(len(samples), base64.b64encode(samples.tobytes()).decode()))


def _opened(path: Path) -> soundfile.SoundFile:
    try:
        sound = soundfile.SoundFile(path)
    except soundfile.LibsndfileError as error:
        raise AudioError(path.name, expected="a sound file", got=error.error_string) from None
    seconds = sound.frames / sound.samplerate
    if not 0 < seconds <= MAX_S:
        sound.close()
        raise AudioError(path.name, expected=f"up to {MAX_S} s of sound", got=f"{seconds:.1f} s")
    return sound
