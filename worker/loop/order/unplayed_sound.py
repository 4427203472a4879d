"""What a client still has to play of the model's open turn. Torch-free."""

from dataclasses import dataclass, field

from worker.loop.results import GapCause, PlaybackGap

PLAYER_S = 0.2  # from a turn's first sound to its playback, for the count of gaps


@dataclass(eq=False)
class UnplayedSound:
    """Sound of the open turn at a client that plays it as soon as it arrives. All times in s.

    Attributes:
        ends: clock reading at which the client has played all sound so far; None: none of the turn was sent.
    """

    ends: float | None = None
    _buffer_ends: float = field(default=0.0, init=False)  # as `ends`, of a player that begins later
    _has_waited: bool = field(default=False, init=False)

    @property
    def is_silent(self) -> bool:
        """Whether the turn has no sound yet."""
        return self.ends is None

    def is_over(self, now: float) -> bool:
        """Whether the client has nothing to play."""
        return self.ends is None or self.ends <= now

    def wait(self) -> None:
        """Record that the turn's next sound waits for the first sound of others."""
        self._has_waited = True

    def add(self, seconds: float, now: float, arrived: float) -> PlaybackGap | None:
        """Count sound that is sent now. After a gap, the client goes on with it at once.

        Args:
            arrived: clock reading when its unit arrived.
        Returns: the gap before it at a player that begins `PLAYER_S` after the turn's first sound; None: there is none.
        """
        gap, has_waited, self._has_waited = None, self._has_waited, False
        if self.ends is None:
            self.ends, self._buffer_ends = now, now + PLAYER_S
        elif now > self._buffer_ends:
            cause: GapCause = "client" if arrived > self._buffer_ends else "order" if has_waited else "engine"
            gap = PlaybackGap(now - self._buffer_ends, cause)
        self.ends = max(now, self.ends) + seconds
        self._buffer_ends = max(now, self._buffer_ends) + seconds
        return gap

    def begin_turn(self) -> None:
        """Forget the turn; the next sound is the first one of another turn."""
        self.ends, self._has_waited = None, False
