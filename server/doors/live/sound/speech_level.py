"""Whether the user has just spoken, by the level of the sound. Loud noise counts as speech. Contains no clock."""

import math

import numpy as np

FRAME = 160  # samples: 10 ms
NEAR_FRAMES = 60  # after speech, whose last sound is often soft, in which a pause may be reached
ABOVE_NOISE = 4.0  # level of speech over that of the noise
MIN_LEVEL = 0.005  # of speech: -46 dB
RISE = 1.005  # of the noise level in a frame: the noise is the quietest sound of the last seconds


class SpeechLevel:
    """The level of one user's sound.

    Attributes:
        is_near: the user speaks, or has spoken within 600 ms.
    """

    def __init__(self) -> None:
        self._noise, self._n_quiet = math.inf, NEAR_FRAMES

    @property
    def is_near(self) -> bool:
        return self._n_quiet < NEAR_FRAMES

    def push(self, samples: np.ndarray) -> None:
        """Hear [n] float32 at 16 kHz. Of long sound the end is enough; shorter than a frame is a frame."""
        samples = samples[-2 * NEAR_FRAMES * FRAME :]
        n = max(len(samples) // FRAME, 1)
        for frame in np.array_split(samples, n) if len(samples) else ():
            level = float(np.sqrt(np.square(frame).mean()))
            self._noise = min(level, self._noise * RISE)
            self._n_quiet = 0 if level > max(ABOVE_NOISE * self._noise, MIN_LEVEL) else self._n_quiet + 1
