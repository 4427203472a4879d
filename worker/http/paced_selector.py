"""The selector of the worker's event loop: with many conversations it lets messages gather for a moment.

The loop asks for messages after each step of its work, and each time the interpreter changes to another thread and
back. With 32 clients that is some thousand times a second, and each time the engine's thread stands still.
"""

import selectors
import time
from collections.abc import Callable

SPACING_S = 0.003  # from one look at the sockets to the next one
MANY = 12  # conversations; with fewer every message is read at once


class PacedSelector(selectors.DefaultSelector):
    """A selector that looks at the sockets at most once in `SPACING_S` while there are many conversations.

    Work that is ready meanwhile is done without a look; a loop without work sleeps until the next one.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep):
        super().__init__()
        self._clock, self._sleep = clock, sleep
        self._spacing_s, self._next = 0.0, float("-inf")

    def count_conversations(self, n: int) -> None:
        """Set the number of open conversations."""
        self._spacing_s = SPACING_S if n >= MANY else 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """As `selectors.BaseSelector.select`; without events also if it is too early for a look."""
        if self._spacing_s:
            early_s = self._next - self._clock()
            if early_s > 0 and timeout == 0:
                return []
            if early_s > 0:
                self._sleep(early_s if timeout is None else min(early_s, timeout))
                timeout = None if timeout is None else max(timeout - early_s, 0)
        events = super().select(timeout)
        if self._spacing_s:
            self._next = self._clock() + self._spacing_s
        return events
