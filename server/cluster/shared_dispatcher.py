"""The dispatcher of a gateway whose queue and leases are those of a cluster: an authority gives the slots.

Without the authority, the gateway's sessions go on and keep their slots, and new sessions wait. Contains no sockets:
`AuthorityLink` sends and receives.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count

from server.access.clients import SessionPermit
from server.cluster.messages import (
    Beat,
    Cancel,
    Cancelled,
    Claim,
    ClusterWorkers,
    Finish,
    FromAuthority,
    FromGateway,
    Granted,
    Hello,
    Locate,
    Located,
    Numbered,
    Place,
    Places,
    Reclaim,
    Requeue,
    Submit,
    Swap,
    TicketRefused,
    Welcome,
)
from server.cluster.records import Move, address_of, claim_of
from server.dispatch.dispatcher import Dispatcher, PendingSession, QueuePosition
from server.dispatch.eta import Eta
from server.dispatch.queue import ANY_WORKER, Needs, Queue, RequestType, Ticket
from server.dispatch.spare_slots import SpareSlot
from server.dispatch.workers import Worker, WorkerLease, Workers

MOVE_S = 5.0  # for the authority's answer about another slot, and for the session to take it
ANSWER_S = 2.0  # for the authority's answer to a new ticket, before its client gets `queued`


class SharedDispatcher(Dispatcher):
    """Tickets of this gateway, with slots from the authority.

    Args:
        workers: those of the cluster, which the authority names.
        queue: the tickets of this gateway that wait.
        eta: expected durations, for positions without a connection to the authority.
        clock: monotonic s.

    Attributes:
        tell: sends a message; None while there is no connection.
        on_workers: called after the list of workers has changed.
    """

    def __init__(self, workers: Workers, queue: Queue, eta: Eta, clock: Callable[[], float] = time.monotonic):
        super().__init__(workers, queue, eta, clock)
        self.tell: Callable[[FromGateway], None] | None = None
        self.on_workers: Callable[[], None] = _nothing
        self.term, self._ttl_s, self._valid_until = 0, 0.0, 0.0
        self._claims: dict[str, Claim] = {}
        self._sessions: dict[str, PendingSession] = {}
        self._spares: dict[str, SpareSlot] = {}
        self._places: dict[str, Place] = {}
        self._answers: dict[str, asyncio.Event] = {}
        self._moves: dict[str, Move] = {}  # by the ticket of the other slot
        self._move_numbers = count(1)
        self._located: dict[str, asyncio.Future[list[str]]] = {}  # answers that are awaited, by session
        self._beats: dict[int, float] = {}  # number -> monotonic s when it was sent

    # --- tickets -------------------------------------------------------------------------------

    def submit(
        self,
        request_type: RequestType,
        session_id: str,
        permit: SessionPermit | None = None,
        needs: Needs = ANY_WORKER,
    ) -> PendingSession:
        owner = "" if permit is None else permit.identity.owner
        ticket = self.queue.new_ticket(request_type, session_id, owner, needs)
        pending = PendingSession(ticket, permit=permit)
        self.queue.append(ticket)  # as many as the cluster's queue takes, also while the authority does not answer
        self._pending[ticket] = self._sessions[ticket.ticket_id] = pending
        self._answers[ticket.ticket_id] = asyncio.Event()
        self._claim(ticket, limit=None if permit is None else permit.limit)
        return pending

    def adopt(
        self,
        worker: Worker,
        request_type: RequestType,
        session_id: str,
        permit: SessionPermit | None = None,
        needs: Needs = ANY_WORKER,
    ) -> PendingSession:
        pending = super().adopt(worker, request_type, session_id, permit, needs)
        self._sessions[pending.ticket.ticket_id] = pending
        self._answers[pending.ticket.ticket_id] = asyncio.Event()
        if pending.lease is not None:
            pending.lease.is_used = True
        self._claim(pending.ticket, worker=str(worker.address))
        return pending

    def borrow(
        self, request_type: RequestType, session_id: str, owner: str, on_reclaim: Callable[[], None]
    ) -> SpareSlot:
        slot = SpareSlot(request_type, session_id, owner, on_reclaim)
        ticket = self.queue.new_ticket(request_type, session_id, owner)
        self._spares[ticket.ticket_id] = slot
        self._claim(ticket, is_spare=True)
        return slot

    def _claim(self, ticket: Ticket, *, is_spare: bool = False, limit: int | None = None, worker: str = "") -> None:
        claim = self._claims[ticket.ticket_id] = claim_of(ticket, is_spare=is_spare, limit=limit, worker=worker)
        self._tell(Submit(claim=claim))

    def give_back(self, slot: SpareSlot) -> None:
        ticket_id = next((name for name, one in self._spares.items() if one is slot), None)
        if ticket_id is None:
            return
        del self._spares[ticket_id]
        if slot.lease is not None:
            self.workers.release(slot.lease)
            slot.lease = None
        self._forget(ticket_id)
        self._tell(Finish(ticket=ticket_id))

    def requeue(self, pending: PendingSession, *, was_used: bool = False) -> None:
        lease = pending.lease
        is_unsure = lease is not None and (lease.worker.is_suspended or lease.worker.lost.is_set())
        ticket_id = pending.ticket.ticket_id
        self._places.pop(ticket_id, None)
        self._answers[ticket_id] = asyncio.Event()
        super().requeue(pending, was_used=was_used)
        self._claims[ticket_id] = self._claims[ticket_id].model_copy(update={"worker": ""})
        self._tell(Requeue(ticket=ticket_id, is_worker_unsure=is_unsure))

    # --- sessions that leave their workers -------------------------------------------------------

    def acquire_elsewhere(self, pending: PendingSession) -> WorkerLease | None:
        """As without a cluster; sends a request to the authority, and a later call returns its answer."""
        move = next((one for one in self._moves.values() if one.pending is pending), None)
        if move is not None:
            move.is_taken = move.lease is not None
            return move.lease
        if pending.lease is not None and self.tell is not None:
            ticket = pending.ticket
            claim = self._claims[ticket.ticket_id].model_copy(
                update={"ticket": f"{ticket.ticket_id}_{next(self._move_numbers)}", "worker": "", "number": 0}
                | {"limit": None, "moves": ticket.ticket_id}
            )
            self._claims[claim.ticket], self._moves[claim.ticket] = claim, Move(pending, self._clock())
            self._tell(Submit(claim=claim))
        return None

    def replace(self, pending: PendingSession, lease: WorkerLease) -> None:
        ticket_id, by = pending.ticket.ticket_id, self._move_of(lease)
        super().replace(pending, lease)
        if by is None:  # the next `hello` reports it to the authority
            return
        lease.is_used = True
        del self._moves[by]
        moved = self._claims.pop(by)
        self._claims[ticket_id] = self._claims[ticket_id].model_copy(update={"worker": moved.worker})
        self._tell(Swap(ticket=ticket_id, by=by))

    def give_up(self, lease: WorkerLease) -> None:
        super().give_up(lease)
        if (by := self._move_of(lease)) is not None:
            self._end_move(by)

    def _move_of(self, lease: WorkerLease) -> str | None:
        return next((name for name, one in self._moves.items() if one.lease is lease), None)

    def _end_move(self, ticket_id: str) -> None:
        del self._moves[ticket_id]
        self._forget(ticket_id)
        self._tell(Finish(ticket=ticket_id))

    def _end_unused_moves(self, pending: PendingSession | None = None) -> None:
        """Give up slots that sessions did not take in time. pending: those of this session."""
        for name, one in list(self._moves.items()):
            is_old = self._clock() - one.since > MOVE_S
            if not one.is_taken and (one.pending is pending or (pending is None and is_old)):
                if one.lease is not None:
                    self.workers.release(one.lease)
                self._end_move(name)

    def finish(self, pending: PendingSession) -> None:
        held_s, lease = self.held(pending), pending.lease
        n_units = pending.earlier_units + (0 if lease is None else lease.n_units)
        super().finish(pending)
        self._end_unused_moves(pending)
        if self._sessions.pop(pending.ticket.ticket_id, None) is not None:
            self._forget(pending.ticket.ticket_id)
            self._tell(Finish(ticket=pending.ticket.ticket_id, n_units=n_units, held_s=held_s))

    def cancel(self, ticket_id: str) -> bool:
        if not super().cancel(ticket_id):
            return False
        self._tell(Finish(ticket=ticket_id))
        self._end(ticket_id)
        return True

    def cancel_elsewhere(self, ticket_id: str, owner: str | None) -> bool:
        """Cancel a ticket that waits at another gateway, if it is there and belongs to the owner.

        owner: None: an administrator cancels it. Returns: whether the request was sent to the authority.
        """
        self._tell(Cancel(ticket=ticket_id, owner=owner))
        return self.tell is not None

    def dispatch(self) -> None:
        """Do nothing: the authority assigns the slots."""

    def _forget(self, ticket_id: str) -> None:
        for known in (self._claims, self._places, self._answers):
            known.pop(ticket_id, None)

    def _end(self, ticket_id: str) -> None:
        """Remove a ticket that is refused or cancelled; its session's `finish` follows."""
        del self._sessions[ticket_id]
        if (answer := self._answers.get(ticket_id)) is not None:
            answer.set()
        self._forget(ticket_id)

    async def locate(self, session_id: str) -> list[str]:
        """Addresses of other gateways that have a session with this id; none without a connection to the authority."""
        if self.tell is None:
            return []
        found = self._located.setdefault(session_id, asyncio.get_running_loop().create_future())
        self._tell(Locate(session=session_id))
        try:
            async with asyncio.timeout(ANSWER_S):
                return await asyncio.shield(found)
        except TimeoutError:
            return []
        finally:
            self._located.pop(session_id, None)

    # --- queries of sessions ---------------------------------------------------------------------

    async def answered(self, pending: PendingSession) -> None:
        answer = self._answers.get(pending.ticket.ticket_id)
        if answer is not None and pending.lease is None:
            with suppress(TimeoutError):
                async with asyncio.timeout(ANSWER_S):
                    await answer.wait()

    def may_use(self, lease: WorkerLease) -> bool:
        """Whether the authority still counts the lease: it ends if the gateway cannot renew it for too long."""
        lease.is_used = lease.is_used or self._clock() < self._valid_until
        return lease.is_used

    def position_of(self, pending: PendingSession) -> QueuePosition | None:
        place = self._places.get(pending.ticket.ticket_id)
        if pending.lease is None and place is not None:
            return QueuePosition(place.position, place.wait_s, place.queue_length)
        return super().position_of(pending)

    def positions(self) -> dict[Ticket, QueuePosition]:
        """Positions of this gateway's tickets in the cluster's queue; in its own without a connection."""
        found = super().positions()
        for ticket in found:
            if (place := self._places.get(ticket.ticket_id)) is not None:
                found[ticket] = QueuePosition(place.position, place.wait_s, place.queue_length)
        return found

    # --- the connection ------------------------------------------------------------------------

    def hello(self, name: str, address: str) -> Hello:
        """The first message of a connection. name, address: of this gateway."""
        self._beats.clear()
        for ticket_id, move in list(self._moves.items()):
            if move.lease is None:  # it may have been lost; the session requests it again
                self._end_move(ticket_id)
        if self._clock() >= self._valid_until:
            # Leases that are not used yet have expired: `may_use` is false for their sessions, which wait again.
            for ticket_id, pending in self._sessions.items():
                if pending.lease is not None and not pending.lease.is_used:
                    self._claims[ticket_id] = self._claims[ticket_id].model_copy(update={"worker": ""})
        return Hello(gateway=name, address=address, claims=list(self._claims.values()))

    def next_beat(self, number: int) -> Beat:
        """A message that renews the leases."""
        self._beats[number] = self._clock()
        return Beat(number=number)

    def disconnected(self) -> None:
        """Record that the connection is lost."""
        self.tell = None

    def receive(self, message: FromAuthority) -> None:
        """Handle a message of the authority, except `usage_of_others`."""
        match message:
            case Welcome():
                self.term, self._ttl_s = message.term, message.ttl_s
            case Beat():
                self._end_unused_moves()
                if (sent_at := self._beats.pop(message.number, None)) is not None:
                    self._valid_until = max(self._valid_until, sent_at + self._ttl_s)
            case ClusterWorkers():
                self._take_workers(message)
            case Numbered():
                if (claim := self._claims.get(message.ticket)) is not None:
                    self._claims[message.ticket] = claim.model_copy(update={"number": message.number})
            case Granted():
                self._take_slot(message)
            case Located():
                if (found := self._located.get(message.session)) is not None and not found.done():
                    found.set_result(message.addresses)
            case Places():
                self._take_places(message)
            case TicketRefused() | Cancelled():
                self._take_end(message)
            case Reclaim():
                if (slot := self._spares.get(message.ticket)) is not None and not slot.is_reclaimed:
                    slot.is_reclaimed = True
                    slot.on_reclaim()

    def _take_workers(self, message: ClusterWorkers) -> None:
        listed = {address_of(one.address): one for one in message.workers}
        for worker in [one for one in self.workers.all if one.address not in listed]:
            self.workers.remove(worker)
        for address, entry in listed.items():
            worker = self.workers.find(address) or self.workers.add(entry.index, address)
            worker.is_draining = entry.is_draining
        self.on_workers()

    def _take_slot(self, message: Granted) -> None:
        ticket_id, worker = message.ticket, self.workers.find(address_of(message.worker))
        claim, pending, spare = self._claims.get(ticket_id), self._sessions.get(ticket_id), self._spares.get(ticket_id)
        move = self._moves.get(ticket_id)
        if claim is None or worker is None or (pending is None and spare is None and move is None):
            self._tell(Finish(ticket=ticket_id))
            return
        changes = {"number": message.number, "worker": message.worker}
        self._claims[ticket_id] = claim.model_copy(update=changes)
        if move is not None:
            move.since = self._clock()
            move.lease = self.workers.lease(worker, claim.request_type, claim.session, claim.owner, claim.needs)
        elif spare is not None:
            spare.lease = self.workers.lease(worker, claim.request_type, spare.session_id, claim.owner, is_spare=True)
            spare.granted.set()
        elif pending is not None and pending.lease is None:
            self._remove(pending.ticket)
            self._places.pop(ticket_id, None)
            pending.lease = self.workers.lease(worker, claim.request_type, claim.session, claim.owner, claim.needs)
            self._answers[ticket_id].set()
            pending.changed.set()

    def _take_places(self, message: Places) -> None:
        for place in message.places:
            pending = self._sessions.get(place.ticket)
            if pending is None or pending.lease is not None:
                continue
            is_new = self._places.get(place.ticket) != place
            self._places[place.ticket] = place
            self._answers[place.ticket].set()
            if is_new:
                pending.changed.set()

    def _take_end(self, message: TicketRefused | Cancelled) -> None:
        if message.ticket in self._moves:
            self._end_move(message.ticket)
            return
        pending = self._sessions.get(message.ticket)
        if pending is None or pending.lease is not None:
            return
        if isinstance(message, TicketRefused) and message.why != "busy":
            pending.refusal = message.why
        else:
            pending.is_cancelled = True
        self._remove(pending.ticket)
        pending.changed.set()
        self._end(message.ticket)

    def _remove(self, ticket: Ticket) -> None:
        """Remove a ticket that does not wait any longer."""
        self.queue.remove(ticket)
        self._pending.pop(ticket, None)
        self._positions = None

    def _tell(self, message: FromGateway) -> None:
        if self.tell is not None:
            self.tell(message)


def _nothing() -> None:
    pass
