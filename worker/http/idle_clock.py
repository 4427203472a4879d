"""When a conversation that holds a slot ends because its client sends nothing of use."""

from collections.abc import Callable


class IdleClock:
    """The idle limit. Only units move it, so that a client cannot keep a slot with other or invalid messages.

    Args:
        limit_s: seconds without a unit; None: no limit.
        clock: monotonic s.
    """

    def __init__(self, limit_s: float | None, clock: Callable[[], float]):
        self._limit_s, self._clock = limit_s, clock
        self._since = clock()
        self._may_resume = True

    @property
    def deadline(self) -> float | None:
        """The time, on the clock, at which the limit is reached."""
        return None if self._limit_s is None else self._since + self._limit_s

    def while_paused(self, pause_ends: float) -> float:
        """The time at which a pause ends the conversation: the limit bounds a second pause without a unit between."""
        deadline = self.deadline
        return pause_ends if self._may_resume or deadline is None else min(pause_ends, deadline)

    def is_past(self, deadline: float | None) -> bool:
        """Whether a time on the clock is over; False for None."""
        return deadline is not None and self._clock() >= deadline

    def on_unit(self) -> None:
        """Count from now on: a unit was accepted."""
        self._since, self._may_resume = self._clock(), True

    def on_resume(self) -> None:
        """Count from now on after a pause, once for each unit."""
        if self._may_resume:
            self._since, self._may_resume = self._clock(), False
