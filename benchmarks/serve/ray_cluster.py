"""A cluster of Ray nodes on one machine: start, loss of a node or of a worker, scaling.

    python -m benchmarks.serve.ray_cluster [--parts start,death,steady,scaling] [--sessions 8] [--pace-s 1]
    python -m benchmarks.serve.ray_cluster --gpus 2 --sessions 32 [--model-path DIR]

Without `--gpus`, the embedded model on the CPU, with one worker on each of three nodes. With `--gpus N`, one node with
N GPUs, and a worker on each; one of them is killed in place of a node, and nothing scales. Needs the extra `cluster`.
Prints one JSON object for each part.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.chaos.clients import ChaosClient, LiveGroup
from benchmarks.serve.cluster_phases import PhaseLog, cpu_count, is_late
from launcher.cluster.ray_placement import NAMESPACE, find_controller, load_ray
from models.checkpoint.embedded import TINY
from worker.config.service import ROOT

WORKER = "tiny_worker"  # the resource that a worker takes
WAIT_S = 180.0
ON_CPU = ("--gpus-per-worker", "0", "--resource", WORKER, "--no-compile")
PARTS = ("start", "death", "steady", "scaling")
N_BASE, N_MORE, N_SLOTS = 1, 3, 2  # sessions, further ones, slots of a worker: with all sessions three workers
STEADY_S, AFTER_S = 20, 5  # at a pace of 1 s
POLL_S = 0.5  # for the state of the cluster, which costs the controller and the authority time


class LocalCluster:
    """Ray nodes on this machine, as a context.

    Args:
        n_nodes: besides the head, with room for one worker each; with GPUs there is one.
        n_gpus: of that node; 0: workers use the CPU.
        port: of the first gateway.
    """

    def __init__(self, n_nodes: int, n_gpus: int, port: int):
        from ray.cluster_utils import Cluster

        self.n_gpus, self.urls = n_gpus, [f"ws://127.0.0.1:{port + index}" for index in range(2)]
        self._folder = tempfile.TemporaryDirectory()
        self.config = Path(self._folder.name) / "config.json"
        service = {"gateway_port": port, "data_dir": self._folder.name}
        self.config.write_text(json.dumps({"model": {"model_path": str(ROOT / TINY)}, "service": service}))
        os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - Ray's name
        self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 0})
        self.nodes: dict[str, Any] = {}
        for _ in range(1 if n_gpus else n_nodes):
            self.add_node()
        self._ray = load_ray()
        self._ray.init(address=self.cluster.address, namespace=NAMESPACE, log_to_driver=False, configure_logging=False)

    def __enter__(self) -> "LocalCluster":
        return self

    def __exit__(self, *_: object) -> None:
        self._ray.shutdown()
        self.cluster.shutdown()
        self._folder.cleanup()

    def add_node(self) -> None:
        """Add a node for workers."""
        has = {"num_gpus": self.n_gpus} if self.n_gpus else {"num_gpus": 0, "resources": {WORKER: 1}}
        node = self.cluster.add_node(num_cpus=1, **has)
        self.nodes[node.node_id] = node

    def up(self, n_workers: int, *flags: str) -> None:
        """Start two gateways and this number of workers."""
        where = () if self.n_gpus else ON_CPU
        size = ("--min-workers", str(n_workers), "--gateways", "2")
        self.command("up", "--config", str(self.config), *size, *where, *flags)

    def command(self, *arguments: str) -> None:
        """Run `python -m launcher.cluster`."""
        command = [sys.executable, "-m", "launcher.cluster", "--address", self.cluster.address, *arguments]
        subprocess.run(command, cwd=ROOT, check=True, stdout=sys.stderr)

    def state(self) -> dict[str, Any]:
        """What `status` prints."""
        found: dict[str, Any] = self._ray.get(find_controller(self._ray).describe.remote())
        return found

    def ready(self) -> list[dict[str, Any]]:
        """Workers that accept sessions."""
        return [one for one in self.state()["workers"] if one.get("is_ready") and not one["is_draining"]]

    def kill(self, worker: dict[str, Any]) -> None:
        """Kill a worker's process with SIGKILL, and without GPUs its whole node."""
        port = int(worker["address"].rpartition(":")[2])
        for process in psutil.process_iter():
            if str(port) in process.cmdline() and "worker.main" in process.cmdline():
                process.kill()
        if not self.n_gpus:
            self.cluster.remove_node(self.nodes.pop(worker["node"]), allow_graceful=False)


async def until(holds: Callable[[], bool], what: str, poll_s: float = 0.1) -> float:
    """Wait for a condition. Returns: seconds."""
    begun = time.monotonic()
    while not await asyncio.to_thread(holds):
        assert time.monotonic() - begun < WAIT_S, f"expected {what} within {WAIT_S:g} s"
        await asyncio.sleep(poll_s)
    return round(time.monotonic() - begun, 2)


def n_late(clients: list[ChaosClient]) -> int:
    """Units with a late result, or with none after the deadline."""
    now = time.monotonic()
    return sum(is_late(unit, now) for client in clients for unit in client.units)


def measure_start(cluster: LocalCluster, n_workers: int, flags: Sequence[str]) -> dict[str, object]:
    """Two gateways and the workers, from the command to the last worker that is ready."""
    begun = time.monotonic()
    cluster.up(n_workers, *flags)
    return {"part": "start", "gateways": 2, "workers": n_workers, "seconds": round(time.monotonic() - begun, 2)}


async def measure_death(cluster: LocalCluster, n_workers: int, n_sessions: int, pace_s: float) -> dict[str, object]:
    """Live sessions at two gateways; one worker is killed, without GPUs together with its node."""
    urls = [cluster.urls[number % 2] for number in range(n_sessions)]
    async with LiveGroup(urls, "death", pace_s) as group:
        await until(lambda: all(one.n_answered >= 5 for one in group.clients), "five units of each session")
        n_before, late_before = sum(one.n_answered for one in group.clients), n_late(group.clients)
        workers = await asyncio.to_thread(cluster.ready)
        killed = max(workers, key=lambda one: one["leases"])
        await asyncio.to_thread(cluster.kill, killed)
        at = time.monotonic()

        def goes_on(client: ChaosClient) -> bool:
            return sum(unit.fingerprint is not None and unit.sent_at > at for unit in client.units) >= 2

        resumed_s = await until(lambda: all(goes_on(one) for one in group.clients), "two more units of each session")
        n_moved = sum(len(one.moves) for one in group.clients)
        n_ended = sum(one.n_begun for one in group.clients)
        late_after = n_late(group.clients)
    replaced_s = await until(lambda: len(cluster.ready()) == n_workers, "another worker")
    return {
        **{"part": "worker killed" if cluster.n_gpus else "node killed", "sessions": n_sessions},
        **{"of the killed worker": killed["leases"], "moved": n_moved, "ended": n_ended},
        **{"units before": n_before, "late before": late_before, "late after": late_after - late_before},
        **{"two units later after s": resumed_s, "replaced after s": replaced_s},
    }


async def measure_steady(cluster: LocalCluster, pace_s: float) -> dict[str, object]:
    """The sessions of `measure_scaling` on three workers that neither start nor end: what is late without scaling."""
    url = cluster.urls[0]
    with PhaseLog() as log:
        async with LiveGroup([url] * N_BASE, "base", pace_s) as base, LiveGroup([url] * N_MORE, "more", pace_s) as more:
            clients = [*base.clients, *more.clients]
            await until(lambda: all(one.n_answered >= 3 for one in clients), "units")
            log.begin("steady")
            await asyncio.sleep(STEADY_S * pace_s)
            log.begin("end")
        return {"part": "steady", "phases": log.rows(clients)}


async def measure_scaling(cluster: LocalCluster, pace_s: float) -> dict[str, object]:
    """Sessions on one worker, which more sessions join and leave: one worker, three, and one again."""
    url = cluster.urls[0]

    def workers() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = cluster.state()["workers"]
        return found

    async def grow() -> float:
        placed_s = await until(lambda: sum(bool(one["address"]) for one in workers()) == 3, "processes", POLL_S)
        log.begin("workers start")
        ready_s = await until(lambda: len(cluster.ready()) == 3, "three workers", POLL_S)
        log.begin("three workers")
        return placed_s + ready_s

    with PhaseLog() as log:
        async with LiveGroup([url] * N_BASE, "base", pace_s) as base:
            await until(lambda: all(one.n_answered >= 3 for one in base.clients), "units at one worker")
            log.begin("one worker")
            await asyncio.sleep(STEADY_S * pace_s)
            log.begin("actors start")
            growing = asyncio.create_task(grow(), name="workers that start")
            async with LiveGroup([url] * N_MORE, "more", pace_s) as more:
                up_s = await growing
                await asyncio.sleep(STEADY_S * pace_s)
                log.begin("sessions end")
            log.begin("workers stop")
            down_s = await until(lambda: len(workers()) == 1, "one worker", POLL_S)
            log.begin("one worker again")
            await asyncio.sleep(AFTER_S * pace_s)
            log.begin("end")
            n_moved = sum(len(one.moves) + one.n_begun for one in base.clients)
        phases = log.rows([*base.clients, *more.clients])
    late = sum(int(str(row["late"])) for row in phases)
    found = {"part": "scaling", "up s": up_s, "down s": down_s, "moved or ended": n_moved, "late": late}
    return {**found, "cpus": cpu_count(), "phases": phases}


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    model = () if args.model_path is None else ("--model-path", args.model_path)
    n_workers = args.gpus or 2
    slots = ("--max-sessions", str(args.max_sessions or args.sessions)) if args.max_sessions or not args.gpus else ()
    with LocalCluster(3, args.gpus, args.port) as cluster:
        if "start" in args.parts or "death" in args.parts:
            show(measure_start(cluster, n_workers, (*slots, *model)))
            if "death" in args.parts:
                show(asyncio.run(measure_death(cluster, n_workers, args.sessions, args.pace_s)))
                if not args.gpus:
                    cluster.add_node()
            cluster.command("down")
        if "steady" in args.parts and not args.gpus:
            cluster.up(3, "--max-sessions", str(N_SLOTS), *model)
            show(asyncio.run(measure_steady(cluster, args.pace_s)))
            cluster.command("down")
        if "scaling" in args.parts and not args.gpus:
            cluster.up(1, "--max-workers", "3", "--max-sessions", str(N_SLOTS), "--idle-s", "3", *model)
            show(asyncio.run(measure_scaling(cluster, args.pace_s)))
            cluster.command("down")
    return 0


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serve.ray_cluster", description="A cluster with Ray.")
    parser.add_argument("--pace-s", type=float, default=1.0, metavar="S", help="between two units; default: 1")
    parser.add_argument("--sessions", type=int, default=8, metavar="N", help="when a worker dies; default: 8")
    parser.add_argument("--parts", type=_parts, default=PARTS, metavar="NAME,...", help=f"default: {','.join(PARTS)}")
    parser.add_argument("--gpus", type=int, default=0, metavar="N", help="GPUs, with a worker each; default: 0")
    parser.add_argument("--model-path", metavar="DIR", help="checkpoint; default: that of the settings")
    parser.add_argument("--max-sessions", type=int, metavar="N", help="slots of a worker; default on GPUs: measured")
    parser.add_argument("--port", type=int, default=8006, metavar="N", help="of the first gateway; default: 8006")
    return parser


def _parts(text: str) -> tuple[str, ...]:
    parts = tuple(text.split(","))
    if unknown := [part for part in parts if part not in PARTS]:
        raise argparse.ArgumentTypeError(f"expected {', '.join(PARTS)}, got {unknown[0]}")
    return parts


def show(result: dict[str, object]) -> None:
    """Print a result as one line."""
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    sys.exit(main())
