"""The workers of a gateway, their health, and the leases of their slots.

Contains no I/O; clocks are passed in. `health_watch` polls the workers and records the results here.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from server.dispatch.health_values import (
    BUSY_NAMES,
    KNOWN_NAMES,
    OFFLINE,
    OPEN_NAMES,
    READY_NAMES,
    number_of,
    slots_of,
)
from server.dispatch.placement import Affinity, choose, labels_of
from server.dispatch.queue import ANY_WORKER, Model, Needs, RequestType, model_of
from worker.status import START, State

MAX_SLOTS = 1024  # of one worker; a larger number in its /health is cut to this
OTHER_MODELS: tuple[Model, ...] = tuple(model for model in get_args(Model) if model != "omni")
SHORT_OF_MEMORY = 0.9  # share of the limit above which a worker is replaced
READY = (State.IDLE, State.BUSY)


@dataclass(frozen=True)
class WorkerAddress:
    """Host and port that a worker listens on."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(eq=False)
class WorkerLease:
    """One slot of one worker, leased to one session.

    since: monotonic s. started_at: Unix s. n_units: results received so far. owner: whose session it is.
    is_spare: it is given back as soon as a session needs it. is_used: a connection to the worker was begun with it.
    needs: of the session.
    """

    worker: "Worker"
    request_type: RequestType
    session_id: str
    since: float
    started_at: float
    n_units: int = 0
    paused: bool = False
    owner: str = ""
    is_spare: bool = False
    is_used: bool = False
    needs: Needs = ANY_WORKER


@dataclass(eq=False)
class Worker:
    """One worker.

    Attributes:
        health: last JSON body of /health; {} while the worker does not answer.
        active_at: monotonic s of its last message or answer.
        answered_at: Unix s of its last answer to /health.
        n_external: slots of the omni model leased by clients that do not connect through this gateway.
        n_external_of: the same for other models.
        is_suspended: no slot is leased until the next answer to /health, because its free slots are uncertain.
        is_draining: no slot is leased any more; its sessions go on.
        n_requests: results received from it.
        lost: set while the worker is unreachable.
        headers: of every request to it.
        affinity: its latest sessions and voices.
        probe: last check before a session was opened, which may run; None before the first one.
    """

    index: int
    address: WorkerAddress
    health: dict[str, Any] = field(default_factory=dict)
    active_at: float = 0.0
    answered_at: float | None = None
    leases: list[WorkerLease] = field(default_factory=list)
    n_external: int = 0
    n_external_of: dict[Model, int] = field(default_factory=dict)
    is_suspended: bool = False
    is_draining: bool = False
    n_requests: int = 0
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    probe: "asyncio.Task[None] | None" = None
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    affinity: Affinity = field(default_factory=Affinity, repr=False)

    @property
    def labels(self) -> frozenset[str]:
        """What sessions may demand of their worker."""
        return labels_of(self.health)

    @property
    def name(self) -> str:
        return f"worker_{self.index}"

    @property
    def gpu_id(self) -> int:
        given = self.health.get("gpu_id")
        return given if isinstance(given, int) else self.index

    @property
    def state(self) -> str | None:
        """`state` of its /health; None if it does not answer or has no state."""
        state = self.health.get("state")
        return state if isinstance(state, str) else None

    @property
    def status(self) -> str:
        """Its status in the vocabulary of the public implementation's gateway."""
        if not self.health:
            return OFFLINE
        name = self.health.get("worker_status")
        if not isinstance(name, str) or name not in KNOWN_NAMES:
            return "error"
        if self.leases and name in OPEN_NAMES:
            kinds = {BUSY_NAMES.get(lease.request_type, "duplex_active") for lease in self.leases}
            if len(kinds) == 1 and "duplex_active" not in kinds:
                return kinds.pop()
            return "duplex_paused" if all(lease.paused for lease in self.leases) else "duplex_active"
        if self.is_ready and not self.leases and not self.n_external:
            return "idle"  # its last answer may be older than the end of its sessions
        return name

    @property
    def is_starting(self) -> bool:
        """Whether it loads, compiles or warms up."""
        return self.state in START if "state" in self.health else self.health.get("worker_status") == "loading"

    @property
    def is_ready(self) -> bool:
        """Whether it accepts sessions, if it has a free slot."""
        if not self.health or self.lost.is_set():
            return False
        if "state" in self.health:
            return self.health["state"] in READY
        return self.health.get("worker_status") in READY_NAMES

    @property
    def is_closing(self) -> bool:
        """Whether its sessions should move to other workers: it shuts down or drains."""
        return self.is_draining or self.state == State.DRAINING

    @property
    def is_short_of_memory(self) -> bool:
        """Whether its process holds almost as much memory as its launcher allows."""
        return number_of(self.health.get("memory_share")) >= SHORT_OF_MEMORY

    @property
    def has_random_weights(self) -> bool:
        """Whether it says that its model has random weights, whose output is noise."""
        model = self.health.get("model")
        return isinstance(model, dict) and model.get("random_weights") is True

    @property
    def has_side_lane(self) -> bool:
        """Whether it says that its model writes calls of functions beside its speech."""
        model = self.health.get("model")
        return isinstance(model, dict) and model.get("side_lane") is True

    @property
    def runs_early(self) -> bool:
        """Whether its sessions run units before their seconds are full, unless they are set to something else."""
        early = self.health.get("early_units")
        return isinstance(early, dict) and early.get("default") == "auto"

    @property
    def n_slots(self) -> int:
        """Number of its slots; 0 while it is not ready."""
        if not self.is_ready:
            return 0
        total = slots_of(self.health).get("total")
        return min(max(0, total), MAX_SLOTS) if isinstance(total, int) else 1

    @property
    def n_excess(self) -> int:
        """Sessions above its number of slots, which a worker lowers if units become slow.

        As many have to end before a slot is free.
        """
        return max(0, len(self.leases_of("omni")) + self.n_external - self.n_slots) if self.is_ready else 0

    @property
    def n_free(self) -> int:
        """Number of slots that can be leased now."""
        if self.is_suspended or self.is_draining:
            return 0
        return max(0, self.n_slots - len(self.leases_of("omni")) - self.n_external)

    def about(self, model: Model) -> dict[str, Any]:
        """Its report on a model other than the omni model; {} without one."""
        models = self.health.get("models")
        found = models.get(model) if isinstance(models, dict) else None
        return found if isinstance(found, dict) else {}

    def n_slots_of(self, model: Model) -> int:
        """Number of slots of a model; 0 while it is not ready."""
        if model == "omni":
            return self.n_slots
        total = slots_of(self.about(model)).get("total")
        return min(max(0, total), MAX_SLOTS) if self.is_ready and isinstance(total, int) else 0

    def n_free_of(self, model: Model) -> int:
        """Number of those that can be leased now."""
        if model == "omni":
            return self.n_free
        if self.is_suspended or self.is_draining:
            return 0
        return max(0, self.n_slots_of(model) - len(self.leases_of(model)) - self.n_external_of.get(model, 0))

    def leases_of(self, model: Model) -> list[WorkerLease]:
        """Leases of the slots of one model."""
        return [lease for lease in self.leases if model_of(lease.request_type) == model]


class Workers:
    """All workers, in the order of their addresses or, of a cluster, of their registration."""

    def __init__(
        self,
        addresses: Sequence[WorkerAddress],
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        headers: Mapping[str, str] | None = None,
        *,
        packs: bool = False,
    ):
        """headers: of every request to a worker. packs: fill one worker after another instead of all alike."""
        self.all = [Worker(index, address, headers=headers or {}) for index, address in enumerate(addresses)]
        self._clock, self._wall_clock, self._headers, self._packs = clock, wall_clock, headers or {}, packs

    def add(self, index: int, address: WorkerAddress) -> Worker:
        """Add a worker, which counts as offline until its first answer to /health."""
        worker = Worker(index, address, headers=self._headers)
        self.all.append(worker)
        return worker

    def remove(self, worker: Worker) -> None:
        """Remove a worker. Its sessions count as lost."""
        self.all.remove(worker)
        self.record_loss(worker)

    def find(self, address: WorkerAddress) -> Worker | None:
        """The worker at this address; None if there is none."""
        return next((worker for worker in self.all if worker.address == address), None)

    # --- health --------------------------------------------------------------------------------

    def record_health(self, worker: Worker, health: dict[str, Any]) -> None:
        """Record an answer to /health. health: its JSON body."""
        worker.health, worker.answered_at = health, self._wall_clock()
        worker.is_suspended = False
        worker.lost.clear()
        self.record_activity(worker)
        slots = slots_of(health)
        total, free = slots.get("total"), slots.get("free")
        if not (isinstance(total, int) and isinstance(free, int)):
            total, free = 1, int(health.get("worker_status") == "idle")
        worker.n_external = max(0, total - free - len(worker.leases_of("omni")))
        for model in OTHER_MODELS:
            slots = slots_of(worker.about(model))
            total, free = slots.get("total"), slots.get("free")
            n_used = total - free if isinstance(total, int) and isinstance(free, int) else 0
            worker.n_external_of[model] = max(0, n_used - len(worker.leases_of(model)))

    def record_drain(self, worker: Worker) -> None:
        """Record that the worker shuts down: it gets no more sessions."""
        worker.health = {**worker.health, "state": State.DRAINING.value}

    def record_activity(self, worker: Worker) -> None:
        """Record that the worker sent something."""
        worker.active_at = self._clock()

    def suspend(self, worker: Worker) -> None:
        """Lease no more slots until the next answer to /health: the worker refused a session or did not answer."""
        worker.is_suspended = True

    def record_loss(self, worker: Worker) -> None:
        """Record that the worker is unreachable; its sessions end."""
        worker.health, worker.n_external, worker.n_external_of = {}, 0, {}
        worker.affinity.clear()
        worker.lost.set()

    def record_result(self, lease: WorkerLease) -> None:
        """Count a result of a session."""
        lease.n_units += 1
        lease.worker.n_requests += 1

    def record_pause(self, lease: WorkerLease, paused: bool) -> None:
        """Record that a session was paused or resumed."""
        lease.paused = paused

    def idle_s(self, worker: Worker) -> float:
        """Seconds since the worker last sent something."""
        return self._clock() - worker.active_at

    # --- slots ---------------------------------------------------------------------------------

    def acquire(
        self,
        request_type: RequestType,
        session_id: str,
        owner: str = "",
        needs: Needs = ANY_WORKER,
        *,
        among: Sequence[Worker] | None = None,
        is_spare: bool = False,
    ) -> WorkerLease | None:
        """Lease a slot of the worker that `placement.choose` selects; None if no slot is free. among: None: all."""
        able = self.all if among is None else among
        worker = choose(able, model_of(request_type), session_id, needs, packs=self._packs)
        return None if worker is None else self.lease(worker, request_type, session_id, owner, needs, is_spare=is_spare)

    def acquire_elsewhere(self, lease: WorkerLease) -> WorkerLease | None:
        """A slot like this one of another worker that has enough memory; None if there is none."""
        others = [worker for worker in self.all if worker is not lease.worker and not worker.is_short_of_memory]
        return self.acquire(lease.request_type, lease.session_id, lease.owner, lease.needs, among=others)

    def acquire_spare(
        self, request_type: RequestType, session_id: str, owner: str, max_per_worker: int
    ) -> WorkerLease | None:
        """As `acquire`, for a slot that is given back on demand. max_per_worker: such slots of one worker at most."""
        able = [worker for worker in self.all if sum(lease.is_spare for lease in worker.leases) < max_per_worker]
        return self.acquire(request_type, session_id, owner, among=able, is_spare=True)

    def lease(
        self,
        worker: Worker,
        request_type: RequestType,
        session_id: str,
        owner: str,
        needs: Needs = ANY_WORKER,
        *,
        is_spare: bool = False,
    ) -> WorkerLease:
        """Record the lease of a slot of this worker, whether or not one is free."""
        now, wall_now = self._clock(), self._wall_clock()
        lease = WorkerLease(
            worker, request_type, session_id, now, wall_now, owner=owner, is_spare=is_spare, needs=needs
        )
        worker.leases.append(lease)
        worker.affinity.record(session_id, needs.voice)
        return lease

    def count_inside(self, worker: Worker, request_type: RequestType) -> None:
        """Count a slot in use no longer as one of a session outside: it is leased next."""
        model = model_of(request_type)
        if model == "omni":
            worker.n_external = max(0, worker.n_external - 1)
        else:
            worker.n_external_of[model] = max(0, worker.n_external_of.get(model, 0) - 1)

    def release(self, lease: WorkerLease) -> None:
        """Return a slot."""
        lease.worker.leases.remove(lease)

    @property
    def leases(self) -> list[WorkerLease]:
        """All leases, oldest first."""
        return sorted((lease for worker in self.all for lease in worker.leases), key=lambda lease: lease.since)

    def lacks(self, labels: frozenset[str]) -> bool:
        """Whether workers answer, and none of them has these labels."""
        known = [worker for worker in self.all if worker.health]
        return bool(known and labels) and not any(labels <= worker.labels for worker in known)

    @property
    def n_free(self) -> int:
        return sum(worker.n_free for worker in self.all)

    def n_free_of(self, model: Model) -> int:
        return sum(worker.n_free_of(model) for worker in self.all)

    def n_slots_of(self, model: Model) -> int:
        return sum(worker.n_slots_of(model) for worker in self.all)

    @property
    def n_slots(self) -> int:
        return sum(worker.n_slots for worker in self.all)

    @property
    def n_excess(self) -> int:
        return sum(worker.n_excess for worker in self.all)

    @property
    def n_ready(self) -> int:
        return sum(worker.is_ready for worker in self.all)
