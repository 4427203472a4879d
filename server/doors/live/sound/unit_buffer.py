"""Sound and pictures that wait for the next unit. Contains no clock."""

from collections import deque

import numpy as np

UNIT_SAMPLES = 16_000
MAX_SAMPLES = 60 * UNIT_SAMPLES  # of sound that was sent faster than real time
MAX_PICTURES = 4  # in one unit


class UnitBuffer:
    """The waiting sound at 16 kHz, in order, and the newest pictures.

    Attributes:
        n_open: samples of the next unit that were taken as pieces of it.
        n_ahead: pictures of the next unit that were taken before the others.
        newest: the sound of the last `append`.
    """

    def __init__(self) -> None:
        self._parts: deque[np.ndarray] = deque()
        self._n = self.n_open = self.n_ahead = 0
        self.newest = np.zeros(0, np.float32)
        self._pictures: deque[tuple[bytes, int]] = deque(maxlen=MAX_PICTURES)

    @property
    def n_samples(self) -> int:
        return self._n

    @property
    def n_units(self) -> int:
        """Number of units that the waiting sound fills; the last one may be shorter."""
        return -(-(self._n + self.n_open) // UNIT_SAMPLES)

    @property
    def n_missing(self) -> int:
        """Samples that the next unit lacks; 0 for a whole one."""
        return max(UNIT_SAMPLES - self._n - self.n_open, 0)

    @property
    def has_unit(self) -> bool:
        """Whether a whole unit of sound waits."""
        return not self.n_missing

    def append(self, samples: np.ndarray) -> int:
        """Add sound. Returns: number of the oldest samples that were dropped, because more than a minute waits."""
        n, self.newest = len(samples), samples
        if n:
            self._parts.append(samples)
            self._n += n
        dropped = self._n - MAX_SAMPLES
        if dropped <= 0:
            return 0
        self._take(dropped)
        return dropped

    def begin_with_silence(self, n: int) -> None:
        """Put `n` samples of silence before the waiting sound."""
        if n:
            self._parts.appendleft(np.zeros(n, np.float32))
            self._n += n

    @property
    def has_picture(self) -> bool:
        """Whether a picture waits."""
        return bool(self._pictures)

    def add_picture(self, data: bytes, max_slices: int) -> None:
        """Add an encoded picture for the next unit."""
        self._pictures.append((data, max_slices))

    def clear_sound(self) -> None:
        self._parts.clear()
        self._n = 0

    def take(self) -> tuple[np.ndarray, list[tuple[bytes, int]]]:
        """Remove what a unit has besides `n_open`: [n] float32, with silence for missing samples, and all pictures."""
        n, self.n_open = UNIT_SAMPLES - self.n_open, 0
        sound = self._take(min(self._n, n))
        if len(sound) < n:
            sound = np.concatenate((sound, np.zeros(n - len(sound), np.float32)))
        pictures, self.n_ahead = self.take_pictures(), 0
        return sound, pictures

    def take_piece(self, n: int) -> np.ndarray:
        """Remove the next `n` samples as a piece of the next unit."""
        self.n_open += n
        return self._take(n)

    def take_pictures(self) -> list[tuple[bytes, int]]:
        """Remove all pictures. Returns: the newest ones, for which the unit has room."""
        pictures = list(self._pictures)[self.n_ahead - MAX_PICTURES :]
        self._pictures.clear()
        return pictures

    def _take(self, n: int) -> np.ndarray:
        """Remove the oldest `n` samples."""
        taken = []
        while n:
            part = self._parts.popleft()
            if len(part) > n:
                self._parts.appendleft(part[n:])
                part = part[:n]
            taken.append(part)
            n -= len(part)
            self._n -= len(part)
        return np.concatenate(taken) if taken else np.zeros(0, np.float32)
