"""The turn lane: the client commits its sound and asks for each response. Contains no worker connection."""

from collections import deque

import numpy as np

RATE = 16_000  # Hz
MAX_S = 600  # of sound that is not committed
MAX_TRACK_S = 120  # of a track, which never pauses


class TurnLane:
    """The sound of a session without turn detection, until it is committed. max_s: older sound is dropped."""

    def __init__(self, max_s: int = MAX_S):
        self._max_samples = max_s * RATE
        self._parts: deque[np.ndarray] = deque()
        self._n = 0

    def append(self, samples: np.ndarray) -> int:
        """Add sound, [n] float32 at 16 kHz. Returns: number of the oldest samples that were dropped."""
        if len(samples):
            self._parts.append(samples)
            self._n += len(samples)
        dropped = 0
        while self._n > self._max_samples:
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
