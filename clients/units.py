"""The input of a conversation: units of a media file, decoded ahead on a thread, and the sound of a voice.

Contains no pacing and no sockets.
"""

import asyncio
import io
from collections import deque
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from PIL import Image

from clients.turn_wait import SpeechEnd
from models.errors import SettingsError
from models.inputs.audio_sizes import UNIT_SAMPLES
from worker.media import MediaUnits, read_units

JPEG_QUALITY = 70
MAX_VOICE_S = 60


@dataclass(frozen=True, eq=False)
class ClientUnit:
    """One second of input, or a piece of it.

    Attributes:
        sound: [16000] float32 at 16 kHz in [-1, 1]; fewer samples in a piece.
        jpegs: encoded pictures.
    """

    sound: np.ndarray
    jpegs: tuple[bytes, ...] = ()


PIECE = UNIT_SAMPLES // 10
SPOKEN_PIECE = UNIT_SAMPLES // 25  # beside speech: a pause is found when a piece ends


class UnitEnd:
    """Where the server's unit ends in the sound that was sent, as the answers show; each early unit moves it."""

    def __init__(self) -> None:
        self._n_sent = self._edge = 0  # samples of all messages, and of those up to the end of the last answered unit
        self._open: deque[tuple[int, int]] = deque()  # end and length of each message without an answer

    @property
    def edge(self) -> int:
        """Samples up to the end of the last answered unit."""
        return self._edge

    @property
    def rest(self) -> int:
        """Samples from the end of the last message to the end of the server's unit."""
        return UNIT_SAMPLES - (self._n_sent - self._edge) % UNIT_SAMPLES

    def sent(self, n_samples: int) -> None:
        """A message was sent."""
        self._n_sent += n_samples
        self._open.append((self._n_sent, n_samples))

    def answered(self, *, ends_unit: bool) -> None:
        """The oldest message without an answer was answered. ends_unit: the server's unit ended with this message.

        A unit that is full within the message ends there, and the next one has the rest.
        """
        if not self._open:
            return
        end, n_samples = self._open.popleft()
        if ends_unit:
            over = (end - self._edge) % UNIT_SAMPLES
            is_inside = end - self._edge >= UNIT_SAMPLES and over < n_samples
            self._edge = end - over if is_inside else end

    def refused(self) -> None:
        """The oldest message without an answer was refused: its sound is in no unit."""
        if self._open:
            self._edge += self._open.popleft()[1]


class MessageLength(UnitEnd):
    """Samples of the next message: a unit or, where units may run early, a piece of one.

    No piece crosses the end of the server's unit.

    Args:
        speech: of the user, heard up to the last message; None: messages are whole units.
    """

    def __init__(self, speech: SpeechEnd | None):
        super().__init__()
        self._speech = speech

    @property
    def is_whole(self) -> bool:
        """Whether messages are whole units."""
        return self._speech is None

    def next(self, most: int = UNIT_SAMPLES) -> int:
        """The length of the next message. most: samples left in the source's second, which a message does not cross."""
        if self._speech is None:
            return most
        rest = min(most, self.rest)
        n = SPOKEN_PIECE if self._speech.is_near else PIECE
        return n if rest - n >= SPOKEN_PIECE else rest


class Source(Protocol):
    """A source of units."""

    async def next(self) -> ClientUnit | None:
        """The next unit; None at the end. Raises: MediaError."""


class PieceSource:
    """The units of another source in pieces. The pictures of a second come with its middle, as from a camera."""

    def __init__(self, source: Source, length: MessageLength):
        self._source, self._length = source, length
        self._unit, self._n_taken = ClientUnit(np.zeros(0, np.float32)), 0

    async def next(self) -> ClientUnit | None:
        """The next piece; None at the end. Raises: MediaError."""
        if self._n_taken == len(self._unit.sound):
            unit = await self._source.next()
            if unit is None:
                return None
            self._unit, self._n_taken = unit, 0
        begin, sound = self._n_taken, self._unit.sound
        self._n_taken = end = begin + self._length.next(len(sound) - begin)
        return ClientUnit(sound[begin:end], self._unit.jpegs if begin <= len(sound) // 2 < end else ())


class FileUnits:
    """The units of a media file; the next one is decoded ahead. Use as `async with`."""

    def __init__(self, media: MediaUnits, *, loop: bool = False):
        """
        Args:
            media: the file.
            loop: whether to restart at its end.
        """
        self._media, self._loop = media, loop
        self._units = self._decode()

    @classmethod
    def of(cls, path: str | Path, *, video: bool = True, loop: bool = False) -> "FileUnits":
        """The units of a file. video: whether to send one picture per second. Raises: MediaError."""
        return cls(read_units(path, frames_per_second=int(video)), loop=loop)

    @property
    def has_video(self) -> bool:
        return self._media.has_video

    async def __aenter__(self) -> "FileUnits":
        self._next_unit = self._decode_next()
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(self._next_unit, return_exceptions=True)  # a running generator cannot be closed
        await asyncio.to_thread(self._units.close)

    async def next(self) -> ClientUnit | None:
        """The next second; None at the end. Raises: MediaError."""
        unit = await asyncio.shield(self._next_unit)
        if unit is not None:
            self._next_unit = self._decode_next()
        return unit

    def _decode_next(self) -> "asyncio.Task[ClientUnit | None]":
        return asyncio.create_task(asyncio.to_thread(next, self._units, None))

    def _decode(self) -> Generator[ClientUnit, None, None]:
        while True:
            with closing(iter(self._media)) as units:
                for unit in units:
                    yield ClientUnit(unit.sound, tuple(map(_jpeg, unit.frames)))
            if not self._loop:
                return


def read_voice(path: str | Path) -> np.ndarray:
    """The sound of a voice from any media file, [n] float32 at 16 kHz.

    Raises:
        MediaError: for a file that cannot be decoded.
        SettingsError: for more than 60 s.
    """
    seconds = [
        unit.sound[: unit.n_samples] for unit in read_units(path, frames_per_second=0, max_units=MAX_VOICE_S + 1)
    ]
    if len(seconds) > MAX_VOICE_S:
        raise SettingsError(str(path), expected=f"a voice of at most {MAX_VOICE_S} s", got="more")
    return np.concatenate(seconds)


def _jpeg(frame: Image.Image) -> bytes:
    data = io.BytesIO()
    frame.save(data, "JPEG", quality=JPEG_QUALITY)
    return data.getvalue()
