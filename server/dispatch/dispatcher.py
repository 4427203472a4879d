"""Assigns free slots to tickets in the order of the queue.

Contains no I/O: sockets and health polls call it, and each waiting client awaits its `PendingSession`.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal, Protocol

from server.access.clients import SessionPermit
from server.dispatch.eta import Eta
from server.dispatch.queue import ANY_WORKER, Model, Needs, Queue, RequestType, Ticket, model_of
from server.dispatch.spare_slots import SpareSlot, SpareSlots
from server.dispatch.workers import Worker, WorkerLease, Workers

Refusal = Literal["queue_full", "sessions"]
MAX_POSITIONS_AGE_S = 0.2  # age up to which computed positions and estimates are reused


class SessionObserver(Protocol):
    """Records a session for an observer."""

    def got_slot(self, worker: str) -> None:
        """Record that a worker has accepted the session. worker: its name."""

    def end(self, n_units: int) -> None:
        """Record the end. n_units: results of the session."""


@dataclass(eq=False)
class PendingSession:
    """One client, from its ticket to its end.

    lease: None while it waits. permit: counts the session for its client. changed: set when its lease, position or
    cancellation may have changed. refusal: why the cluster's authority refuses it; None: it does not. trace: records
    the session; None: nothing does. earlier_s, earlier_units: time and results with workers that it has left.
    has_begun: it has left a worker, so it is no new session while it waits.
    """

    ticket: Ticket
    lease: WorkerLease | None = None
    is_cancelled: bool = False
    refusal: Refusal | None = None
    permit: SessionPermit | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    trace: SessionObserver | None = None
    earlier_s: float = 0.0
    earlier_units: int = 0
    has_begun: bool = False


@dataclass(frozen=True)
class QueuePosition:
    """Position of a ticket in the queue. position: 1 is next. wait_s: expected waiting time, s."""

    position: int
    wait_s: float
    queue_length: int


class Dispatcher:
    """Connects the queue, the workers' slots and the estimates."""

    def __init__(
        self,
        workers: Workers,
        queue: Queue,
        eta: Eta,
        clock: Callable[[], float] = time.monotonic,
        *,
        max_spare: int = 0,
    ):
        """clock: monotonic s. max_spare: slots of one worker that are lent at the same time while no session waits."""
        self.workers, self.queue, self.eta = workers, queue, eta
        self._spare = SpareSlots(workers, queue, max_spare)
        self._clock = clock
        self._pending: dict[Ticket, PendingSession] = {}
        self._positions: tuple[float, dict[Ticket, QueuePosition]] | None = None  # when computed, and all of them

    def submit(
        self,
        request_type: RequestType,
        session_id: str,
        permit: SessionPermit | None = None,
        needs: Needs = ANY_WORKER,
    ) -> PendingSession:
        """Request a slot, which is assigned at once if one is free that no earlier ticket can use.

        Args:
            request_type: kind of session.
            session_id: its id.
            permit: the right to the session, which `finish` releases; None: it counts for no client.
            needs: of the session's worker.
        Raises:
            QueueFullError.
        """
        self.dispatch()
        owner = "" if permit is None else permit.identity.owner
        pending = PendingSession(self.queue.new_ticket(request_type, session_id, owner, needs), permit=permit)
        pending.lease = self.workers.acquire(request_type, session_id, owner, needs)
        if pending.lease is None:
            self.queue.append(pending.ticket)
            self._pending[pending.ticket] = pending
            self._positions = None
            self._spare.update()
        return pending

    def adopt(
        self,
        worker: Worker,
        request_type: RequestType,
        session_id: str,
        permit: SessionPermit | None = None,
        needs: Needs = ANY_WORKER,
    ) -> PendingSession:
        """A ticket with a slot that a worker has kept for its session. `finish` must follow.

        Args:
            worker: the worker.
            request_type, session_id, permit, needs: as in `submit`; the needs are those of a later move.
        """
        owner = "" if permit is None else permit.identity.owner
        pending = PendingSession(self.queue.new_ticket(request_type, session_id, owner, needs), permit=permit)
        self.workers.count_inside(worker, request_type)
        pending.lease = self.workers.lease(worker, request_type, session_id, owner, needs)
        return pending

    def borrow(
        self, request_type: RequestType, session_id: str, owner: str, on_reclaim: Callable[[], None]
    ) -> SpareSlot:
        """Request a slot while no session needs it. `give_back` must follow.

        Args:
            request_type: kind of work.
            session_id: its id.
            owner: whose work it is.
            on_reclaim: called if a session needs the slot; `give_back` must follow soon.
        """
        slot = SpareSlot(request_type, session_id, owner, on_reclaim)
        self._spare.add(slot)
        self.dispatch()
        return slot

    def give_back(self, slot: SpareSlot) -> None:
        """End a request of `borrow`, whether it waits or has a slot. A second call does nothing."""
        self._spare.remove(slot)
        self.dispatch()

    def requeue(self, pending: PendingSession, *, was_used: bool = False) -> None:
        """Give up a slot and return to the former position in the queue.

        was_used: the session's time and results with the slot count; otherwise the slot could not be used.
        """
        lease = self._take_lease(pending)
        if was_used and lease is not None:
            pending.has_begun = True
            pending.earlier_s += self.elapsed(lease)
            pending.earlier_units += lease.n_units
        self.queue.reinsert(pending.ticket)
        self._pending[pending.ticket] = pending
        self._notify_all()
        self.dispatch()

    def acquire_elsewhere(self, pending: PendingSession) -> WorkerLease | None:
        """A slot of another worker for a session that has one, in front of the queue; None if there is none.

        `replace` or `give_up` must follow.
        """
        lease = pending.lease
        return None if lease is None else self.workers.acquire_elsewhere(lease)

    def replace(self, pending: PendingSession, lease: WorkerLease) -> None:
        """Give up a session's slot: it goes on in another one."""
        before = self._take_lease(pending)
        if before is not None:
            pending.earlier_s += self.elapsed(before)
            pending.earlier_units += before.n_units
        lease.since = self._clock()
        pending.lease = lease
        if pending.trace is not None:
            pending.trace.got_slot(lease.worker.name)
        self.dispatch()

    def give_up(self, lease: WorkerLease) -> None:
        """Return a slot that no session has got."""
        self.workers.release(lease)
        self.dispatch()

    def finish(self, pending: PendingSession) -> None:
        """Remove a client, whether it waits or has a slot. A second call does nothing."""
        if self.queue.remove(pending.ticket):
            del self._pending[pending.ticket]
            self._notify_all()
        held_s = self.held(pending)
        lease = self._take_lease(pending)
        n_units = pending.earlier_units + (0 if lease is None else lease.n_units)
        if pending.permit is not None:
            pending.permit.release(held_s)
        if pending.trace is not None:
            pending.trace.end(n_units)
        # A session without a unit is no sample of how long conversations take.
        if lease is not None and n_units:
            self.eta.record(lease.request_type, held_s)
        self.dispatch()

    def cancel(self, ticket_id: str) -> bool:
        """Remove a waiting ticket. Returns: whether it was in the queue."""
        ticket = self.queue.find(ticket_id)
        if ticket is None:
            return False
        self.queue.remove(ticket)
        pending = self._pending.pop(ticket)
        pending.is_cancelled = True
        pending.changed.set()
        self._notify_all()
        return True

    def dispatch(self) -> None:
        """Assign free slots to the first tickets. Call this whenever a slot may have become free."""
        before = len(self.queue)
        for ticket, lease in take_slots(self.queue, self.workers):
            pending = self._pending.pop(ticket)
            pending.lease = lease
            pending.changed.set()
        if len(self.queue) != before:
            self._notify_all()
        self._spare.update()

    def _take_lease(self, pending: PendingSession) -> WorkerLease | None:
        lease, pending.lease = pending.lease, None
        if lease is not None:
            self.workers.release(lease)
        return lease

    def _notify_all(self) -> None:
        self._positions = None
        for pending in self._pending.values():
            pending.changed.set()

    # --- a shared queue ------------------------------------------------------------------------

    async def answered(self, pending: PendingSession) -> None:
        """Wait until it is known whether a new ticket has a slot, a position or a refusal: here at once."""

    def cancel_elsewhere(self, ticket_id: str, owner: str | None) -> bool:
        """Cancel a ticket that waits at another gateway: here there is none, so False."""
        return False

    def may_use(self, lease: WorkerLease) -> bool:
        """Whether a connection to the worker may begin with a lease: here always."""
        return True

    # --- positions and times -------------------------------------------------------------------

    def positions(self) -> dict[Ticket, QueuePosition]:
        """Positions of all waiting tickets among those for the same model, in the order of the queue."""
        return positions_in(self.queue, self.workers, self.eta, self.remaining)

    def position_of(self, pending: PendingSession) -> QueuePosition | None:
        """The client's position in the queue; None if it does not wait."""
        # After a change all waiting clients call this at once, and one position costs as much as all of them.
        if self._positions is None or self._clock() - self._positions[0] > MAX_POSITIONS_AGE_S:
            self._positions = self._clock(), self.positions()
        return self._positions[1].get(pending.ticket)

    def elapsed(self, lease: WorkerLease) -> float:
        """Seconds since a session got its slot."""
        return self._clock() - lease.since

    def held(self, pending: PendingSession) -> float:
        """Seconds for which a session has had slots."""
        return pending.earlier_s + (0.0 if pending.lease is None else self.elapsed(pending.lease))

    def waited(self, ticket: Ticket) -> float:
        """Seconds since a ticket was created."""
        return self._clock() - ticket.created_at

    def remaining(self, lease: WorkerLease) -> float:
        """Expected remaining seconds of a session; 0 for a slot that is given back on demand."""
        return 0.0 if lease.is_spare else self.eta.remaining(lease.request_type, self.elapsed(lease))


def take_slots(queue: Queue, workers: Workers) -> Iterator[tuple[Ticket, WorkerLease]]:
    """Tickets that leave the queue for free slots, in the order of their arrival.

    A ticket that no free slot fits is passed over by those of other models and labels.
    """
    full: set[tuple[Model, frozenset[str]]] = set()
    for ticket in queue:
        line = model_of(ticket.request_type), ticket.needs.labels
        if line in full or (line[0], ANY_WORKER.labels) in full:
            continue
        lease = workers.acquire(ticket.request_type, ticket.session_id, ticket.owner, ticket.needs)
        if lease is None:
            full.add(line)
            continue
        queue.remove(ticket)
        yield ticket, lease


def positions_in(
    queue: Queue, workers: Workers, eta: Eta, remaining: Callable[[WorkerLease], float]
) -> dict[Ticket, QueuePosition]:
    """Positions of all waiting tickets among those for the same model and labels, in the order of the queue.

    remaining: expected remaining seconds of a lease.
    """
    found: dict[Ticket, QueuePosition] = {}
    for (model, labels), waiting in queue.lines().items():
        running: list[float] = []
        able = [worker for worker in workers.all if labels <= worker.labels]
        for worker in able:
            # The sessions above a worker's capacity leave no free slot when they end.
            n_excess = worker.n_excess if model == "omni" else 0
            running += sorted(remaining(lease) for lease in worker.leases_of(model))[n_excess:]
        n_free = sum(worker.n_free_of(model) for worker in able)
        waits = eta.waits(running, n_free, [ticket.request_type for ticket in waiting])
        for position, (ticket, wait) in enumerate(zip(waiting, waits, strict=True), start=1):
            found[ticket] = QueuePosition(position, wait, len(waiting))
    return {ticket: found[ticket] for ticket in queue}
