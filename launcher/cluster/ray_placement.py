"""Programs as Ray actors, and the controller as one that Ray restarts. The only module that uses Ray.

Ray is imported only when a cluster is used, so other commands neither need it nor spend the time of its import.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from launcher.cluster.controller import Controller
from launcher.cluster.members import ClusterPlan, NodeLostError, Placed
from launcher.cluster.program_host import ProgramHost, ProgramSpec, ProgramStatus
from models.errors import SettingsError
from worker import log
from worker.config.service import ROOT

LOG = logging.getLogger(__name__)
NAMESPACE, CONTROLLER = "duologue", "controller"
# Ray's own resource of the head node, where authority and controller run.
HEAD: tuple[tuple[str, float], ...] = (("node:__internal_head__", 0.001),)
COMMON_RESOURCES = {"CPU", "memory", "object_store_memory"}  # of every node
POLL_S = 0.5
UNAVAILABLE_S = 30.0  # time for which an actor may not answer before it counts as lost


def load_ray() -> Any:
    """The module `ray`. Raises: SettingsError without the extra `cluster`."""
    try:
        return import_module("ray")
    except ImportError:
        raise SettingsError("ray", expected="the extra: pip install -e '.[cluster]'", got="no module ray") from None


def connect(address: str) -> Any:
    """Connect to a Ray cluster. address: of its head, or `auto`. Returns: the module `ray`. Raises: SettingsError."""
    ray = load_ray()
    try:
        ray.init(
            address=address,
            namespace=NAMESPACE,
            log_to_driver=False,
            configure_logging=False,
            # Actors find the checkout where it lies on each node.
            runtime_env={"env_vars": {"PYTHONPATH": str(ROOT)}},
        )
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise SettingsError("--address", expected="a running Ray cluster (ray start --head)", got=str(error)) from None
    return ray


class HostActor(ProgramHost):
    """A program inside an actor.

    Args:
        spec: the program.
        folder: for logs.
        archives: of kernels, by file name.
    """

    def __init__(self, spec: ProgramSpec, folder: Path, archives: dict[str, bytes]):
        ray = load_ray()
        node = ray.get_runtime_context().get_node_id()
        super().__init__(spec, ray.util.get_node_ip_address(), node, folder, archives)


class PlacedActor:
    """One actor. Its answers are fetched without waiting for them."""

    def __init__(self, actor: Any):
        self._ray, self._actor = load_ray(), actor
        self._asked: Any = None
        self._status: ProgramStatus | None = None
        self._answered_at = time.monotonic()

    def status(self) -> ProgramStatus | None:
        ray = self._ray
        if self._asked is None:
            self._asked = self._actor.status.remote()
        ready, _ = ray.wait([self._asked], timeout=0)
        if not ready:
            return self._status
        asked, self._asked = self._asked, None
        try:
            self._status, self._answered_at = ray.get(asked), time.monotonic()
        except ray.exceptions.ActorUnavailableError as error:
            if time.monotonic() - self._answered_at > UNAVAILABLE_S:
                raise _lost(error) from None
        except ray.exceptions.RayError as error:
            raise _lost(error) from None
        return self._status

    def terminate(self) -> None:
        self._actor.terminate.remote()

    def remove(self) -> None:
        self._ray.kill(self._actor)


def _lost(error: Exception) -> NodeLostError:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return NodeLostError("actor", expected="an answer", got=lines[0][:200])


class RayPlacement:
    """Programs on the nodes of a Ray cluster.

    Args:
        folder: for logs, on each node.
        archives: of kernels, by file name. Ray's object store copies them once to each node that starts a program.
    """

    def __init__(self, folder: Path, archives: Mapping[str, bytes]):
        self._ray, self._folder = load_ray(), folder
        self._archives = self._ray.put(dict(archives))
        self._sdk: Any = import_module("ray.autoscaler.sdk")
        self._strategies: Any = import_module("ray.util.scheduling_strategies")
        self._n_apart = 0  # programs that were placed on such nodes; see `nodes_apart`

    def place(self, spec: ProgramSpec) -> Placed:
        try:
            return PlacedActor(self._ray.get_actor(spec.name, NAMESPACE))
        except ValueError:
            pass
        actor = self._ray.remote(HostActor).options(
            name=spec.name,
            namespace=NAMESPACE,
            lifetime="detached",
            num_cpus=0,
            num_gpus=spec.n_gpus,
            resources=dict(spec.resources),
            scheduling_strategy=self._strategy(spec),
            # Without restarts the controller starts another one, on a node with free resources.
            max_restarts=-1 if spec.is_restarted else 0,
        )
        return PlacedActor(actor.remote(spec, self._folder, self._archives))

    def _strategy(self, spec: ProgramSpec) -> Any:
        """Where Ray starts a program.

        Programs that need no resource, such as gateways, take turns on the nodes without one, if there are any: a node
        that has a session's gateway and its worker would take the session with it. Others are spread over all nodes.
        """
        apart = [] if spec.n_gpus or spec.resources else nodes_apart(self._ray.nodes())
        if not apart:
            return "SPREAD"
        node = apart[self._n_apart % len(apart)]
        self._n_apart += 1
        return self._strategies.NodeAffinitySchedulingStrategy(node_id=node, soft=True)

    def request(self, needs: Sequence[tuple[ProgramSpec, int]]) -> None:
        self._sdk.request_resources(bundles=bundles_of(needs))


def nodes_apart(nodes: Sequence[Mapping[str, Any]]) -> list[str]:
    """The ids of living nodes without a GPU or a resource of the operator, in a fixed order. nodes: of `ray.nodes`."""
    return sorted(
        node["NodeID"]
        for node in nodes
        if node["Alive"] and all(name.startswith("node:") for name in set(node["Resources"]) - COMMON_RESOURCES)
    )


def bundles_of(needs: Sequence[tuple[ProgramSpec, int]]) -> list[dict[str, float]]:
    """Ray's resources of these numbers of programs, each in a bundle of its own; programs that need none have none."""
    found: list[dict[str, float]] = []
    for spec, n in needs:
        bundle = {**dict(spec.resources), **({"GPU": spec.n_gpus} if spec.n_gpus else {})}
        found += [bundle] * n if bundle else []
    return found


class ControllerActor:
    """The controller inside an actor: a thread checks the cluster every `POLL_S` seconds.

    Args:
        plan: what should run.
        folder: for logs, on each node.
        level: of the log.
    """

    def __init__(self, plan: ClusterPlan, folder: Path, level: str):
        log.set_up(level)
        names = [str(name) for name in load_ray().util.list_named_actors()]
        self._controller = Controller(plan, RayPlacement(folder, plan.archives))
        self._controller.adopt(names)
        self._lock = threading.Lock()
        threading.Thread(target=self._run, name="controller", daemon=True).start()

    def _run(self) -> None:
        while True:
            begun = time.monotonic()
            try:
                with self._lock:
                    self._controller.poll()
            except Exception:
                LOG.exception("error in the controller")
            time.sleep(max(0.05, POLL_S - (time.monotonic() - begun)))

    def describe(self) -> dict[str, Any]:
        """The state of all programs."""
        with self._lock:
            return self._controller.describe()

    def drain(self, name: str) -> bool:
        """Drain a worker or the workers of a node. Returns: whether there is one."""
        with self._lock:
            return self._controller.drain(name)

    def stop(self) -> None:
        """Begin to stop all programs."""
        with self._lock:
            self._controller.stop()

    def is_stopped(self) -> bool:
        """Whether all programs have ended."""
        with self._lock:
            return self._controller.is_stopped


def start_controller(ray: Any, plan: ClusterPlan, folder: Path, level: str) -> Any:
    """Start the controller on the head node. Raises: SettingsError if there is one."""
    if find_controller(ray) is not None:
        raise SettingsError("up", expected="no running cluster (launcher.cluster down ends it)", got="one")
    plan = replace(plan, authority=replace(plan.authority, resources=HEAD, is_restarted=True))
    actor = ray.remote(ControllerActor).options(
        name=CONTROLLER,
        namespace=NAMESPACE,
        lifetime="detached",
        num_cpus=0,
        resources=dict(HEAD),
        max_restarts=-1,
        max_task_retries=2,
        max_concurrency=4,
    )
    return actor.remote(plan, folder, level)


def find_controller(ray: Any) -> Any:
    """The controller's actor; None if no cluster runs."""
    try:
        return ray.get_actor(CONTROLLER, NAMESPACE)
    except ValueError:
        return None


def wait_for(holds: Callable[[], bool], seconds: float, poll_s: float = 0.2) -> bool:
    """Wait until `holds` returns true. Returns: whether it did in time."""
    until = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > until:
            return False
        time.sleep(poll_s)
    return True
