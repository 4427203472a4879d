"""When a conversation that holds a slot ends because its client sends nothing of use, or pauses it for too long."""

from collections.abc import Callable


class IdleClock:
    """The idle limit. Only units move it, so that a client cannot keep a slot with other or invalid messages.

    Args:
        limit_s: seconds without a unit; None: no limit.
        clock: monotonic s.

    Attributes:
        pause_s: limit of the last pause.
    """

    def __init__(self, limit_s: float | None, clock: Callable[[], float]):
        self._limit_s, self._clock = limit_s, clock
        self._since = clock()
        self._may_resume, self._pause_ends, self.pause_s = True, float("inf"), 0.0

    @property
    def deadline(self) -> float | None:
        """The time, on the clock, at which the limit is reached."""
        return None if self._limit_s is None else self._since + self._limit_s

    def ends_at(self, *, is_paused: bool) -> float | None:
        """The time at which waiting for a message ends the conversation; None: never.

        A pause has a limit of its own, but only one after each unit; the idle limit bounds a further one too.
        """
        if not is_paused:
            return self.deadline
        idle = self.deadline
        return self._pause_ends if self._may_resume or idle is None else min(self._pause_ends, idle)

    def is_past(self, deadline: float | None) -> bool:
        """Whether a time on the clock is over; False for None."""
        return deadline is not None and self._clock() >= deadline

    def on_unit(self) -> None:
        """Count from now on: a unit was accepted."""
        self._since, self._may_resume = self._clock(), True

    def on_pause(self, seconds: float) -> None:
        """End the conversation after so many seconds of a pause; one that goes on is not extended."""
        self._pause_ends, self.pause_s = min(self._pause_ends, self._clock() + seconds), seconds

    def end_pause(self) -> None:
        """Forget the pause."""
        self._pause_ends = float("inf")

    def on_resume(self) -> None:
        """Count from now on after a pause, once for each unit."""
        self.end_pause()
        if self._may_resume:
            self._since, self._may_resume = self._clock(), False
