"""Programs that a cluster should run, and what starts them on nodes. Contains no Ray."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from launcher.cluster.program_host import ProgramSpec, ProgramStatus
from launcher.cluster.scaling import ScalingPolicy
from launcher.restart_policy import RestartBackoff
from models.errors import ModelError


class NodeLostError(ModelError, RuntimeError):
    """The program's actor is gone, usually together with its node."""


class Placed(Protocol):
    """A program on some node."""

    def status(self) -> ProgramStatus | None:
        """Its state; None while it is not known, such as before there is a node for it. Raises: NodeLostError."""

    def terminate(self) -> None:
        """Ask the program to stop."""

    def remove(self) -> None:
        """Remove what is left of it."""


class Placement(Protocol):
    """Starts programs on the nodes of a cluster."""

    def place(self, spec: ProgramSpec) -> Placed:
        """Start a program where its resources are, now or later; one that runs already is found by its name."""

    def request(self, needs: Sequence[tuple[ProgramSpec, int]]) -> None:
        """Ask for nodes on which these numbers of programs fit together, in place of the request before."""


@dataclass(frozen=True)
class GroupPlan:
    """Workers of one kind.

    worker: the program, whose name is that of the group; each worker gets a number. scaling: their number.
    """

    worker: ProgramSpec
    scaling: ScalingPolicy


@dataclass(frozen=True)
class ClusterPlan:
    """What the cluster consists of.

    authority: a program. gateways: one program each. groups: of workers. secret_headers: of requests to the authority.
    archives: of kernels for all nodes, by file name.
    """

    authority: ProgramSpec
    gateways: tuple[ProgramSpec, ...]
    groups: tuple[GroupPlan, ...]
    secret_headers: dict[str, str] = field(default_factory=dict, repr=False)
    archives: dict[str, bytes] = field(default_factory=dict, repr=False)


@dataclass(eq=False)
class Member:
    """A program that should run. placed: None while it waits for its next start. is_draining: of a worker."""

    spec: ProgramSpec
    backoff: RestartBackoff
    placed: Placed | None = None
    start_at: float = 0.0
    address: str = ""
    node: str = ""
    reason: str = ""
    is_draining: bool = False
    is_stopping: bool = False
