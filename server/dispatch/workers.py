"""What the gateway knows of its workers, and who has a slot of which. Plain classes: no I/O, the clock is passed in.

Knows what a worker says of itself (/health) and what was lent of it since. Does not know how one asks.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from server.dispatch.queue import RequestType
from worker.status import State

MAX_SLOTS = 1024  # of a worker, whatever it says
READY = (State.IDLE, State.BUSY)
OFFLINE = "offline"
# What a worker of another make says, which has no `state`.
READY_NAMES = frozenset({"idle", "busy_chat", "busy_half_duplex", "busy_streaming", "duplex_active", "duplex_paused"})
KNOWN_NAMES = READY_NAMES | {"loading", "error"}


@dataclass(frozen=True)
class WorkerAddress:
    """Where a worker listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(eq=False)
class WorkerLease:
    """One slot of one worker, for one session. since: monotonic s. started_at: Unix s. n_units: results so far."""

    worker: "Worker"
    request_type: RequestType
    session_id: str
    since: float
    started_at: float
    n_units: int = 0
    paused: bool = False


@dataclass(eq=False)
class Worker:
    """One worker.

    health: the last body of /health, {} if it does not answer. seen: monotonic s of its last sign of life. heard_at:
    Unix s of its last answer. n_foreign: slots that others than this gateway hold. distrusted: nothing more is lent
    until it answers anew. n_requests: results that came from it. lost: set while it gives no sign of life.
    """

    index: int
    address: WorkerAddress
    health: dict[str, Any] = field(default_factory=dict)
    seen: float = 0.0
    heard_at: float | None = None
    leases: list[WorkerLease] = field(default_factory=list)
    n_foreign: int = 0
    distrusted: bool = False
    n_requests: int = 0
    lost: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def name(self) -> str:
        return f"worker_{self.index}"

    @property
    def gpu_id(self) -> int:
        given = self.health.get("gpu_id")
        return given if isinstance(given, int) else self.index

    @property
    def state(self) -> str | None:
        """In the worker's own words; None if it does not answer or does not say."""
        return self.health.get("state")

    @property
    def status(self) -> str:
        """As other gateways name it."""
        if not self.health:
            return OFFLINE
        name = self.health.get("worker_status")
        if name not in KNOWN_NAMES:
            return "error"
        if self.leases and name in ("idle", "duplex_active"):
            return "duplex_paused" if all(lease.paused for lease in self.leases) else "duplex_active"
        return name

    @property
    def is_ready(self) -> bool:
        """Takes sessions, if there is room."""
        if not self.health or self.lost.is_set():
            return False
        if "state" in self.health:
            return self.health["state"] in READY
        return self.health.get("worker_status") in READY_NAMES

    @property
    def n_slots(self) -> int:
        """0 while it is not ready."""
        if not self.is_ready:
            return 0
        total = _slots(self.health).get("total")
        return min(max(0, total), MAX_SLOTS) if isinstance(total, int) else 1

    @property
    def n_free(self) -> int:
        """Slots that can be lent now."""
        return 0 if self.distrusted else max(0, self.n_slots - len(self.leases) - self.n_foreign)


def _slots(health: dict[str, Any]) -> dict[str, Any]:
    given = health.get("slots")
    return given if isinstance(given, dict) else {}


class Workers:
    """All of them, in their order."""

    def __init__(
        self,
        addresses: Sequence[WorkerAddress],
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ):
        self.all = [Worker(index, address) for index, address in enumerate(addresses)]
        self._clock, self._wall = clock, wall

    # --- what they say -------------------------------------------------------------------------

    def answered(self, worker: Worker, health: dict[str, Any]) -> None:
        """A worker has answered /health."""
        worker.health, worker.heard_at = health, self._wall()
        worker.distrusted = False
        worker.lost.clear()
        self.alive(worker)
        slots = _slots(health)
        total, free = slots.get("total"), slots.get("free")
        if not (isinstance(total, int) and isinstance(free, int)):
            total, free = 1, int(health.get("worker_status") == "idle")
        worker.n_foreign = max(0, total - free - len(worker.leases))

    def alive(self, worker: Worker) -> None:
        """A sign of life."""
        worker.seen = self._clock()

    def refused(self, worker: Worker) -> None:
        """It gave no slot, or no answer: nothing more is lent until it has told how it stands."""
        worker.distrusted = True

    def gone(self, worker: Worker) -> None:
        """Nobody listens there, or nothing is heard any more: sessions there end."""
        worker.health, worker.n_foreign = {}, 0
        worker.lost.set()

    # --- slots ---------------------------------------------------------------------------------

    def lend(self, request_type: RequestType, session_id: str) -> WorkerLease | None:
        """A slot of the worker with the largest share free, the first of several; None: there is none."""
        free = [worker for worker in self.all if worker.n_free > 0]
        if not free:
            return None
        worker = max(free, key=lambda one: one.n_free / one.n_slots)
        lease = WorkerLease(worker, request_type, session_id, self._clock(), self._wall())
        worker.leases.append(lease)
        return lease

    def take_back(self, lease: WorkerLease) -> None:
        """The slot can be lent again."""
        lease.worker.leases.remove(lease)

    @property
    def leases(self) -> list[WorkerLease]:
        """Oldest first."""
        return sorted((lease for worker in self.all for lease in worker.leases), key=lambda lease: lease.since)

    @property
    def n_free(self) -> int:
        return sum(worker.n_free for worker in self.all)

    @property
    def n_slots(self) -> int:
        return sum(worker.n_slots for worker in self.all)

    @property
    def n_ready(self) -> int:
        return sum(worker.is_ready for worker in self.all)


def iso(seconds: float) -> str:
    """A moment in Unix seconds as local time, as clients of this protocol read it."""
    return datetime.fromtimestamp(seconds).isoformat()
