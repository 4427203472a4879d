"""What an authority keeps of each gateway and of each ticket, and a gateway of its sessions that move."""

from collections.abc import Callable
from dataclasses import dataclass, field

from server.cluster.messages import Claim, FromAuthority
from server.dispatch.dispatcher import PendingSession
from server.dispatch.queue import Ticket
from server.dispatch.spare_slots import SpareSlot
from server.dispatch.workers import WorkerAddress, WorkerLease

Tell = Callable[[FromAuthority], None]


@dataclass(eq=False)
class Entry:
    """One ticket of a gateway. claim: as it was submitted. lease: None while it waits. spare: of a spare slot."""

    claim: Claim
    ticket: Ticket
    gateway: "GatewayRecord"
    lease: WorkerLease | None = None
    spare: SpareSlot | None = None

    @property
    def is_session(self) -> bool:
        """Whether it counts as a session of its owner."""
        return self.spare is None and not self.claim.moves

    @property
    def held(self) -> WorkerLease | None:
        """Its slot, also a spare one."""
        return self.lease if self.spare is None else self.spare.lease

    def has_slot_of(self, claim: Claim) -> bool:
        """Whether it is the ticket of the same session, with the slot of the same worker."""
        is_same = self.claim.session == claim.session
        return is_same and self.lease is not None and str(self.lease.worker.address) == claim.worker


@dataclass(eq=False)
class GatewayRecord:
    """One gateway.

    address: at which other gateways reach it. tell: sends it a message; None while it is not connected. expires_at:
    monotonic s at which its leases and tickets end. entries: by ticket id, in their order of arrival here.
    """

    name: str
    address: str
    expires_at: float
    tell: Tell | None = None
    entries: dict[str, Entry] = field(default_factory=dict)


@dataclass(eq=False)
class Move:
    """A session that leaves its worker. since: monotonic s of the request, then of the answer.

    lease: the other slot; None: there is no answer yet. is_taken: `replace` or `give_up` follows.
    """

    pending: PendingSession
    since: float
    lease: WorkerLease | None = None
    is_taken: bool = False


def address_of(text: str) -> WorkerAddress:
    """An address from its text, HOST:PORT."""
    host, _, port = text.rpartition(":")
    return WorkerAddress(host, int(port) if port.isdecimal() else 0)


def claim_of(ticket: Ticket, *, is_spare: bool, limit: int | None, worker: str) -> Claim:
    """The claim of a new ticket. worker: address of the worker whose slot it has; "": it waits."""
    return Claim(
        ticket=ticket.ticket_id,
        number=0,
        request_type=ticket.request_type,
        session=ticket.session_id,
        owner=ticket.owner,
        worker=worker,
        is_spare=is_spare,
        limit=limit,
        labels=sorted(ticket.needs.labels),
        voice=ticket.needs.voice,
    )
