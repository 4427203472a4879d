"""The controller of a cluster, with simulated nodes and a simulated authority; and what uses Ray."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from launcher.cluster.controller import AUTHORITY_MARK, Controller
from launcher.cluster.members import ClusterPlan, GroupPlan, NodeLostError
from launcher.cluster.options import make_plan, parser
from launcher.cluster.program_host import LEFT_OUT, ProgramHost, ProgramSpec, ProgramStatus
from launcher.cluster.scaling import GroupLoad, Scaler, ScalingPolicy, SlotLoad
from launcher.plan import RunSecrets
from models.errors import SettingsError
from tests.launcher.processes import wait_until
from tests.server.dispatch.test_queue import Clock
from worker.config.service import default_config


@dataclass
class PlayedProgram:
    """A program whose node the test owns."""

    spec: ProgramSpec
    address: str
    is_lost: bool = False
    is_asked: bool = False
    is_removed: bool = False
    is_silent: bool = False
    ended: str = ""

    def status(self) -> ProgramStatus | None:
        if self.is_silent:
            return None
        if self.is_lost:
            raise NodeLostError("actor", expected="an answer", got="none")
        return ProgramStatus(self.address, f"node of {self.address}", self.ended)

    def terminate(self) -> None:
        self.is_asked = True

    def remove(self) -> None:
        self.is_removed = True


@dataclass
class PlayedCluster:
    """Nodes and an authority. requested: numbers of workers in each request for nodes, by their names.

    workers: those of the authority. queue_length, wait_s: of its queue for the omni model. queues: further ones.
    """

    programs: list[PlayedProgram] = field(default_factory=list)
    requested: list[dict[str, int]] = field(default_factory=list)
    workers: dict[str, dict[str, Any]] = field(default_factory=dict)
    queue_length: int = 0
    wait_s: float = 0.0
    queues: list[dict[str, Any]] = field(default_factory=list)
    is_down: bool = False
    changes: list[tuple[str, str]] = field(default_factory=list)

    def place(self, spec: ProgramSpec) -> PlayedProgram:
        for one in self.programs:
            if one.spec.name == spec.name and not (one.is_removed or one.is_lost or one.ended):
                return one
        self.programs.append(PlayedProgram(spec, f"10.0.0.{len(self.programs) + 1}:1"))
        return self.programs[-1]

    def request(self, needs: Sequence[tuple[ProgramSpec, int]]) -> None:
        self.requested.append({spec.name: n for spec, n in needs})

    def answer(self, request: httpx.Request) -> httpx.Response:
        if self.is_down:
            raise httpx.ConnectError("down")
        path, _, address = request.url.path.rpartition("/")
        if request.url.path == "/workers":
            omni = {"model": "omni", "labels": [], "length": self.queue_length, "longest_wait_s": self.wait_s}
            queues = ([omni] if self.queue_length else []) + self.queues
            return httpx.Response(200, json={"workers": list(self.workers.values()), "queues": queues})
        assert path == "/workers" and request.headers["secret"] == "s", f"expected a worker's route, got {request.url}"
        self.changes.append((request.method, address))
        if request.method == "PUT":
            name = next(one.spec.name for one in self.programs if one.address == address)
            model = "speech" if name.startswith("speech") else "omni"
            self.workers[address] = {
                **{"address": address, "is_ready": True, "is_draining": False, "labels": [f"model:{model}"]},
                **{"models": {model: {"slots": 2, "free": 2}}, "leases": 0, "others": 0, "is_unsure": False},
            }
        elif request.method == "POST":
            self.workers[address]["is_draining"] = True
        else:
            self.workers.pop(address, None)
        return httpx.Response(200)

    def use(self, address: str, n: int) -> None:
        """Let sessions use this number of a worker's two slots."""
        worker = self.workers[address]
        worker["leases"] = n
        for model in worker["models"].values():
            model["free"] = 2 - n

    def running(self, kind: str) -> list[PlayedProgram]:
        return [one for one in self.programs if one.spec.kind == kind and not one.is_removed]


def controlled(
    policy: ScalingPolicy, n_gateways: int = 1, **others: ScalingPolicy
) -> tuple[PlayedCluster, Controller, Clock]:
    """policy: of the group `worker`. others: of further groups, by name."""
    played, clock = PlayedCluster(), Clock()
    plan = ClusterPlan(
        ProgramSpec("authority", "authority", ("a",)),
        tuple(ProgramSpec("gateway", f"gateway-{n}", ("g", AUTHORITY_MARK)) for n in range(n_gateways)),
        tuple(
            GroupPlan(ProgramSpec("worker", name, ("w",)), one) for name, one in {"worker": policy, **others}.items()
        ),
        {"secret": "s"},
    )
    http = httpx.Client(transport=httpx.MockTransport(played.answer))
    return played, Controller(plan, played, clock, http), clock


def poll(controller: Controller, clock: Clock, n: int = 6) -> None:
    for _ in range(n):
        clock.now += 1
        controller.poll()


def test_programs_of_a_lost_node_start_on_another_one() -> None:
    played, controller, clock = controlled(ScalingPolicy(2, 2), n_gateways=2)
    poll(controller, clock)
    workers = played.running("worker")
    assert [one.spec.name for one in workers] == ["worker-1", "worker-2"]
    assert set(played.workers) == {one.address for one in workers}, "expected the workers to be registered"
    authority = played.programs[0].address
    for gateway in played.running("gateway"):
        assert gateway.spec.command == ("g", authority), f"expected the authority's address, got {gateway.spec.command}"
    workers[0].is_lost = True
    poll(controller, clock)
    replaced = played.running("worker")
    assert sorted(one.spec.name for one in replaced) == ["worker-1", "worker-2"] and workers[0] not in replaced
    assert set(played.workers) == {one.address for one in replaced}, "expected only workers that run"


def test_worker_that_fails_again_and_again_waits_longer() -> None:
    played, controller, clock = controlled(ScalingPolicy(1, 1))
    for _ in range(60):
        poll(controller, clock, 1)
        for one in played.running("worker"):
            one.ended = "exit status 1"
    n = sum(one.spec.kind == "worker" for one in played.programs)
    assert 4 <= n <= 8, f"expected waits that double, got {n} starts in 60 s"
    assert controller.describe()["workers"][0]["last_end"] == "exit status 1"


def test_workers_are_added_under_load_and_removed_without_sessions() -> None:
    played, controller, clock = controlled(ScalingPolicy(1, 3, wait_s=2.0, idle_s=10.0))
    poll(controller, clock)
    (first,) = played.workers
    played.use(first, 2)
    played.queue_length, played.wait_s = 3, 5.0
    poll(controller, clock)
    assert len(played.running("worker")) == 3, "expected the greatest number of workers"
    assert played.requested[-1] == {"worker": 3}, f"expected a request for 3, got {played.requested}"
    played.queue_length = 0
    for address in played.workers:
        played.use(address, 1)
    poll(controller, clock, 30)
    assert len(played.running("worker")) == 3, "expected no end of workers whose slots are needed"
    for address in played.workers:
        played.use(address, 2 if address == first else 0)
    poll(controller, clock, 40)
    stopped = [one for one in played.running("worker") if one.is_asked]
    assert stopped and first not in {one.address for one in stopped}, "expected only unused workers"
    for one in stopped:
        one.ended = "exit status 0"
    poll(controller, clock)
    assert len(played.running("worker")) == 3 - len(stopped), "expected stopped workers to stay away"


def test_drain_waits_for_sessions_and_is_told_again_to_a_new_authority() -> None:
    played, controller, clock = controlled(ScalingPolicy(1, 1))
    poll(controller, clock)
    (worker,) = played.running("worker")
    played.use(worker.address, 1)
    assert controller.drain(f"node of {worker.address}") and not controller.drain("nowhere")
    poll(controller, clock)
    assert played.workers[worker.address]["is_draining"] and not worker.is_asked, "expected the session to go on"
    assert len(played.running("worker")) == 2, "expected another worker in its place"
    played.is_down = True
    poll(controller, clock)
    played.is_down, played.workers = False, {}
    poll(controller, clock, 2)
    played.workers[worker.address]["is_unsure"] = True  # its gateway has lost the authority for longer than its leases
    poll(controller, clock)
    assert not worker.is_asked, "expected the next answer of the worker to be awaited"
    played.workers[worker.address]["is_unsure"] = False
    poll(controller, clock)
    assert worker.is_asked, "expected the end of a worker that drains and has no session"


def test_stop_ends_gateways_before_workers_before_the_authority() -> None:
    played, controller, clock = controlled(ScalingPolicy(1, 1))
    poll(controller, clock)
    controller.stop()
    for kind in ("gateway", "worker", "authority"):
        poll(controller, clock)
        asked = [one.spec.kind for one in played.programs if one.is_asked and not one.is_removed]
        assert asked == [kind], f"expected {kind} to be asked, got {asked}"
        assert not controller.is_stopped
        played.running(kind)[0].ended = "exit status 0"
    poll(controller, clock)
    assert controller.is_stopped
    assert played.requested == [{"worker": 1}, {"worker": 0}], (
        f"expected no request for nodes after the stop, got {played.requested}"
    )


def test_new_controller_finds_the_workers_of_the_one_before() -> None:
    played, controller, clock = controlled(ScalingPolicy(1, 1))
    controller.adopt(["authority", "worker-7", "worker-x", "gateway-0"])
    poll(controller, clock)
    (worker,) = played.running("worker")
    assert worker.spec.name == "worker-7", f"expected no further worker, got {worker.spec.name}"

    played.workers[worker.address]["is_draining"] = True
    played.use(worker.address, 1)
    again = Controller(controller.plan, played, clock, controller._http)
    again.adopt(["worker-7"])
    worker.is_silent = True
    asked = len(played.changes)
    poll(again, clock)
    assert played.changes[asked:] == [], f"expected the sessions' worker to stay registered, got {played.changes}"
    worker.is_silent = False
    poll(again, clock)
    assert not worker.is_asked and len(played.running("worker")) == 2, (
        "expected another one beside a worker that drains"
    )
    played.use(worker.address, 0)
    poll(again, clock)
    assert worker.is_asked, "expected the end of a worker that drains and has no session"


@pytest.mark.parametrize(
    ("load", "expected"),
    [
        (GroupLoad(0, 0), 1),
        (GroupLoad(1, 1), 1),  # nothing is measured before the first worker is ready
        (GroupLoad(1, 0, (SlotLoad(10, 1),)), 1),
        (GroupLoad(1, 0, (SlotLoad(10, 0),)), 2),  # no slot is left for the next session
        (GroupLoad(1, 0, (SlotLoad(10, 0, 20, 1.0),)), 2),  # tickets that have waited for a moment do not count
        (GroupLoad(1, 0, (SlotLoad(10, 0, 20, 3.0),)), 4),
        (GroupLoad(1, 0, (SlotLoad(10, 0, 90, 3.0),)), 5),
        (GroupLoad(2, 1, (SlotLoad(10, 0, 5, 3.0),)), 2),  # one is on its way
        (GroupLoad(2, 0, (SlotLoad(20, 20), SlotLoad(8, 0, 1, 3.0))), 3),  # the fuller model of the same workers
    ],
)
def test_number_of_workers_follows_slots_and_waits(load: GroupLoad, expected: int) -> None:
    got = Scaler(ScalingPolicy(1, 5)).desired(load, 0.0)
    assert got == expected, f"expected {expected} workers, got {got} for {load}"


def test_program_gets_its_nodes_address_and_tells_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LEFT_OUT:  # the host removes them from this process; they come back after the test
        monkeypatch.setenv(name, "of the actor")
    script = 'echo "error: $0 $1 ${OMP_NUM_THREADS-none}"; exit 3'
    spec = ProgramSpec("worker", "worker-1", ("sh", "-c", script, "{host}", "{port}"))
    host = ProgramHost(spec, "127.0.0.1", "n1", tmp_path)
    status = wait_until(lambda: one if (one := host.status()).ended else None, "the end of the program")
    port = status.address.removeprefix("127.0.0.1:")
    assert status.ended == f"exit status 3: 127.0.0.1 {port} none" and status.node == "n1", f"got {status}"


def test_options_become_commands() -> None:
    args = parser().parse_args(
        ["up", "--gateways", "2", "--min-workers", "2", "--max-workers", "4", "--gpus-per-worker", "0"]
    )
    plan = make_plan(default_config(), args, RunSecrets("secret"))
    (group,) = plan.groups
    assert [one.port for one in plan.gateways] == [8006, 8007] and group.worker.n_gpus == 0
    assert (group.scaling.min_workers, group.scaling.max_workers) == (2, 4)
    assert "secret" not in " ".join(group.worker.command), "expected the secret in the environment only"
    args.max_workers = 1
    with pytest.raises(SettingsError, match="at least --min-workers, 2"):
        make_plan(default_config(), args, RunSecrets())


def test_nothing_else_uses_ray(root: Path) -> None:
    uses_ray = re.compile(r"^\s*(import|from) ray\b|import_module\(.ray", re.MULTILINE)
    uses_cluster = re.compile(r"^\s*(import|from) launcher\.cluster", re.MULTILINE)
    for package in ("server", "worker", "models", "launcher", "clients"):
        for file in sorted((root / package).rglob("*.py")):
            text, name = file.read_text(encoding="utf-8"), str(file.relative_to(root))
            is_cluster = name.startswith("launcher/cluster/")
            assert is_cluster or not uses_cluster.search(text), f"{name}: expected no import of launcher.cluster"
            is_ray = name == "launcher/cluster/ray_placement.py"
            assert bool(uses_ray.search(text)) == is_ray, f"{name}: expected Ray in ray_placement.py only"
