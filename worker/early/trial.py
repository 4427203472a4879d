"""A unit that may run before its second is full: the permission, and what has become of it. Torch-free."""

from dataclasses import dataclass
from enum import StrEnum


class EarlyEnd(StrEnum):
    """How a trial ends."""

    SKIPPED = "skipped"  # it has not run
    TAKEN_BACK = "taken_back"  # it has run, and the session is as it was before
    COMMITTED = "committed"  # it is the session's unit


@dataclass(frozen=True)
class EarlyOutcome:
    """The end of a trial.

    Args:
        shift_ms: silence that stands for the rest of the second; 0 unless the trial is committed.
        spent_ms: time of the engine thread up to the decision.
    """

    end: EarlyEnd = EarlyEnd.SKIPPED
    shift_ms: float = 0.0
    spent_ms: float = 0.0


class EarlyTrial:
    """The permission to run a unit early, until it is void.

    Attributes:
        outcome: written by the engine thread before the unit's result.
    """

    def __init__(self) -> None:
        self._is_void = False
        self.outcome = EarlyOutcome()

    @property
    def is_void(self) -> bool:
        """Whether the user speaks again."""
        return self._is_void

    def void(self) -> None:
        """Withdraw the permission. Any thread may call it; a trial that is committed stays."""
        self._is_void = True

    def end(self, outcome: EarlyOutcome) -> None:
        """Record how the trial has ended."""
        self.outcome = outcome
