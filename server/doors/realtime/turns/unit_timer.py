"""When missing sound counts as silence: a state machine over times that are passed in. Contains no samples and no I/O.

A unit is one second of sound. While an answer is owed, given, or may still come because the user spoke a moment ago,
units go on at the pace of the wall clock even if the client sends nothing: a program that sends a file and waits gets
its answer. Otherwise the clock pauses, and no unit runs for a quiet client.
"""

from dataclasses import dataclass

UNIT_S = 1.0
GRACE_S = 0.3  # by which sound may be late
SPOKE_S = 10.0  # after the user's last word, in which the model may still answer
MAX_AHEAD_S = 1.0  # of sound that a client holds and has not played


@dataclass(frozen=True)
class TimerState:
    """What the timer needs of the session.

    Attributes:
        is_answering: a response is open or asked for.
        spoke_at: when the user last spoke; None: not yet.
        is_idle: the worker runs no unit, and less than a unit of sound waits.
    """

    is_answering: bool
    spoke_at: float | None
    is_idle: bool


class UnitTimer:
    """The times at which units are due. All times are monotonic seconds."""

    def __init__(self) -> None:
        self._due: float | None = None  # when the next unit should be complete
        self._is_silent = False  # the last unit was completed with silence: no grace

    @property
    def is_paused(self) -> bool:
        return self._due is None

    def record_sound(self, now: float) -> None:
        """The client has sent sound."""
        if self._due is None:
            self._due = now + UNIT_S
        self._is_silent = False

    def record_unit(self, now: float, *, is_filled: bool) -> None:
        """A unit goes to the worker. is_filled: silence replaces missing sound."""
        if is_filled and self._due is not None and 0 <= now - self._due < UNIT_S:
            self._due += UNIT_S  # the next one is not late because this one was
        else:
            self._due = now + UNIT_S
        self._is_silent = is_filled

    def start(self, now: float) -> None:
        """Let the next unit be due now, if the clock is paused."""
        if self._due is None:
            self._due, self._is_silent = now, True

    def pause(self) -> None:
        """Stop until more sound comes."""
        self._due, self._is_silent = None, False

    def fill_at(self, state: TimerState, now: float) -> float | None:
        """When silence must replace the missing sound of the unit; None: not until a change.

        The clock pauses itself once nothing is owed any more.
        """
        if self._due is None or not state.is_idle:
            return None
        at = self._due if self._is_silent else self._due + GRACE_S
        may_answer = state.spoke_at is not None and at - state.spoke_at <= SPOKE_S
        if state.is_answering or may_answer:
            return at
        if now >= at:
            self.pause()
            return None
        return at


def send_at(first_sound_at: float, sent_ms: float, now: float) -> float:
    """When the next unit may go to the worker, so that the client never holds seconds of sound.

    Args:
        first_sound_at: when the open response began to sound.
        sent_ms: its sound so far.
        now: earliest result.
    """
    return max(now, first_sound_at + sent_ms / 1000 - MAX_AHEAD_S)
