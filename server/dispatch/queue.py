"""The queue of tickets that wait for a slot, first come, first served.

Contains no I/O; clocks are passed in. Does not estimate waiting times.
"""

import secrets
import time
from bisect import insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Literal

from models.errors import ModelError

SessionType = Literal["chat", "half_duplex_audio", "audio_duplex", "omni_duplex"]
RequestType = SessionType | Literal["transcription", "speech", "conversion"]
Model = Literal["omni", "speech", "conversion"]


def model_of(request_type: RequestType) -> Model:
    """The model whose slots a request needs."""
    if request_type == "speech" or request_type == "conversion":
        return request_type
    return "omni"


class QueueFullError(ModelError, RuntimeError):
    """The queue already contains its maximum number of tickets."""


@dataclass(frozen=True)
class Needs:
    """What a session needs of its worker.

    labels: that the worker must have. voice: that it had better have prepared already; "": the default one.
    """

    labels: frozenset[str] = frozenset()
    voice: str = ""


ANY_WORKER = Needs()


@dataclass(eq=False)
class Ticket:
    """One request for a slot.

    number: order of arrival, from 1. owner: whose request it is. created_at: monotonic s. enqueued_at: Unix s.
    needs: what its worker must have.
    """

    number: int
    request_type: RequestType
    session_id: str
    owner: str
    created_at: float
    enqueued_at: float
    ticket_id: str = field(default_factory=lambda: f"q_{secrets.token_hex(16)}")
    needs: Needs = ANY_WORKER


class Queue:
    """Tickets in their order of arrival."""

    def __init__(
        self,
        max_size: int,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ):
        """max_size: tickets that may wait for slots of one model. clock: monotonic s. wall_clock: Unix s."""
        self.max_size = max_size
        self._clock, self._wall_clock = clock, wall_clock
        self._numbers = count(1)
        self._waiting: list[Ticket] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Ticket]:
        return iter(tuple(self._waiting))

    def __contains__(self, ticket: object) -> bool:
        return ticket in self._waiting

    def new_ticket(
        self, request_type: RequestType, session_id: str, owner: str = "", needs: Needs = ANY_WORKER
    ) -> Ticket:
        """A new ticket. It is not in the queue yet."""
        now, wall_now = self._clock(), self._wall_clock()
        return Ticket(next(self._numbers), request_type, session_id, owner, now, wall_now, needs=needs)

    def append(self, ticket: Ticket) -> None:
        """Add a ticket at the end. Raises: QueueFullError."""
        if len(self.waiting_for(model_of(ticket.request_type))) >= self.max_size:
            raise QueueFullError("queue", expected=f"at most {self.max_size} tickets", got="one more")
        self.reinsert(ticket)

    def reinsert(self, ticket: Ticket) -> None:
        """Insert a ticket at the position of its number.

        The size limit does not apply: the ticket was admitted when it was created.
        """
        assert ticket not in self._waiting, f"expected {ticket.ticket_id} outside the queue"
        insort(self._waiting, ticket, key=lambda one: one.number)

    def remove(self, ticket: Ticket) -> bool:
        """Remove a ticket. Returns: whether it was in the queue."""
        if ticket not in self._waiting:
            return False
        self._waiting.remove(ticket)
        return True

    def waiting_for(self, model: Model) -> list[Ticket]:
        """The tickets for slots of one model, in their order of arrival."""
        return [ticket for ticket in self._waiting if model_of(ticket.request_type) == model]

    def lines(self) -> "dict[tuple[Model, frozenset[str]], list[Ticket]]":
        """The tickets that compete for the same slots: by model and labels, in their order of arrival."""
        found: dict[tuple[Model, frozenset[str]], list[Ticket]] = {}
        for ticket in self._waiting:
            found.setdefault((model_of(ticket.request_type), ticket.needs.labels), []).append(ticket)
        return found

    def find(self, ticket_id: str) -> Ticket | None:
        """The ticket with this id; None if it is not in the queue."""
        return next((one for one in self._waiting if one.ticket_id == ticket_id), None)
