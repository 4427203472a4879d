"""The selector of the worker's event loop: with many conversations it looks at the sockets less often.

Each look releases the interpreter's lock, and the engine's thread waits while the lock changes hands. In exchange a
message, or a call from another thread, may wait up to `SPACING_S`.
"""

import selectors
import time
from collections.abc import Callable

SPACING_S = 0.003  # until the next look, after one that has found nothing
MANY = 12  # conversations; with fewer every message is read at once


class PacedSelector(selectors.DefaultSelector):
    """A selector that, with many conversations, waits `SPACING_S` after each look that has found nothing.

    Work that is ready meanwhile is done without a look; a loop without work sleeps until the next one. A look that has
    found something is followed by another one at once: a long message takes several.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep):
        super().__init__()
        self._clock, self._sleep = clock, sleep
        self._is_paced = self._has_found = False
        self._next = float("-inf")

    def set_n_conversations(self, n: int) -> None:
        """Set the number of open conversations."""
        self._is_paced = n >= MANY

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """As `selectors.BaseSelector.select`; may return no events before `timeout`, if it is too early for a look."""
        if not self._is_paced:
            return super().select(timeout)
        early_s = self._next - self._clock()
        if early_s > 0:
            if timeout is not None and timeout <= early_s:
                if timeout > 0:
                    self._sleep(timeout)
                return []
            self._sleep(early_s)
            timeout = None if timeout is None else timeout - early_s
        events = super().select(0 if self._has_found else timeout)
        self._has_found = bool(events)
        self._next = self._clock() + (0.0 if events else SPACING_S)
        return events
