"""Which rounds of a half-duplex conversation stay in the context. Torch-free.

A round is what the user said and the answer to it; what stands before all of them, and every later round in which a
system message came, is never dropped. Knows rows only. Does not touch a cache: what has to go is given back as `Drop`,
to be applied in order.
"""

from dataclasses import dataclass

from worker.loop.window import Drop


@dataclass(frozen=True, slots=True)
class Round:
    """n_rows: cache rows. is_system: it may not be dropped."""

    n_rows: int
    is_system: bool


class Rounds:
    """One conversation's rounds, oldest first.

    Attributes:
        stopped: how the newest answer ended (`worker.chat.reply.Reply.stopped`), None before the first one. Its end was
            never fed: that is up to the next round.
        n_dropped: rounds gone. dropped_rows: rows gone with them.
    """

    def __init__(self, *, high: int, low: int):
        """Above `high` rows the oldest rounds leave until at most `low` are left, but for the newest round."""
        assert 0 <= low <= high, f"marks: expected 0 <= low <= high, got {low} and {high}"
        self.high, self.low = high, low
        self.rounds: list[Round] = []
        self.stopped: str | None = None
        self.n_dropped = self.dropped_rows = 0

    @property
    def length(self) -> int:
        """Rows the cache holds."""
        return sum(one.n_rows for one in self.rounds)

    @property
    def prefix(self) -> int:
        """Rows at the front that nothing touches."""
        kept = 0
        for one in self.rounds:
            if not one.is_system:
                break
            kept += one.n_rows
        return kept

    def add_system(self, n_rows: int) -> None:
        """A system message of `n_rows` rows is in the cache."""
        self.rounds.append(Round(n_rows, True))

    def close(self, n_rows: int, stopped: str, *, n_closing: int = 0) -> list[Drop]:
        """Register a round of `n_rows` rows and how its answer stopped.

        n_closing: rows at its front that still belong to what stands before it.
        Returns: what the cache has to drop now, in order.
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
        for one in self.rounds[:-1]:
            if one.is_system or excess <= 0:
                kept.append(one)
                keep += one.n_rows
                continue
            excess -= one.n_rows
            self.n_dropped += 1
            self.dropped_rows += one.n_rows
            # Rows that lie side by side go at once.
            n = drops.pop().n if drops and drops[-1].keep == keep else 0
            drops.append(Drop(keep, n + one.n_rows))
        self.rounds = [*kept, self.rounds[-1]]
        return drops
