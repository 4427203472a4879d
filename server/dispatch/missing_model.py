"""Models that requests wait for although no worker serves them. Contains no I/O and no clock."""

from dataclasses import dataclass

from server.dispatch.health_values import MAX_WORDS
from server.dispatch.queue import Model
from server.dispatch.workers import Worker, Workers
from worker.protocol.wire import clean
from worker.status import State

NAMES: dict[Model, str] = {"omni": "model", "speech": "speech model", "conversion": "voice conversion"}


@dataclass(frozen=True)
class MissingModel:
    """A model that no worker serves, or begins to serve.

    Attributes:
        model: which one.
        problem: why a worker could not load it; "" if that is not known.
        is_final: only an operator can change it: a worker that is ready has failed to load it, or has no such part.
    """

    model: Model
    problem: str
    is_final: bool

    def __str__(self) -> str:
        return f"{NAMES[self.model]}: expected one that is loaded, got none{self.problem and f': {self.problem}'}"


def missing_model(workers: Workers, model: Model) -> MissingModel | None:
    """The model if no worker serves it; None while one does, starts or drains, and while no worker answers at all."""
    known = [worker for worker in workers.all if worker.health]
    if not known or any(worker.n_slots_of(model) or _may_serve_soon(worker, model) for worker in known):
        return None
    problem = next((text for worker in known if (text := _problem(worker, model))), "")
    ready = [worker for worker in known if worker.is_ready]
    is_final = any(_problem(worker, model) or model == "conversion" for worker in ready)
    return MissingModel(model, problem, is_final)


def _may_serve_soon(worker: Worker, model: Model) -> bool:
    """Whether it starts, or drains and starts again after it, with settings that may name the model."""
    models = worker.health.get("models")
    is_named = not isinstance(models, dict) or models.get(f"{model}_path", "") is not None
    return is_named and (worker.is_starting or worker.state == State.DRAINING)


def _problem(worker: Worker, model: Model) -> str:
    """Why the worker could not load the model."""
    models = worker.health.get("models")
    of_model = models.get(f"{model}_error") if isinstance(models, dict) else None
    found = of_model or worker.health.get("error")
    return clean(found)[:MAX_WORDS] if isinstance(found, str) else ""
