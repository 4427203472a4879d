"""Which rounds of a half-duplex conversation stay in the context. Torch-free.

A round is a user turn and the reply to it. The system message before the first round and rounds that contain a system
message are never evicted. Counts rows only. Does not access a cache: evictions are returned as `Drop`, to be applied in
order.
"""

from dataclasses import dataclass

from worker.loop.results import StopReason
from worker.loop.window import Drop


@dataclass(frozen=True, slots=True)
class Round:
    """n_rows: cache rows. is_system: never evicted."""

    n_rows: int
    is_system: bool


class Rounds:
    """One conversation's rounds, oldest first.

    Attributes:
        stopped: why the newest reply ended, None before the first one. The ids that close a reply are fed with the next
            round.
    """

    def __init__(self, *, high: int, low: int):
        """Above `high` rows the oldest rounds are evicted until at most `low` rows are left; the newest round stays."""
        assert 0 <= low <= high, f"marks: expected 0 <= low <= high, got {low} and {high}"
        self.high, self.low = high, low
        self.rounds: list[Round] = []
        self.stopped: StopReason | None = None

    @property
    def length(self) -> int:
        """Rows the cache holds."""
        return sum(round_.n_rows for round_ in self.rounds)

    @property
    def prefix(self) -> int:
        """Rows at the front that no eviction removes."""
        kept = 0
        for round_ in self.rounds:
            if not round_.is_system:
                break
            kept += round_.n_rows
        return kept

    def add_system(self, n_rows: int) -> None:
        """A system message of `n_rows` rows is in the cache."""
        self.rounds.append(Round(n_rows, True))

    def close(self, n_rows: int, stopped: StopReason, *, n_closing: int = 0) -> list[Drop]:
        """Register a round of `n_rows` rows.

        Args:
            stopped: why its reply ended.
            n_closing: rows at its front that close the round before.
        Returns: evictions to apply, in order.
        """
        assert 0 <= n_closing < n_rows, f"closing rows: expected fewer than {n_rows}, got {n_closing}"
        if n_closing:
            before = self.rounds.pop()
            self.rounds.append(Round(before.n_rows + n_closing, before.is_system))
        self.rounds.append(Round(n_rows - n_closing, False))
        self.stopped = stopped
        return self._slide() if self.length > self.high else []

    def _slide(self) -> list[Drop]:
        excess, keep = self.length - self.low, 0
        kept: list[Round] = []
        drops: list[Drop] = []
        for round_ in self.rounds[:-1]:
            if round_.is_system or excess <= 0:
                kept.append(round_)
                keep += round_.n_rows
                continue
            excess -= round_.n_rows
            # Adjacent rows are dropped at once.
            n = drops.pop().n if drops and drops[-1].keep == keep else 0
            drops.append(Drop(keep, n + round_.n_rows))
        self.rounds = [*kept, self.rounds[-1]]
        return drops
