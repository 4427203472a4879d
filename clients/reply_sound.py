"""A WAV file of the reply on the conversation's time line, written while the sound arrives. Contains no messages."""

from pathlib import Path
from typing import Self

import numpy as np
import soundfile

from models.errors import SettingsError
from worker.protocol.wire import SOUND_RATE, Sound
from worker.transcript.timeline import sound_start

SILENCE_BLOCK = 60 * SOUND_RATE


class ReplySound:
    """The reply at 24 kHz, mono, 16 bits. Use as `with`: leaving it moves the file into place, also after an error.

    The time line starts with the recording of the first unit, so unit k is complete at second k + 1. Sound is placed at
    its arrival, as a player with a delay of `delay_ms` plays it (`sound_start`). An empty reply leaves no file.

    Attributes:
        n_samples: samples of sound so far.
    """

    def __init__(self, path: Path | None, delay_ms: int = 0):
        """
        Args:
            path: the file; None: only count the samples.
            delay_ms: the player's delay before sound that follows silence.
        Raises:
            SettingsError: if the file cannot be written.
        """
        self.n_samples = 0
        self._delay = delay_ms * SOUND_RATE // 1000
        self._end = 0  # of the sound so far, on the time line
        self._file: soundfile.SoundFile | None = None
        if path is not None:
            check_target(path)
            self._path, self._draft = path, path.with_name(path.name + ".part")
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
        """Append sound.

        Args:
            arrived_s: time of its arrival, in s since the start of the conversation.
            pcm: [n] float32.
        Returns:
            Its start on the time line, in samples.
        """
        begin = sound_start(round(arrived_s * SOUND_RATE), self._end, self._delay)
        self._silence(begin)
        if self._file is not None:
            self._file.write(np.frombuffer(Sound(pcm).packed("pcm16"), "<i2"))
        self._end = begin + len(pcm)
        self.n_samples += len(pcm)
        return begin

    def fill(self, until_s: float) -> None:
        """Append silence up to this second of the conversation, unless the file is longer already."""
        self._silence(round(until_s * SOUND_RATE))

    def _silence(self, until: int) -> None:
        while self._end < until:
            n = min(until - self._end, SILENCE_BLOCK)
            if self._file is not None:
                self._file.write(np.zeros(n, np.int16))
            self._end += n


def check_target(path: Path) -> None:
    """Check that a file can be created. Raises: SettingsError."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        got = "a folder" if path.is_dir() else "a missing folder"
        raise SettingsError(str(path), expected="a writable file path", got=got)
