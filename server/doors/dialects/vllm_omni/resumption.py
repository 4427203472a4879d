"""What lets a client continue its session over another connection: a secret, and events that it has not received."""

import hashlib
import hmac
import secrets
from collections import deque
from collections.abc import Callable

KEPT_CHARS, KEPT_S = 4 * 2**20, 45.0  # of events that are not acknowledged; the oldest beyond are dropped


class EventJournal:
    """The newest events that the client has not acknowledged. clock: monotonic s."""

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self._events: deque[tuple[int, float, str]] = deque()  # number, time, event
        self._n_chars = 0
        self._dropped = 0  # number of the newest event that is not kept

    @property
    def n_chars(self) -> int:
        return self._n_chars

    def add(self, number: int, text: str) -> None:
        """Keep an event. number: rises by one from 1 on."""
        self._events.append((number, self._clock(), text))
        self._n_chars += len(text)
        oldest = self._clock() - KEPT_S
        while self._events and (self._n_chars > KEPT_CHARS or self._events[0][1] < oldest):
            self._drop()

    def acknowledge(self, number: int) -> bool:
        """Drop the events up to this one. Returns: False for an event that was not sent yet."""
        newest = self._events[-1][0] if self._events else self._dropped
        if number > newest:
            return False
        while self._events and self._events[0][0] <= number:
            self._drop()
        return True

    def after(self, number: int) -> list[str] | None:
        """The events after this one; None if some of them are not kept."""
        if number < self._dropped:
            return None
        return [text for found, _, text in self._events if found > number]

    def _drop(self) -> None:
        self._dropped, _, text = self._events.popleft()
        self._n_chars -= len(text)


class ResumeTokens:
    """The secret of one session, which each use replaces."""

    def __init__(self) -> None:
        self._digest = b""
        self._before: bytes | None = None  # valid until the client has shown that it has the new one

    def issue(self) -> str:
        """A new secret. The one before stays valid until `confirm`."""
        token = secrets.token_urlsafe(32)
        self._before, self._digest = self._digest or None, _digest(token)
        return token

    def confirm(self) -> None:
        """The client has received the newest secret."""
        self._before = None

    def accepts(self, token: str) -> bool:
        given = _digest(token)
        is_newest = hmac.compare_digest(given, self._digest)
        return is_newest or (self._before is not None and hmac.compare_digest(given, self._before))


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
