"""What an authority reports on its workers and its queue, to operators and to the controller of a cluster with Ray."""

from typing import Any, get_args

from server.dispatch.queue import Model, Queue
from server.dispatch.workers import Worker

MODELS: tuple[Model, ...] = get_args(Model)


def worker_report(worker: Worker) -> dict[str, Any]:
    """State, slots and leases of a worker. `slots` and `free` are those of the omni model; `models` has all."""
    return {
        "worker_id": worker.name,
        "address": str(worker.address),
        "state": worker.state,
        "is_ready": worker.is_ready,
        "is_draining": worker.is_draining,
        "labels": sorted(worker.labels),
        "slots": worker.n_slots,
        "free": worker.n_free,
        "models": {
            model: {"slots": n_slots, "free": worker.n_free_of(model)}
            for model in MODELS
            if (n_slots := worker.n_slots_of(model))
        },
        "leases": len(worker.leases),
        "others": worker.n_external + sum(worker.n_external_of.values()),
        "is_unsure": worker.is_suspended and bool(worker.health),
        "admission": worker.health.get("admission"),
    }


def queue_report(queue: Queue, now: float) -> list[dict[str, Any]]:
    """The waiting tickets, by the model and the labels that they need. now: monotonic s."""
    return [
        {
            "model": model,
            "labels": sorted(labels),
            "length": len(tickets),
            "longest_wait_s": round(now - min(ticket.created_at for ticket in tickets), 3),
        }
        for (model, labels), tickets in queue.lines().items()
    ]
