"""The reply as a listener heard it: a WAV file on the conversation's time line, written while it grows.

Knows samples and where they belong. Does not know messages.
"""

from pathlib import Path
from typing import Self

import numpy as np
import soundfile

from models.errors import SettingsError
from worker.protocol.wire import Sound

SOUND_RATE = 24_000
SILENCE_BLOCK = 60 * SOUND_RATE


class ReplySound:
    """24 kHz, mono, 16 bits. `with` puts the file in its place at the end, however it ends; nothing is no file.

    The conversation begins when the first unit began to be heard, so unit k is whole at second k + 1. Sound is laid
    where it arrived: gaplessly behind sound that still plays, else `delay_ms` later, which is what a player waits.
    n_samples: of sound so far. path None: only counts.
    """

    def __init__(self, path: Path | None, delay_ms: int = 0):
        """Raises: SettingsError where no file can be."""
        self.n_samples = 0
        self._path, self._delay = path, delay_ms * SOUND_RATE // 1000
        self._end = 0  # of the sound so far, on the time line
        self._draft, self._file = None, None
        if path is not None:
            check_target(path)
            self._draft = path.with_name(path.name + ".part")
            self._file = soundfile.SoundFile(self._draft, "w", SOUND_RATE, 1, "PCM_16", format="WAV")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
            if self._end:
                self._draft.replace(self._path)
            else:
                self._draft.unlink()

    def add(self, arrived_s: float, pcm: np.ndarray) -> int:
        """[n] float32 that arrived at this second of the conversation. Returns: where it begins, in samples."""
        ready = round(arrived_s * SOUND_RATE)
        begin = self._end if self._end >= ready else ready + self._delay
        self._silence(begin)
        if self._file is not None:
            self._file.write(np.frombuffer(Sound(pcm).packed("pcm16"), "<i2"))
        self._end = begin + len(pcm)
        self.n_samples += len(pcm)
        return begin

    def fill(self, until_s: float) -> None:
        """Silence to this second of the conversation, if there is no sound so far."""
        self._silence(round(until_s * SOUND_RATE))

    def _silence(self, until: int) -> None:
        while self._end < until:
            n = min(until - self._end, SILENCE_BLOCK)
            if self._file is not None:
                self._file.write(np.zeros(n, np.int16))
            self._end += n


def check_target(path: Path) -> None:
    """Raises: SettingsError where no file can be written."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        got = "a folder" if path.is_dir() else "a folder that is not there"
        raise SettingsError(str(path), expected="a place for a file", got=got)
