"""Who waits for a place, in which order. A plain class: no I/O, the clock is passed in.

Knows tickets and their order. Does not know workers, sockets or how long anything takes.
"""

import secrets
import time
from bisect import insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Literal

from models.errors import ModelError

RequestType = Literal["chat", "half_duplex_audio", "audio_duplex", "omni_duplex"]


class QueueFullError(ModelError, RuntimeError):
    """As many tickets wait as may wait."""


@dataclass(eq=False)
class Ticket:
    """One place in the queue. number: its order, counted from 1. since: monotonic s. enqueued_at: Unix s."""

    number: int
    request_type: RequestType
    session_id: str
    since: float
    enqueued_at: float
    ticket_id: str = field(default_factory=lambda: f"q_{secrets.token_hex(6)}")


class Queue:
    """First come, first served."""

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic, wall: Callable[[], float] = time.time):
        """most: tickets that may wait."""
        self.most = most
        self._clock, self._wall = clock, wall
        self._numbers = count(1)
        self._waiting: list[Ticket] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Ticket]:
        return iter(tuple(self._waiting))

    def __contains__(self, ticket: object) -> bool:
        return ticket in self._waiting

    def ticket(self, request_type: RequestType, session_id: str) -> Ticket:
        """A new ticket, which does not wait yet."""
        return Ticket(next(self._numbers), request_type, session_id, self._clock(), self._wall())

    def join(self, ticket: Ticket) -> None:
        """Wait, behind everybody. Raises: QueueFullError."""
        if len(self._waiting) >= self.most:
            raise QueueFullError("queue", expected=f"at most {self.most} tickets", got="one more")
        self.rejoin(ticket)

    def rejoin(self, ticket: Ticket) -> None:
        """Wait at the place that the ticket's number gives it, however full the queue is: it was let in before."""
        assert ticket not in self._waiting, f"{ticket.ticket_id} waits already"
        insort(self._waiting, ticket, key=lambda one: one.number)

    def leave(self, ticket: Ticket) -> bool:
        """Returns: whether it waited."""
        if ticket not in self._waiting:
            return False
        self._waiting.remove(ticket)
        return True

    @property
    def head(self) -> Ticket | None:
        """Who is next."""
        return self._waiting[0] if self._waiting else None

    def find(self, ticket_id: str) -> Ticket | None:
        """By its name, if it waits."""
        return next((one for one in self._waiting if one.ticket_id == ticket_id), None)
