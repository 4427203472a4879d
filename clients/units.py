"""What a client sends: seconds of a media file as units, decoded ahead of time on a thread; sound of a voice.

Knows media files and JPEG. Does not know time nor sockets.
"""

import asyncio
import io
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from PIL import Image

from models.errors import SettingsError
from models.inputs.audio_sizes import UNIT_SAMPLES
from worker.media import MediaUnits, read_units

JPEG_QUALITY = 70
MAX_VOICE_S = 60


@dataclass(frozen=True, eq=False)
class ClientUnit:
    """sound: [16000] float32 at 16 kHz in [-1, 1]. jpegs: encoded pictures of this second."""

    sound: np.ndarray
    jpegs: tuple[bytes, ...] = ()


SILENCE = ClientUnit(np.zeros(UNIT_SAMPLES, np.float32))


class Source(Protocol):
    """Where units come from."""

    async def next(self) -> ClientUnit | None:
        """The next unit; None at the end. Raises: MediaError."""


class FileUnits:
    """A media file's units, the next one always being decoded already. Use as `async with`."""

    def __init__(self, media: MediaUnits, *, loop: bool = False):
        """loop: begin anew at the end of the file."""
        self._media, self._loop = media, loop
        self._units = self._decode()
        self._ahead: asyncio.Task[ClientUnit | None] | None = None

    @classmethod
    def of(cls, path: str | Path, *, video: bool = True, loop: bool = False) -> "FileUnits":
        """video: with one picture a second. Raises: MediaError."""
        return cls(read_units(path, frames_per_second=int(video)), loop=loop)

    @property
    def has_video(self) -> bool:
        return self._media.has_video

    async def __aenter__(self) -> "FileUnits":
        self._ahead = self._begin()
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(self._ahead, return_exceptions=True)  # a generator that runs cannot be closed
        await asyncio.to_thread(self._units.close)

    async def next(self) -> ClientUnit | None:
        """The next second; None at the end. Raises: MediaError."""
        unit = await asyncio.shield(self._ahead)
        if unit is not None:
            self._ahead = self._begin()
        return unit

    def _begin(self) -> "asyncio.Task[ClientUnit | None]":
        return asyncio.create_task(asyncio.to_thread(next, self._units, None))

    def _decode(self) -> Iterator[ClientUnit]:
        while True:
            with closing(iter(self._media)) as units:
                for unit in units:
                    yield ClientUnit(unit.sound, tuple(map(_jpeg, unit.frames)))
            if not self._loop:
                return


def read_voice(path: str | Path) -> np.ndarray:
    """[n] float32 at 16 kHz: a voice from any file with sound. Raises: MediaError, SettingsError for a long one."""
    pieces = [unit.sound[: unit.n_samples] for unit in read_units(path, frames_per_second=0, max_units=MAX_VOICE_S + 1)]
    if len(pieces) > MAX_VOICE_S:
        raise SettingsError(str(path), expected=f"at most {MAX_VOICE_S} s of a voice", got="more")
    return np.concatenate(pieces)


def _jpeg(frame: Image.Image) -> bytes:
    data = io.BytesIO()
    frame.save(data, "JPEG", quality=JPEG_QUALITY)
    return data.getvalue()
