"""Assigns workers' slots to the tickets of all gateways of a cluster, in the order of their arrival.

Contains no I/O; the clock is passed in. A lease belongs to a gateway and ends with it: a gateway that renews nothing
for `ttl_s` seconds loses its leases and tickets. A gateway that connects again claims its leases and tickets, so a new
authority gets all of them from the gateways; `term` orders new tickets after those of earlier authorities.
"""

import time
from collections.abc import Callable, Collection
from itertools import count

from server.cluster.messages import (
    Beat,
    Cancel,
    Cancelled,
    Claim,
    ClusterWorkers,
    Finish,
    FromAuthority,
    Granted,
    Hello,
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
    WorkerEntry,
)
from server.cluster.records import Entry, GatewayRecord, Tell, address_of
from server.dispatch.dispatcher import positions_in, take_slots
from server.dispatch.eta import Eta
from server.dispatch.queue import Queue, QueueFullError, Ticket
from server.dispatch.spare_slots import SpareSlot, SpareSlots
from server.dispatch.workers import Worker, WorkerAddress, WorkerLease, Workers

TTL_S = 15.0
RECOVERY_S = 5.0  # after a start: for gateways of the earlier authority to claim their leases
TERM_BITS = 32  # numbers of one term


class Authority:
    """All gateways, their tickets and leases.

    Args:
        workers: with their health, which `poll` reads.
        queue: waiting tickets of connected gateways.
        eta: expected durations.
        term: higher than that of every authority before.
        known: names of gateways that may still serve sessions of an earlier term.
        max_spare: slots of one worker that are lent at the same time while no session waits.
        ttl_s, recovery_s: see `TTL_S` and `RECOVERY_S`.
        clock: monotonic s.

    Attributes:
        n_granted: leases so far.
    """

    def __init__(
        self,
        workers: Workers,
        queue: Queue,
        eta: Eta,
        *,
        term: int = 1,
        known: Collection[str] = (),
        max_spare: int = 0,
        ttl_s: float = TTL_S,
        recovery_s: float = RECOVERY_S,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.workers, self.queue, self.eta, self.term, self.ttl_s = workers, queue, eta, term, ttl_s
        self.gateways: dict[str, GatewayRecord] = {}
        self.n_granted = 0
        self._spare = SpareSlots(workers, queue, max_spare)
        self._clock = clock
        self._numbers = count((term << TERM_BITS) + 1)
        self._awaited, self._recovered_at = set(known), clock() + recovery_s
        self._entries: dict[str, Entry] = {}
        self._are_places_old = False

    @property
    def is_recovering(self) -> bool:
        """Whether gateways of an earlier term may still claim leases, so that no slot is assigned."""
        return bool(self._awaited) and self._clock() < self._recovered_at

    # --- gateways ------------------------------------------------------------------------------

    def connect(self, hello: Hello, tell: Tell) -> GatewayRecord:
        """Register the connection of a gateway, in place of an earlier one.

        Args:
            hello: its name and what it claims.
            tell: sends it a message.
        """
        gateway = self.gateways.setdefault(hello.gateway, GatewayRecord(hello.gateway, hello.address, 0.0))
        gateway.address, gateway.tell = hello.address, tell
        gateway.expires_at = self._clock() + self.ttl_s
        tell(Welcome(term=self.term, ttl_s=self.ttl_s))
        tell(self.worker_list())
        claims = {claim.ticket: claim for claim in hello.claims}
        for entry in [one for ticket_id, one in gateway.entries.items() if ticket_id not in claims]:
            self._drop(entry, is_slot_unsure=True)
        for claim in claims.values():
            self._claim(gateway, claim)
        self._awaited.discard(hello.gateway)
        self._are_places_old = True
        self.poll()
        return gateway

    def _claim(self, gateway: GatewayRecord, claim: Claim) -> None:
        """Update a ticket to the claim of its gateway."""
        entry = self._entries.get(claim.ticket)
        if entry is not None and entry.gateway is not gateway:
            return
        worker = self.workers.find(address_of(claim.worker)) if claim.worker else None
        if entry is None and not claim.number and worker is None:  # its `submit` was lost
            self.submit(gateway, Submit(claim=claim))
            return
        if entry is None:
            entry = self._add(gateway, claim)
        elif entry.held is not None and entry.held.worker is worker:
            if entry.spare is not None and entry.spare.is_reclaimed:  # the message may have been lost
                entry.spare.on_reclaim()
            return
        self._release(entry)
        if worker is None:
            if entry.spare is not None:
                self._spare.add(entry.spare)
            elif entry.ticket not in self.queue:
                self.queue.reinsert(entry.ticket)
            return
        self.queue.remove(entry.ticket)
        self.workers.count_inside(worker, claim.request_type)
        lease = self.workers.lease(
            worker, claim.request_type, claim.session, claim.owner, claim.needs, is_spare=claim.is_spare
        )
        if entry.spare is None:
            entry.lease = lease
        else:
            self._spare.adopt(entry.spare, lease)

    def disconnect(self, gateway: GatewayRecord, tell: Tell) -> None:
        """Record that a connection is lost. Its tickets keep their place, and its leases go on until they expire."""
        if gateway.tell is tell:
            gateway.tell = None
            for entry in gateway.entries.values():
                self.queue.remove(entry.ticket)
                if entry.spare is not None and entry.spare.lease is None:
                    self._spare.remove(entry.spare)
            self._are_places_old = True
            self.poll()

    def beat(self, gateway: GatewayRecord, beat: Beat) -> None:
        """Renew the leases of a gateway."""
        gateway.expires_at = self._clock() + self.ttl_s
        _tell(gateway, beat)

    def locate(self, gateway: GatewayRecord, session_id: str) -> None:
        """Send a gateway the addresses of the others that have a session."""
        addresses = [
            one.address
            for one in self.gateways.values()
            if one is not gateway and one.address and any(e.claim.session == session_id for e in one.entries.values())
        ]
        _tell(gateway, Located(session=session_id, addresses=addresses))

    # --- tickets -------------------------------------------------------------------------------

    def submit(self, gateway: GatewayRecord, message: Submit) -> None:
        """Take a new ticket, or refuse it."""
        claim = message.claim
        if claim.ticket in self._entries:
            return
        if claim.moves:
            self._submit_move(gateway, claim)
            return
        if claim.worker:  # of a session that was taken over from a lost gateway
            if found := [one for one in self._entries.values() if one.has_slot_of(claim)]:
                self._drop(min(found, key=lambda one: one.gateway.tell is not None))  # ids may be equal
            self._claim(gateway, claim)
            return
        if claim.limit is not None and not claim.is_spare:
            n_sessions = sum(one.is_session and one.claim.owner == claim.owner for one in self._entries.values())
            if n_sessions >= claim.limit:
                _tell(gateway, TicketRefused(ticket=claim.ticket, why="sessions"))
                return
        entry = self._add(gateway, claim)
        if entry.spare is not None:
            self._spare.add(entry.spare)
            self.poll()
            return
        if not self.is_recovering:
            self._assign()
            lease = self.workers.acquire(claim.request_type, claim.session, claim.owner, claim.needs)
            if lease is not None:
                self._grant(entry, lease)
                return
        try:
            self.queue.append(entry.ticket)
        except QueueFullError:
            self._forget(entry)
            _tell(gateway, TicketRefused(ticket=claim.ticket, why="queue_full"))
            return
        _tell(gateway, Numbered(ticket=claim.ticket, number=entry.ticket.number))
        self._are_places_old = True
        self._update_spare()

    def _submit_move(self, gateway: GatewayRecord, claim: Claim) -> None:
        """Give a session that leaves its worker a slot of another one, in front of the queue, if there is one now."""
        origin = gateway.entries.get(claim.moves)
        lease = None
        if origin is not None and origin.lease is not None and not self.is_recovering:
            lease = self.workers.acquire_elsewhere(origin.lease)
        if lease is None:
            _tell(gateway, TicketRefused(ticket=claim.ticket, why="busy"))
        else:
            self._grant(self._add(gateway, claim), lease)

    def swap(self, gateway: GatewayRecord, message: Swap) -> None:
        """Give a ticket the slot of another one, which ends."""
        entry, by = gateway.entries.get(message.ticket), gateway.entries.get(message.by)
        if entry is None or by is None or by.lease is None:
            return
        self._release(entry)
        entry.lease, by.lease = by.lease, None
        self._forget(by)
        self.poll()

    def requeue(self, gateway: GatewayRecord, message: Requeue) -> None:
        """Take back a slot; the ticket returns to its place."""
        entry = gateway.entries.get(message.ticket)
        if entry is None or entry.lease is None:
            return
        if message.is_worker_unsure:
            self.workers.suspend(entry.lease.worker)
        self._release(entry)
        self.queue.reinsert(entry.ticket)
        self._are_places_old = True
        self.poll()

    def finish(self, gateway: GatewayRecord, message: Finish) -> None:
        """Remove a ticket, whether it waits or has a slot."""
        entry = gateway.entries.get(message.ticket)
        if entry is None:
            return
        if message.n_units and entry.spare is None:
            self.eta.record(entry.claim.request_type, message.held_s)
        self._drop(entry)
        self.poll()

    def cancel(self, message: Cancel) -> None:
        """Remove a waiting ticket of any gateway, if it belongs to the owner."""
        entry = self._entries.get(message.ticket)
        if entry is None or entry.ticket not in self.queue:
            return
        if message.owner is None or message.owner == entry.claim.owner:
            _tell(entry.gateway, Cancelled(ticket=message.ticket))
            self._drop(entry)

    # --- slots ---------------------------------------------------------------------------------

    def poll(self) -> None:
        """Give free slots to the first tickets. Call this whenever a slot may have become free, and once a second."""
        self._expire()
        if self.is_recovering:
            return
        self._assign()
        self._update_spare()

    def _assign(self) -> None:
        for ticket, lease in take_slots(self.queue, self.workers):
            self._grant(self._entries[ticket.ticket_id], lease)
            self._are_places_old = True

    def _grant(self, entry: Entry, lease: WorkerLease) -> None:
        entry.lease = lease
        self._tell_granted(entry, lease)

    def _tell_granted(self, entry: Entry, lease: WorkerLease) -> None:
        self.n_granted += 1
        granted = Granted(ticket=entry.claim.ticket, number=entry.ticket.number, worker=str(lease.worker.address))
        _tell(entry.gateway, granted)

    def _update_spare(self) -> None:
        for slot in self._spare.update():
            assert slot.lease is not None, "expected a lease of a slot that is lent"
            self._tell_granted(self._entries[slot.session_id], slot.lease)

    def _expire(self) -> None:
        now = self._clock()
        for gateway in [one for one in self.gateways.values() if now >= one.expires_at]:
            del self.gateways[gateway.name]
            gateway.tell = None
            for entry in list(gateway.entries.values()):
                self._drop(entry, is_slot_unsure=True)

    # --- workers -------------------------------------------------------------------------------

    def add_worker(self, address: WorkerAddress) -> Worker:
        """Register a worker; one that is registered and drains accepts sessions again."""
        worker = self.workers.find(address)
        if worker is None:
            worker = self.workers.add(1 + max((one.index for one in self.workers.all), default=-1), address)
        worker.is_draining = False
        self.tell_workers()
        return worker

    def drain_worker(self, worker: Worker) -> None:
        """Lease no more slots of a worker."""
        worker.is_draining = True
        self.tell_workers()

    def remove_worker(self, worker: Worker) -> None:
        """Remove a worker. Its sessions move to others."""
        self.workers.remove(worker)
        self.tell_workers()

    def worker_list(self) -> ClusterWorkers:
        """All workers, for gateways."""
        return ClusterWorkers(
            workers=[
                WorkerEntry(index=one.index, address=str(one.address), is_draining=one.is_draining)
                for one in self.workers.all
            ]
        )

    def tell_workers(self) -> None:
        """Send the list of workers to all gateways."""
        listed = self.worker_list()
        for gateway in self.gateways.values():
            _tell(gateway, listed)

    # --- places --------------------------------------------------------------------------------

    def tell_places(self, *, is_due: bool = False) -> None:
        """Send waiting tickets' places to their gateways if they may have changed. is_due: send them in any case."""
        if not self._are_places_old and not (is_due and len(self.queue)):
            return
        self._are_places_old = False
        places: dict[GatewayRecord, list[Place]] = {}
        for ticket, found in positions_in(self.queue, self.workers, self.eta, self._remaining).items():
            place = Place(
                ticket=ticket.ticket_id,
                position=found.position,
                wait_s=found.wait_s,
                queue_length=found.queue_length,
            )
            places.setdefault(self._entries[ticket.ticket_id].gateway, []).append(place)
        for gateway, own in places.items():
            _tell(gateway, Places(places=own))

    def _remaining(self, lease: WorkerLease) -> float:
        return 0.0 if lease.is_spare else self.eta.remaining(lease.request_type, self._clock() - lease.since)

    # --- entries -------------------------------------------------------------------------------

    def _add(self, gateway: GatewayRecord, claim: Claim) -> Entry:
        now = self._clock()
        number = claim.number or next(self._numbers)
        ticket = Ticket(
            number, claim.request_type, claim.session, claim.owner, now, time.time(), claim.ticket, claim.needs
        )
        entry = Entry(claim, ticket, gateway)
        if claim.is_spare:

            def on_reclaim() -> None:
                _tell(gateway, Reclaim(ticket=claim.ticket))

            entry.spare = SpareSlot(claim.request_type, claim.ticket, claim.owner, on_reclaim)
        gateway.entries[claim.ticket] = self._entries[claim.ticket] = entry
        return entry

    def _drop(self, entry: Entry, *, is_slot_unsure: bool = False) -> None:
        if is_slot_unsure and entry.held is not None:  # it may still be in use: the worker's next answer shows it
            self.workers.suspend(entry.held.worker)
        if self.queue.remove(entry.ticket):
            self._are_places_old = True
        self._release(entry)
        self._forget(entry)

    def _forget(self, entry: Entry) -> None:
        del self._entries[entry.claim.ticket], entry.gateway.entries[entry.claim.ticket]

    def _release(self, entry: Entry) -> None:
        """Return the slot of a ticket, if it has one."""
        if entry.spare is not None:
            self._spare.remove(entry.spare)
        elif entry.lease is not None:
            self.workers.release(entry.lease)
            entry.lease = None


def _tell(gateway: GatewayRecord, message: FromAuthority) -> None:
    if gateway.tell is not None:
        gateway.tell(message)
