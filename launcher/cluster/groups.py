"""Groups of workers of a cluster, and the load of each by what the authority reports. Contains no I/O."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from launcher.cluster.members import GroupPlan, Member
from launcher.cluster.scaling import GroupLoad, Scaler, SlotLoad
from launcher.restart_policy import RestartBackoff, RestartPolicy

# Models whose slots count. Conversions have a few slots beside those of sessions, and add no workers.
SCALED = ("omni", "speech")


@dataclass(frozen=True)
class ClusterReport:
    """What the authority reports.

    workers: by address, with `is_ready`, `is_draining`, `labels`, and `slots` and `free` of each of their `models`.
    queues: waiting tickets by `model` and `labels`: `length` and `longest_wait_s`.
    """

    workers: dict[str, dict[str, Any]] = field(default_factory=dict)
    queues: list[dict[str, Any]] = field(default_factory=list)

    @staticmethod
    def read(body: dict[str, Any]) -> "ClusterReport":
        """From the body of `GET /workers`. Raises: KeyError."""
        return ClusterReport({one["address"]: one for one in body["workers"]}, list(body["queues"]))


class Group:
    """Workers of one kind.

    Args:
        plan: their program and number.

    Attributes:
        members: workers that should run.
        requested: number of workers in the last request for nodes; -1 before the first one.
    """

    def __init__(self, plan: GroupPlan):
        self.plan, self.scaler = plan, Scaler(plan.scaling)
        self.members: list[Member] = []
        self.requested = -1
        self._n_made = 0

    @property
    def active(self) -> list[Member]:
        """Workers that do not drain."""
        return [one for one in self.members if not one.is_draining]

    def add(self, number: int | None = None) -> Member:
        """A further worker. number: of its name; None: the next one."""
        number = self._n_made + 1 if number is None else number
        self._n_made = max(self._n_made, number)
        spec = replace(self.plan.worker, name=f"{self.plan.worker.name}-{number}")
        self.members.append(Member(spec, RestartBackoff(RestartPolicy())))
        return self.members[-1]

    def adopt(self, names: Iterable[str]) -> list[Member]:
        """Add the workers of this group among running programs. Returns: them."""
        prefix = f"{self.plan.worker.name}-"
        numbers = [name[len(prefix) :] for name in names if name.startswith(prefix)]
        return [self.add(int(number)) for number in numbers if number.isdecimal()]

    def ready(self, report: ClusterReport) -> list[dict[str, Any]]:
        """The reports on its workers that accept sessions."""
        found = [report.workers.get(one.address, {}) for one in self.active if one.address]
        return [one for one in found if one.get("is_ready")]


def loads_of(groups: Sequence[Group], report: ClusterReport) -> list[GroupLoad]:
    """The load of each group.

    Tickets count with the first group whose workers have their model and labels, up to the number of sessions that it
    can serve with its largest number of workers; the rest counts with the next such group.
    """
    ready = [group.ready(report) for group in groups]
    loads = [
        {model: _slots_of(model, workers) for model in SCALED if any(model in one["models"] for one in workers)}
        for workers in ready
    ]
    for queue in report.queues:
        left = queue["length"]
        for group, workers, load in zip(groups, ready, loads, strict=True):
            model = load.get(queue["model"])
            if model is None or not any(set(queue["labels"]) <= set(one["labels"]) for one in workers):
                continue
            n_most = group.plan.scaling.max_workers * model.slots // len(workers)
            taken = min(left, max(0, n_most - (model.slots - model.free) - model.queue_length))
            if taken:
                load[queue["model"]] = replace(
                    model,
                    queue_length=model.queue_length + taken,
                    longest_wait_s=max(model.longest_wait_s, queue["longest_wait_s"]),
                )
                left -= taken
    return [
        GroupLoad(len(group.active), len(group.active) - len(workers), tuple(load.values()))
        for group, workers, load in zip(groups, ready, loads, strict=True)
    ]


def _slots_of(model: str, workers: Sequence[dict[str, Any]]) -> SlotLoad:
    """The slots of one model of these workers."""
    of_model = [one["models"][model] for one in workers if model in one["models"]]
    return SlotLoad(sum(one["slots"] for one in of_model), sum(one["free"] for one in of_model))
