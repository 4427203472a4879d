"""A timer of the event loop that is set often and rarely changes."""

import asyncio
from collections.abc import Callable


class WakeTimer:
    """Calls once at the earliest time that it was set to. clock: monotonic s."""

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self._handle: asyncio.TimerHandle | None = None
        self._at = 0.0

    @property
    def is_set(self) -> bool:
        return self._handle is not None

    def set(self, at: float, on_wake: Callable[[], None]) -> None:
        """Wake at that time, or before: an earlier time that is set already stays.

        on_wake: looks whether something is due, and sets the timer again.
        """
        if self._handle is not None and self._at <= at:
            return
        self.stop()
        self._at = at
        self._handle = asyncio.get_running_loop().call_later(max(0.0, at - self._clock()), self._wake, on_wake)

    def stop(self) -> None:
        """Do not wake."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _wake(self, on_wake: Callable[[], None]) -> None:
        self._handle = None
        on_wake()
