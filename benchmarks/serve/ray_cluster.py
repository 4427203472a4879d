"""A cluster of several Ray nodes on this machine, with the embedded model on the CPU: start, loss of a node, scaling.

    python -m benchmarks.serve.ray_cluster [--pace-s 1] [--sessions 8]

Needs the extra `cluster`. Prints one JSON object for each part.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import psutil

from benchmarks.chaos.clients import ChaosClient, LiveGroup
from launcher.cluster.ray_placement import NAMESPACE, find_controller, load_ray
from worker.config.service import ROOT

WORKER = "tiny_worker"  # the resource that a worker takes
WAIT_S = 180.0
UP = ("--gpus-per-worker", "0", "--resource", WORKER, "--no-compile")


class LocalCluster:
    """Ray nodes on this machine, as a context. n_nodes: besides the head, with room for one worker each."""

    def __init__(self, n_nodes: int):
        from ray.cluster_utils import Cluster

        self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 0})
        self.nodes = {}
        for _ in range(n_nodes):
            node = self.cluster.add_node(num_cpus=1, resources={WORKER: 1})
            self.nodes[node.node_id] = node
        self._ray = load_ray()
        self._ray.init(address=self.cluster.address, namespace=NAMESPACE, log_to_driver=False, configure_logging=False)

    def __enter__(self) -> "LocalCluster":
        return self

    def __exit__(self, *_: object) -> None:
        self._ray.shutdown()
        self.cluster.shutdown()

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

    def kill_node(self, worker: dict[str, Any]) -> None:
        """Kill a worker's process and its whole node with SIGKILL."""
        port = int(worker["address"].rpartition(":")[2])
        for process in psutil.process_iter():
            if str(port) in process.cmdline() and "worker.main" in process.cmdline():
                process.kill()
        self.cluster.remove_node(self.nodes.pop(worker["node"]), allow_graceful=False)


async def until(holds: Callable[[], bool], what: str) -> float:
    """Wait for a condition. Returns: seconds."""
    begun = time.monotonic()
    while not await asyncio.to_thread(holds):
        assert time.monotonic() - begun < WAIT_S, f"expected {what} within {WAIT_S:g} s"
        await asyncio.sleep(0.1)
    return round(time.monotonic() - begun, 2)


def n_late(clients: list[ChaosClient]) -> int:
    """Units with a late result or none."""
    return sum(unit.is_late or bool(unit.error) for client in clients for unit in client.units)


def measure_start(cluster: LocalCluster) -> dict[str, object]:
    """One gateway and two workers, from the command to two ready workers."""
    begun = time.monotonic()
    cluster.command("up", "--min-workers", "2", "--gateways", "2", "--max-sessions", "8", *UP)
    return {"part": "start", "gateways": 2, "workers": 2, "seconds": round(time.monotonic() - begun, 2)}


async def measure_death(cluster: LocalCluster, n_sessions: int, pace_s: float) -> dict[str, object]:
    """Live sessions at two gateways; the node of one worker is killed."""
    urls = [f"ws://127.0.0.1:{8006 + number % 2}" for number in range(n_sessions)]
    async with LiveGroup(urls, "death", pace_s) as group:
        await until(lambda: all(one.n_answered >= 2 for one in group.clients), "two units of each session")
        workers = await asyncio.to_thread(cluster.ready)
        killed = max(workers, key=lambda one: one["leases"])
        await asyncio.to_thread(cluster.kill_node, killed)
        at = time.monotonic()

        def goes_on(client: ChaosClient) -> bool:
            return sum(unit.fingerprint is not None and unit.sent_at > at for unit in client.units) >= 2

        resumed_s = await until(lambda: all(goes_on(one) for one in group.clients), "two more units of each session")
        n_moved = sum(len(one.moves) for one in group.clients)
        n_ended = sum(one.n_begun for one in group.clients)
    replaced_s = await until(lambda: len(cluster.ready()) == 2, "another worker on another node")
    return {
        **{"part": "node killed", "sessions": n_sessions, "of the killed worker": killed["leases"]},
        **{"moved": n_moved, "ended": n_ended, "two units later after s": resumed_s, "replaced after s": replaced_s},
    }


async def measure_scaling(cluster: LocalCluster, pace_s: float) -> dict[str, object]:
    """Sessions on one worker, which more sessions join and leave: one worker, three, and one again."""
    url = "ws://127.0.0.1:8006"
    async with LiveGroup([url] * 2, "base", pace_s) as base:
        await until(lambda: all(one.n_answered >= 5 for one in base.clients), "units at one worker")
        n_before, late_before = sum(one.n_answered for one in base.clients), n_late(base.clients)
        async with LiveGroup([url] * 4, "more", pace_s) as more:
            up_s = await until(lambda: len(cluster.ready()) == 3, "three workers")
            await until(lambda: all(one.n_answered >= 3 for one in more.clients), "units at three workers")
        down_s = await until(lambda: len(cluster.state()["workers"]) == 1, "one worker")
        n_after, late_after = sum(one.n_answered for one in base.clients), n_late(base.clients)
        n_moved = sum(len(one.moves) + one.n_begun for one in base.clients)
    return {
        **{"part": "scaling", "up s": up_s, "down s": down_s, "moved or ended": n_moved},
        **{"units before": n_before, "late before": late_before},
        **{"units while scaling": n_after - n_before, "late while scaling": late_after - late_before},
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serve.ray_cluster", description="A cluster with Ray.")
    parser.add_argument("--pace-s", type=float, default=1.0, metavar="S", help="between two units; default: 1")
    parser.add_argument("--sessions", type=int, default=8, metavar="N", help="default: 8")
    args = parser.parse_args(argv)
    with LocalCluster(3) as cluster:
        print(json.dumps(measure_start(cluster)), flush=True)
        print(json.dumps(asyncio.run(measure_death(cluster, args.sessions, args.pace_s))), flush=True)
        cluster.command("down")
        node = cluster.cluster.add_node(num_cpus=1, resources={WORKER: 1})
        cluster.nodes[node.node_id] = node
        cluster.command("up", "--min-workers", "1", "--max-workers", "3", "--max-sessions", "3", "--idle-s", "3", *UP)
        print(json.dumps(asyncio.run(measure_scaling(cluster, args.pace_s))), flush=True)
        cluster.command("down")
    return 0


if __name__ == "__main__":
    sys.exit(main())
