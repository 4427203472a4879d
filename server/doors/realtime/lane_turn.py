"""The turn lane: the client commits its sound and asks for each response. Contains no worker connection."""

from collections import deque

import numpy as np

MAX_SAMPLES = 600 * 16_000  # of sound that is not committed


class TurnLane:
    """The sound of a session without turn detection, until it is committed."""

    def __init__(self) -> None:
        self._parts: deque[np.ndarray] = deque()
        self._n = 0

    def append(self, samples: np.ndarray) -> int:
        """Add sound, [n] float32 at 16 kHz. Returns: number of the oldest samples that were dropped."""
        if len(samples):
            self._parts.append(samples)
            self._n += len(samples)
        dropped = 0
        while self._n > MAX_SAMPLES:
            part = self._parts.popleft()
            self._n -= len(part)
            dropped += len(part)
        return dropped

    def clear(self) -> None:
        """Drop sound that is not committed."""
        self._parts.clear()
        self._n = 0

    def take(self) -> np.ndarray:
        """Remove all sound, [n] float32 at 16 kHz."""
        sound = np.concatenate(self._parts) if self._parts else np.zeros(0, np.float32)
        self.clear()
        return sound
