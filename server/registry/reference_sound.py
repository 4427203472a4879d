"""Sound files in the form that clients receive: mono, 16 kHz, float32, base64. Decoded on first use and cached."""

import asyncio
import base64
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soundfile
import soxr

from models.errors import AudioError
from models.inputs.audio_sizes import SAMPLE_RATE

MAX_S = 30  # limit of a voice in a worker; each client receives the entire sound


@dataclass(frozen=True)
class SoundFile:
    """A decoded file. data: [n_samples] float32 at 16 kHz, little endian, base64."""

    n_samples: int
    data: str

    @property
    def duration_s(self) -> float:
        return round(self.n_samples / SAMPLE_RATE, 3)


@dataclass(frozen=True)
class _CachedSound:
    """stamp: modification time in ns and size of the file, which detect a change."""

    stamp: tuple[int, int]
    sound: SoundFile


class SoundFiles:
    """A cache of decoded files. Its size is bounded by the number of files in settings and presets."""

    def __init__(self) -> None:
        self._cache: dict[Path, _CachedSound] = {}
        self._lock = asyncio.Lock()  # concurrent requests for a file decode it once

    async def read(self, path: Path) -> SoundFile:
        """Decode a file on a thread, or return the cached result.

        Raises: AudioError for a file that is missing, is no sound, is empty or is longer than 30 s.
        """
        async with self._lock:
            cached = await asyncio.to_thread(_read, path, self._cache.get(path))
            self._cache[path] = cached
            return cached.sound


def duration_of(path: Path) -> float:
    """Duration in seconds, from the file's header. Raises: AudioError, as `SoundFiles.read` does."""
    with _open(path) as sound:
        return float(round(sound.frames / sound.samplerate, 3))


def _read(path: Path, cached: _CachedSound | None) -> _CachedSound:
    try:
        found = path.stat()
    except OSError as error:
        raise AudioError(path.name, expected="a readable file", got=error.strerror) from None
    stamp = (found.st_mtime_ns, found.st_size)
    if cached is not None and cached.stamp == stamp:
        return cached
    with _open(path) as sound:
        try:
            samples = sound.read(dtype="float32", always_2d=True).mean(axis=1)
        except soundfile.LibsndfileError as error:
            raise AudioError(path.name, expected="a sound file", got=error.error_string) from None
        samples = soxr.resample(samples, sound.samplerate, SAMPLE_RATE)
    samples = np.nan_to_num(samples).astype("<f4")
    return _CachedSound(stamp, SoundFile(len(samples), base64.b64encode(samples.tobytes()).decode()))


def _open(path: Path) -> soundfile.SoundFile:
    try:
        sound = soundfile.SoundFile(path)
    except soundfile.LibsndfileError as error:
        raise AudioError(path.name, expected="a sound file", got=error.error_string) from None
    seconds = sound.frames / sound.samplerate
    if not 0 < seconds <= MAX_S:
        sound.close()
        raise AudioError(path.name, expected=f"up to {MAX_S} s of sound", got=f"{seconds:.1f} s")
    return sound
