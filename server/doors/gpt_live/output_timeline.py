"""The sound of the reply on a timeline that never stops, with silence between speech. Contains no clock."""

from collections import deque

import numpy as np

RATE = 24_000  # Hz, of the engine's sound
# Samples of silence before speech after a gap, 200 ms: the first unit of a turn has 160 ms less than a second of sound,
# and a later unit may take up to 40 ms longer than the first one.
HOLD = RATE // 5


class OutputTimeline:
    """Sound from the engine in, equal blocks out."""

    def __init__(self) -> None:
        self._parts: deque[np.ndarray] = deque()
        self._n_waiting = 0
        self._n_taken = 0
        self._hold = 0  # samples of silence that come before the waiting sound

    @property
    def taken_ms(self) -> int:
        """Length of the sound that was taken, silence included."""
        return self._n_taken * 1000 // RATE

    @property
    def waiting_ms(self) -> int:
        """Length of the sound that waits."""
        return self._n_waiting * 1000 // RATE

    def add(self, sound: np.ndarray) -> tuple[int, int]:
        """Add sound behind what waits. sound: [n] float32. Returns: its start and end on the timeline, in ms."""
        if not self._n_waiting and len(sound):
            self._hold = HOLD
        start = self._n_taken + self._hold + self._n_waiting
        if len(sound):
            self._parts.append(sound)
            self._n_waiting += len(sound)
        return start * 1000 // RATE, (start + len(sound)) * 1000 // RATE

    def clear(self) -> None:
        """Drop the sound that waits."""
        self._parts.clear()
        self._n_waiting = self._hold = 0

    def take(self, n: int) -> np.ndarray:
        """The next `n` samples, [n] float32."""
        block = np.zeros(n, np.float32)
        at = min(self._hold, n)
        self._hold -= at
        while at < n and self._parts:
            part = self._parts.popleft()
            used = min(len(part), n - at)
            block[at : at + used] = part[:used]
            if used < len(part):
                self._parts.appendleft(part[used:])
            at += used
            self._n_waiting -= used
        self._n_taken += n
        return block
