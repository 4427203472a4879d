"""The newest sound of a session, of which spans are cut. Contains no detector."""

from collections import deque

import numpy as np

RATE_MS = 16  # samples a ms


class RecentSound:
    """Sound at 16 kHz by its time, in ms from the session's first sample.

    The detector follows the sound with a delay: what it has not heard yet is kept, however long it is.

    Args:
        max_ms: length of a span at most; of a longer one the end is cut.
        idle_ms: sound that is kept of what the detector has heard while no span is open.
    """

    def __init__(self, max_ms: int, idle_ms: int):
        self._max_ms, self._idle_ms = max_ms, idle_ms
        self._parts: deque[np.ndarray] = deque()
        self._start = self._end = 0  # samples
        self._floor_ms = 0.0  # nothing before it is cut any more
        self._begin_ms: float | None = None  # of the span that is open
        self._is_kept = False

    def keep(self, *, is_kept: bool) -> None:
        """Keep sound from now on, or keep none; time goes on in either case."""
        self._is_kept = is_kept
        if not is_kept:
            self._drop_before(self._end)

    def push(self, samples: np.ndarray) -> None:
        """Add sound, [n] float32."""
        self._end += len(samples)
        if self._is_kept:
            self._parts.append(samples)
        else:
            self._start = self._end

    def advance(self, heard_ms: float) -> None:
        """Drop what is not needed any more. heard_ms: end of what the detector has heard."""
        first_ms = heard_ms - self._idle_ms if self._begin_ms is None else self._begin_ms
        self._drop_before(round(RATE_MS * max(first_ms, heard_ms - self._max_ms)))

    def begin(self, ms: float) -> None:
        """A span begins: keep what follows."""
        self._begin_ms = ms

    def clear(self) -> None:
        """Forget all sound so far."""
        self._begin_ms, self._floor_ms = None, self._end / RATE_MS
        self._drop_before(self._end)

    def cut(self, end_ms: float | None = None) -> np.ndarray:
        """End the span: from its begin, or from the last one's end, to `end_ms`; None: to the end. [n] float32."""
        until = self._end if end_ms is None else min(self._end, round(RATE_MS * end_ms))
        since_ms = self._floor_ms if self._begin_ms is None else max(self._begin_ms, self._floor_ms)
        since = max(round(RATE_MS * since_ms), until - RATE_MS * self._max_ms)
        self._begin_ms, self._floor_ms = None, until / RATE_MS
        if not self._parts:
            return np.zeros(0, np.float32)
        sound = np.concatenate(self._parts)
        return sound[max(0, since - self._start) : max(0, until - self._start)].copy()

    def _drop_before(self, sample: int) -> None:
        """Drop parts that end before a sample."""
        while self._parts and self._start + len(self._parts[0]) <= sample:
            self._start += len(self._parts.popleft())
        if not self._parts:
            self._start = self._end
