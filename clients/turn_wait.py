"""What the wait for an answer is made up of: from the end of what a user says to the first sound. All times in ms."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from models.inputs.audio_sizes import SAMPLE_RATE
from worker.protocol.messages import Result

FRAME = SAMPLE_RATE // 100
FLOOR_FRAMES = 500  # of the past, whose quietest tenth is the noise
ABOVE_NOISE = 4.0  # level of speech over that of the noise
MIN_LEVEL = 0.005  # of speech: -46 dB
MIN_SPEECH_FRAMES = 5  # in a row, so that a click is no speech
NEAR_FRAMES = 60  # after speech


class WorkerTimes(NamedTuple):
    """Times of a unit in the worker, from the arrival of its last piece to its first sound.

    model: up to the launch of the first window of speech tokens at the vocoder, waiting included. vocoder: after it.
    """

    model: float
    vocoder: float

    @classmethod
    def of(cls, result: Result) -> "WorkerTimes | None":
        """The times of a unit; None if it has no sound or the server does not tell."""
        first = result.stages.get("first_sound")
        if first is None:
            return None
        vocoder = result.stages.get("first_vocoder") or 0.0
        # `first_sound` counts from the engine's inbox; `lag_ms` has the time in front of it, and once more that in it.
        whole = first + result.lag_ms - (result.stages.get("wait") or 0.0)
        return cls(whole - vocoder, vocoder)


@dataclass(frozen=True)
class TurnWait:
    """The wait for the first sound of a turn.

    Attributes:
        alignment: from the end of speech to the end of the sound that the turn's first unit ran with.
        saved: silence for which an early unit did not wait; not part of the wait.
        model, vocoder: in the worker, see `WorkerTimes`.
        transport: between client and worker, both ways.
        playback: delay of the player.
    """

    alignment: float
    saved: float
    model: float
    vocoder: float
    transport: float
    playback: float

    @classmethod
    def of(cls, result: Result, *, alignment: float, first_sound: float, playback: float) -> "TurnWait | None":
        """The wait for a turn that begins with this result.

        Args:
            alignment: as above.
            first_sound: from sending the unit's last piece to its first sound, at the client.
            playback: as above.
        Returns: None if the server does not tell its part.
        """
        times = WorkerTimes.of(result)
        if times is None:
            return None
        transport = first_sound - times.model - times.vocoder
        return cls(alignment, result.shift_ms or 0.0, *times, transport, playback)

    @property
    def total(self) -> float:
        """From the end of speech to the first sound in the player."""
        return self.alignment + self.model + self.vocoder + self.transport + self.playback


class SpeechEnd:
    """The end of the user's speech in sound that is pushed in order, by its level in frames of 10 ms.

    Loud noise counts as speech.
    """

    def __init__(self) -> None:
        self._levels = np.zeros(0, np.float32)  # of the newest frames
        self._rest = np.zeros(0, np.float32)
        self._n_frames = self._n_loud = 0
        self._end: int | None = None  # frame after the last one of speech

    @property
    def end_s(self) -> float | None:
        """Seconds from the first sample to the end of the newest speech; None without speech."""
        return None if self._end is None else self._end * FRAME / SAMPLE_RATE

    @property
    def is_near(self) -> bool:
        """Whether the user speaks, or has spoken within 600 ms."""
        return self._end is not None and self._n_frames - self._end < NEAR_FRAMES

    def push(self, samples: np.ndarray) -> None:
        """Hear [n] float32 at 16 kHz."""
        samples = np.concatenate((self._rest, samples))
        n = len(samples) // FRAME
        frames, self._rest = samples[: n * FRAME].reshape(n, FRAME), samples[n * FRAME :]
        levels = np.sqrt(np.square(frames).mean(1))
        self._levels = np.concatenate((self._levels, levels))[-FLOOR_FRAMES:]
        floor = float(np.quantile(self._levels, 0.1)) if len(self._levels) else 0.0
        for is_loud in levels > max(ABOVE_NOISE * floor, MIN_LEVEL):
            self._n_frames += 1
            self._n_loud = self._n_loud + 1 if is_loud else 0
            if self._n_loud >= MIN_SPEECH_FRAMES:
                self._end = self._n_frames
