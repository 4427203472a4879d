"""The sound of a whole recording: stereo at 16 kHz, left the user, right the model. Written while it is collected."""

import wave
from pathlib import Path
from typing import Self

import numpy as np
import soxr

from models.inputs.audio_sizes import SAMPLE_RATE
from worker.protocol.wire import PCM16_SCALE, SOUND_RATE

MIN_SEGMENT = SAMPLE_RATE  # samples; a segment is at least a second long
_NO_SAMPLES = np.zeros(0, np.float32)


class ReplaySound:
    """Segments laid end to end, within a `with` block. path: of the file."""

    def __init__(self, path: Path):
        self._path = path
        # One resampler over the whole track: resampling each segment alone would be audible at the seams.
        self._resampler = soxr.ResampleStream(SOUND_RATE, SAMPLE_RATE, 1, dtype="float32")
        self._n_samples = 0
        self._left = self._right = _NO_SAMPLES

    @property
    def seconds(self) -> float:
        """Length so far."""
        return self._n_samples / SAMPLE_RATE

    def add(self, user: np.ndarray | None, model: np.ndarray | None) -> float:
        """Append a segment in which both sounds begin together. Silence fills the shorter one.

        Args:
            user: [n] float32 at 16 kHz.
            model: [n] float32 at 24 kHz.
        Returns: where the segment begins, in seconds.
        """
        user = _NO_SAMPLES if user is None else user
        model = _NO_SAMPLES if model is None else model
        begins = self.seconds
        n_samples = max(MIN_SEGMENT, len(user), -(-len(model) * SAMPLE_RATE // SOUND_RATE))
        n_samples += n_samples % 2  # an even number has a whole number of samples at 24 kHz
        self._n_samples += n_samples
        n_model = n_samples * SOUND_RATE // SAMPLE_RATE
        padded = np.pad(np.nan_to_num(model), (0, n_model - len(model)))
        right = self._resampler.resample_chunk(padded)
        self._left = np.concatenate((self._left, np.nan_to_num(user), np.zeros(n_samples - len(user), np.float32)))
        self._right = np.concatenate((self._right, right))
        self._write(min(len(self._left), len(self._right)))
        return begins

    def _write(self, n: int) -> None:
        both = np.stack((self._left[:n], self._right[:n]), axis=1)
        steps = np.rint(both.clip(-1, 1) * (PCM16_SCALE - 1)).astype("<i2")
        self._file.writeframes(steps.tobytes())
        self._left, self._right = self._left[n:], self._right[n:]

    def __enter__(self) -> Self:
        self._file = wave.open(str(self._path), "wb")
        self._file.setnchannels(2)
        self._file.setsampwidth(2)
        self._file.setframerate(SAMPLE_RATE)
        return self

    def __exit__(self, *_: object) -> None:
        rest = self._resampler.resample_chunk(_NO_SAMPLES, last=True)
        right = np.concatenate((self._right, rest))[: len(self._left)]
        self._right = np.pad(right, (0, len(self._left) - len(right)))
        self._write(len(self._left))
        self._file.close()
