"""Why sessions wait for a slot, for their clients. Contains no I/O and no clock."""

from server.dispatch.health_values import progress_of
from server.dispatch.workers import Workers
from worker.protocol.gateway_messages import StartProgress, WaitReason


def wait_reason(workers: Workers) -> WaitReason:
    """Why a session has to wait now."""
    if workers.n_ready:
        return "busy"
    return "loading" if any(worker.is_starting for worker in workers.all) else "no_worker"


def start_progress(workers: Workers) -> StartProgress | None:
    """Progress of the starting worker that has come furthest; None unless all workers are starting or lost."""
    if wait_reason(workers) != "loading":
        return None
    starting = [worker for worker in workers.all if worker.is_starting]
    return max((progress_of(worker.health) for worker in starting), key=lambda one: one[0])[1]
