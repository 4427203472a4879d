"""What a client still has to play of the model's open turn. Torch-free."""

from dataclasses import dataclass


@dataclass(eq=False)
class UnplayedSound:
    """Sound of the open turn at a client that plays it as soon as it arrives. All times in s.

    Attributes:
        ends: clock reading at which the client has played all sound so far; None: none of the turn was sent.
    """

    ends: float | None = None

    @property
    def is_silent(self) -> bool:
        """Whether the turn has no sound yet."""
        return self.ends is None

    def is_over(self, now: float) -> bool:
        """Whether the client has nothing to play."""
        return self.ends is None or self.ends <= now

    def add(self, seconds: float, now: float) -> None:
        """Count sound that is sent now. After a gap, the client goes on with it at once."""
        self.ends = (now if self.ends is None else max(now, self.ends)) + seconds

    def begin_turn(self) -> None:
        """Forget the turn; the next sound is the first one of another turn."""
        self.ends = None
