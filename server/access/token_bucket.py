"""Rates with bursts."""

BURST_S = 10.0  # seconds of its rate that a client may use at once


class TokenBucket:
    """A rate with a burst. rate: tokens a second."""

    def __init__(self, rate: float, now: float):
        self._rate, self._most = rate, max(1.0, rate * BURST_S)
        self._tokens, self._at = self._most, now

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self._rate

    def _refill(self, now: float) -> None:
        self._tokens = min(self._most, self._tokens + (now - self._at) * self._rate)
        self._at = now

    def take(self, now: float) -> float:
        """Take one token. Returns: 0.0; without a token the seconds until there is one, and nothing is taken."""
        self._refill(now)
        if self._tokens < 1:
            return (1 - self._tokens) / self._rate
        self._tokens -= 1
        return 0.0

    def charge(self, n: float, now: float) -> None:
        """Take `n` tokens; at most those of a second are then owed."""
        self._refill(now)
        self._tokens = min(self._tokens, max(self._tokens - n, -self._rate))

    def spend(self, n: float, now: float) -> float:
        """Take `n` tokens, also if there are fewer. Returns: seconds until none is owed."""
        self._refill(now)
        self._tokens -= n
        return max(0.0, -self._tokens / self._rate)
