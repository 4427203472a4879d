"""Where in the second the units of one worker's live sessions arrive, and a place for a new session. Torch-free.

The engine works on units as they arrive, so units that arrive together wait for each other. Contains no messages.
"""

import threading
import time
from collections.abc import Callable
from itertools import pairwise

EQUAL_S = 1e-3  # gaps that differ by less count as equally wide


class UnitPhases:
    """The phases of the sessions: arrival times of their units modulo a second. For all threads.

    Args:
        clock: monotonic s, the clock of the arrival times.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._phases: dict[str, float] = {}
        self._lock = threading.Lock()

    def reserve(self, session: str) -> float:
        """Reserve the place that is farthest from the units of all other sessions.

        Returns: the time in s, 0 to 1, after which the session's first second should begin. Its units then arrive in
            that place. A session that begins at another time moves its place with its first unit.
        """
        with self._lock:
            now = self._clock()
            others = sorted({phase for name, phase in self._phases.items() if name != session})
            delay = _delay(others, now) if others else 0.0
            self._phases[session] = (now + delay) % 1
        return delay

    def count_unit(self, session: str, arrived: float) -> None:
        """Move a session's place to where a unit has arrived."""
        with self._lock:
            self._phases[session] = arrived % 1

    def leave(self, session: str) -> None:
        """Free the place of a session that ends."""
        with self._lock:
            self._phases.pop(session, None)


def _delay(others: list[float], now: float) -> float:
    """Seconds to the middle of the widest gap, to the next such middle if gaps are about equally wide."""
    gaps = [(right - left) % 1 or 1.0 for left, right in pairwise([*others, others[0]])]
    widest = max(gaps)
    return min((left + gap / 2 - now) % 1 for left, gap in zip(others, gaps, strict=True) if gap >= widest - EQUAL_S)
