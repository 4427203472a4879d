"""Response bodies of the HTTP API about workers, queue and estimates. Contains no I/O.

Values from a worker's /health are copied if they have the expected type, and left out otherwise.
"""

from server.access.identity import Identity
from server.dispatch.dispatcher import Dispatcher, QueuePosition
from server.dispatch.eta import CONFIG_FIELDS
from server.dispatch.health_values import OFFLINE, iso, number_of
from server.dispatch.queue import Ticket
from server.dispatch.workers import Worker, WorkerLease
from server.routes.bodies import (
    CacheStatus,
    EtaSettings,
    EtaStatus,
    Progress,
    QueueItem,
    QueueStatus,
    Ready,
    RunningTask,
    ServiceStatus,
    Slots,
    TicketFound,
    TicketStatus,
    TicketUnknown,
    WorkerInfo,
    WorkerList,
    WorkerStatus,
)
from worker.status import State

MAX_CHARS = 2000  # of a text from a worker
DUPLEX = frozenset({"audio_duplex", "omni_duplex"})
# Names that older clients use for request types.
ALIASES = {"streaming": "half_duplex", "duplex": "omni_duplex"}


def readiness(dispatcher: Dispatcher, *, draining: bool) -> Ready:
    """GET /readyz."""
    workers = dispatcher.workers
    return Ready(
        ready=workers.n_ready > 0 and not draining,
        free_slots=workers.n_free,
        total_slots=workers.n_slots,
        ready_workers=workers.n_ready,
        total_workers=len(workers.all),
        queue_length=len(dispatcher.queue),
        draining=draining,
    )


def service_status(dispatcher: Dispatcher, identity: Identity, *, draining: bool, n_connections: int) -> ServiceStatus:
    """GET /status. identity: who asks, and sees sessions of its own only."""
    workers = dispatcher.workers
    statuses = [worker.status for worker in workers.all]
    n_idle = sum(worker.n_free > 0 for worker in workers.all)
    return ServiceStatus(
        total_workers=len(workers.all),
        idle_workers=n_idle,
        busy_workers=workers.n_ready - n_idle,
        duplex_workers=sum(any(lease.request_type in DUPLEX for lease in worker.leases) for worker in workers.all),
        loading_workers=statuses.count("loading"),
        error_workers=statuses.count("error"),
        offline_workers=statuses.count(OFFLINE),
        queue_length=len(dispatcher.queue),
        max_queue_size=dispatcher.queue.max_size,
        running_tasks=running_tasks(dispatcher, identity),
        draining=draining,
        connections=n_connections,
        slots=Slots(total=workers.n_slots, free=workers.n_free, leased=sum(map(_n_leased, workers.all))),
        random_weights=any(worker.has_random_weights for worker in workers.all),
    )


def _n_leased(worker: Worker) -> int:
    """Leased slots of its omni model."""
    return len(worker.leases_of("omni"))


def running_tasks(dispatcher: Dispatcher, identity: Identity) -> list[RunningTask]:
    """The sessions with a slot that the identity may see."""
    return [running_task(dispatcher, lease) for lease in dispatcher.workers.leases if identity.owns(lease.owner)]


def running_task(dispatcher: Dispatcher, lease: WorkerLease) -> RunningTask:
    return RunningTask(
        worker_id=lease.worker.name,
        request_type=lease.request_type,
        started_at=iso(lease.started_at),
        elapsed_s=round(dispatcher.elapsed(lease), 1),
        estimated_remaining_s=round(dispatcher.remaining(lease), 1),
        session_id=lease.session_id,
        units=lease.n_units,
        paused=lease.paused,
    )


def worker_list(dispatcher: Dispatcher, identity: Identity) -> WorkerList:
    """GET /workers. identity: who asks, and sees sessions of its own only."""
    workers = dispatcher.workers.all
    return WorkerList(total=len(workers), workers=[worker_info(worker, identity) for worker in workers])


def worker_info(worker: Worker, identity: Identity) -> WorkerInfo:
    leases = [lease for lease in worker.leases if identity.owns(lease.owner)]
    first = leases[0] if leases else None
    error = worker.health.get("error")
    return WorkerInfo(
        worker_id=worker.name,
        host=worker.address.host,
        port=worker.address.port,
        gpu_id=int(number_of(worker.gpu_id)),
        status=worker.status,
        current_session_id=first and first.session_id,
        total_requests=worker.n_requests,
        avg_inference_time_ms=number_of(worker.health.get("avg_inference_time_ms")),
        last_heartbeat=None if worker.answered_at is None else iso(worker.answered_at),
        current_request_type=first and first.request_type,
        task_started_at=first and iso(first.started_at),
        state=State(worker.state) if worker.state is not None and worker.state in State.__members__ else None,
        error=None if error is None else _text(error),
        progress=_progress(worker.health.get("progress")),
        slots=Slots(total=worker.n_slots, free=worker.n_free, leased=_n_leased(worker)),
        sessions=[lease.session_id for lease in leases],
    )


def _progress(given: object) -> Progress | None:
    if not isinstance(given, dict):
        return None
    numbers = {key: number_of(given.get(key)) for key in ("done", "total", "seconds")}
    return Progress(what=_text(given.get("what", "")), **numbers)


def _text(value: object) -> str:
    """The value as text, cut to a maximum length and without characters that UTF-8 cannot encode."""
    return str(value)[:MAX_CHARS].encode("utf-8", "replace").decode()


def cache_status(dispatcher: Dispatcher) -> CacheStatus:
    """GET /cache."""
    found = [WorkerStatus(worker_id=worker.name, status=worker.status) for worker in dispatcher.workers.all]
    return CacheStatus(workers=found)


def queue_status(dispatcher: Dispatcher, identity: Identity) -> QueueStatus:
    """GET /api/queue. identity: who asks, and sees tickets and sessions of its own only."""
    return QueueStatus(
        queue_length=len(dispatcher.queue),
        max_queue_size=dispatcher.queue.max_size,
        items=[
            queue_item(dispatcher, ticket, position)
            for ticket, position in dispatcher.positions().items()
            if identity.owns(ticket.owner)
        ],
        running_tasks=running_tasks(dispatcher, identity),
    )


def queue_item(dispatcher: Dispatcher, ticket: Ticket, position: QueuePosition) -> QueueItem:
    return QueueItem(
        ticket_id=ticket.ticket_id,
        request_type=ticket.request_type,
        session_id=ticket.session_id,
        position=position.position,
        estimated_wait_s=position.wait_s,
        enqueued_at=iso(ticket.enqueued_at),
        wait_elapsed_s=round(dispatcher.waited(ticket), 1),
    )


def ticket_status(dispatcher: Dispatcher, ticket_id: str, identity: Identity) -> TicketFound | TicketUnknown:
    """GET /api/queue/{ticket_id}. identity: who asks; tickets of others do not exist for it."""
    ticket = dispatcher.queue.find(ticket_id)
    if ticket is None or not identity.owns(ticket.owner):
        return TicketUnknown(message=f"No ticket {ticket_id[:60]} waits")
    item = queue_item(dispatcher, ticket, dispatcher.positions()[ticket])
    return TicketFound(ticket=TicketStatus(**item.model_dump(exclude={"wait_elapsed_s"})))


def eta_status(dispatcher: Dispatcher) -> EtaStatus:
    """GET /api/config/eta."""
    eta = dispatcher.eta
    guesses = {key: getattr(eta.config, key) for key in CONFIG_FIELDS.values()}
    averages: dict[str, float | None] = {}
    samples: dict[str, int] = {}
    for kind, key in CONFIG_FIELDS.items():
        measured, name = eta.measured[kind], key.removeprefix("eta_").removesuffix("_s")
        averages[name] = None if measured.average_s is None else round(measured.average_s, 1)
        samples[name] = measured.n
    for alias, name in ALIASES.items():
        guesses[f"eta_{alias}_s"] = guesses[f"eta_{name}_s"]
        averages[alias], samples[alias] = averages[name], samples[name]
    return EtaStatus(
        config=EtaSettings(**guesses, ema_alpha=eta.config.ema_alpha),
        ema_alpha=eta.config.ema_alpha,
        **{f"ema_{name}_s": average for name, average in averages.items()},
        **{f"ema_{name}_samples": n for name, n in samples.items()},
    )
