"""A worker's session without a worker, for sessions of doors."""

from typing import Any


class RecordedUnits:
    """A worker's session that records messages.

    n_unanswered, is_paused, max_context_len, runs_early: set by the test.
    """

    max_context_len = 100
    runs_early = False

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.n_unanswered, self.is_paused = 0, False

    def send(self, message: Any) -> None:
        self.sent.append(message)
