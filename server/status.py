"""What the gateway tells of its workers, its queue and its estimates: the bodies of the HTTP API. No I/O."""

from typing import Any

from server.desk import Desk, Place
from server.eta import KINDS
from server.queue import Ticket
from server.workers import OFFLINE, Lease, Worker, iso
from worker.status import State


def service_status(desk: Desk, *, draining: bool, n_connections: int) -> dict[str, Any]:
    """GET /status."""
    workers = desk.workers
    statuses = [worker.status for worker in workers.all]
    n_idle = sum(worker.n_free > 0 for worker in workers.all)
    return {
        "gateway_healthy": True,
        "total_workers": len(workers.all),
        "idle_workers": n_idle,
        "busy_workers": workers.n_ready - n_idle,
        "duplex_workers": sum(bool(worker.leases) for worker in workers.all),
        "loading_workers": statuses.count("loading"),
        "error_workers": statuses.count("error"),
        "offline_workers": statuses.count(OFFLINE),
        "queue_length": len(desk.queue),
        "max_queue_size": desk.queue.most,
        "running_tasks": [running_task(desk, lease) for lease in workers.leases],
        "draining": draining,
        "connections": n_connections,
        "slots": {"total": workers.n_slots, "free": workers.n_free, "leased": len(workers.leases)},
    }


def running_task(desk: Desk, lease: Lease) -> dict[str, Any]:
    remaining = desk.remaining(lease)
    return {
        "worker_id": lease.worker.name,
        "request_type": lease.request_type,
        "started_at": iso(lease.started_at),
        "elapsed_s": round(desk.elapsed(lease), 1),
        "estimated_remaining_s": round(remaining, 1),
        "session_id": lease.session_id,
        "units": lease.n_units,
        "paused": lease.paused,
    }


def worker_info(worker: Worker) -> dict[str, Any]:
    """One of GET /workers."""
    first = worker.leases[0] if worker.leases else None
    state = worker.state
    return {
        "worker_id": worker.name,
        "host": worker.address.host,
        "port": worker.address.port,
        "gpu_id": worker.gpu_id,
        "status": worker.status,
        "current_session_id": first and first.session_id,
        "total_requests": worker.n_requests,
        "avg_inference_time_ms": worker.health.get("avg_inference_time_ms", 0.0),
        "last_heartbeat": None if worker.heard_at is None else iso(worker.heard_at),
        "current_request_type": first and first.request_type,
        "task_started_at": first and iso(first.started_at),
        "state": state if state in State.__members__ else None,
        "error": worker.health.get("error"),
        "progress": worker.health.get("progress"),
        "slots": {"total": worker.n_slots, "free": worker.n_free, "leased": len(worker.leases)},
        "sessions": [lease.session_id for lease in worker.leases],
    }


def queue_status(desk: Desk) -> dict[str, Any]:
    """GET /api/queue."""
    return {
        "queue_length": len(desk.queue),
        "max_queue_size": desk.queue.most,
        "items": [queue_item(desk, ticket, place) for ticket, place in desk.places().items()],
        "running_tasks": [running_task(desk, lease) for lease in desk.workers.leases],
    }


def queue_item(desk: Desk, ticket: Ticket, place: Place) -> dict[str, Any]:
    return {
        "ticket_id": ticket.ticket_id,
        "request_type": ticket.request_type,
        "session_id": ticket.session_id,
        "position": place.position,
        "estimated_wait_s": place.wait_s,
        "enqueued_at": iso(ticket.enqueued_at),
        "wait_elapsed_s": round(desk.waited(ticket), 1),
    }


def ticket_status(desk: Desk, ticket_id: str) -> dict[str, Any]:
    """GET /api/queue/{ticket}."""
    ticket = desk.queue.find(ticket_id)
    if ticket is None:
        return {"found": False, "message": f"No ticket {ticket_id[:60]} waits"}
    item = queue_item(desk, ticket, desk.places()[ticket])
    del item["wait_elapsed_s"]
    return {"found": True, "ticket": {**item, "cancelled": False}}


def eta_status(desk: Desk) -> dict[str, Any]:
    """GET /api/config/eta."""
    eta = desk.eta
    config = {key: getattr(eta.config, key) for key in KINDS.values()}
    body: dict[str, Any] = {"config": {**config, "ema_alpha": eta.config.ema_alpha}, "ema_alpha": eta.config.ema_alpha}
    for kind, key in KINDS.items():
        measured, name = eta.measured[kind], key.removeprefix("eta_").removesuffix("_s")
        body[f"ema_{name}_s"] = None if measured.average_s is None else round(measured.average_s, 1)
        body[f"ema_{name}_samples"] = measured.n
    return body
