"""The one place where a free slot and the next ticket meet. No I/O: sockets and polls tell it what happened.

Knows who waits, what is free and how long it takes. Whoever waits awaits its `PendingSession`.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from server.dispatch.eta import Eta
from server.dispatch.queue import Queue, RequestType, Ticket
from server.dispatch.workers import WorkerLease, Workers

FRESH_S = 0.2  # how old an estimate may be that clients are told


@dataclass(eq=False)
class PendingSession:
    """One client from its ticket to its end. lease: once it has a slot. changed: set when there is news for it."""

    ticket: Ticket
    lease: WorkerLease | None = None
    is_cancelled: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True)
class Place:
    """Where a ticket stands. wait_s: how long it will probably wait."""

    position: int
    wait_s: float
    queue_length: int


class Dispatcher:
    """Gives slots to tickets in their order."""

    def __init__(self, workers: Workers, queue: Queue, eta: Eta, clock: Callable[[], float] = time.monotonic):
        self.workers, self.queue, self.eta = workers, queue, eta
        self._clock = clock
        self._pending_sessions: dict[Ticket, PendingSession] = {}
        self._told: tuple[float, dict[Ticket, Place]] | None = None

    def arrive(self, request_type: RequestType, session_id: str) -> PendingSession:
        """Get in line; there may be a slot at once. Raises: QueueFullError."""
        self.dispatch()
        pending = PendingSession(self.queue.ticket(request_type, session_id))
        if self.queue.head is None:
            pending.lease = self.workers.lend(request_type, session_id)
        if pending.lease is None:
            self.queue.join(pending.ticket)
            self._pending_sessions[pending.ticket] = pending
            self._told = None
        return pending

    def step_back(self, pending: PendingSession) -> None:
        """The slot turned out to be none: back to the old place in the queue."""
        lease, pending.lease = pending.lease, None
        self.workers.take_back(lease)
        self.queue.rejoin(pending.ticket)
        self._pending_sessions[pending.ticket] = pending
        self._tell_all()
        self.dispatch()

    def leave(self, pending: PendingSession) -> None:
        """The client is gone or has finished, whether it had a slot or not. A second time does nothing."""
        if self.queue.leave(pending.ticket):
            del self._pending_sessions[pending.ticket]
            self._tell_all()
        lease, pending.lease = pending.lease, None
        if lease is not None:
            self.workers.take_back(lease)
            if lease.n_units:  # who never talked says nothing about how long conversations are
                self.eta.record(lease.request_type, self.elapsed(lease))
        self.dispatch()

    def cancel(self, ticket_id: str) -> bool:
        """Returns: whether there was such a ticket."""
        ticket = self.queue.find(ticket_id)
        if ticket is None:
            return False
        self.queue.leave(ticket)
        pending = self._pending_sessions.pop(ticket)
        pending.is_cancelled = True
        pending.changed.set()
        self._tell_all()
        return True

    def dispatch(self) -> None:
        """Give what is free to who is first; to be called whenever something may have become free."""
        before = len(self.queue)
        while (ticket := self.queue.head) is not None:
            lease = self.workers.lend(ticket.request_type, ticket.session_id)
            if lease is None:
                break
            self.queue.leave(ticket)
            pending = self._pending_sessions.pop(ticket)
            pending.lease = lease
            pending.changed.set()
        if len(self.queue) != before:
            self._tell_all()

    def _tell_all(self) -> None:
        self._told = None
        for pending in self._pending_sessions.values():
            pending.changed.set()

    # --- how it stands -------------------------------------------------------------------------

    def places(self) -> dict[Ticket, Place]:
        """Everybody who waits, in order."""
        waiting = list(self.queue)
        running = [self.remaining(lease) for lease in self.workers.leases]
        waits = self.eta.waits(running, self.workers.n_free, [ticket.request_type for ticket in waiting])
        return {
            ticket: Place(position, wait, len(waiting))
            for position, (ticket, wait) in enumerate(zip(waiting, waits, strict=True), start=1)
        }

    def place(self, pending: PendingSession) -> Place | None:
        """None: it does not wait."""
        # All who wait ask at once when something has changed, and one answer takes as long as all.
        if self._told is None or self._clock() - self._told[0] > FRESH_S:
            self._told = self._clock(), self.places()
        return self._told[1].get(pending.ticket)

    def elapsed(self, lease: WorkerLease) -> float:
        """s: since a session got its slot."""
        return self._clock() - lease.since

    def waited(self, ticket: Ticket) -> float:
        """s: since a ticket was given."""
        return self._clock() - ticket.since

    def remaining(self, lease: WorkerLease) -> float:
        """s: what is probably left of a session."""
        return self.eta.remaining(lease.request_type, self.elapsed(lease))
