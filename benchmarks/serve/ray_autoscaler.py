"""Ray's autoscaler with a cluster on one machine: nodes that it adds for workers.

    python -m benchmarks.serve.ray_autoscaler

Starts a head without room for workers, and Ray's autoscaler, whose nodes are processes on this machine with room for
one worker each. One live session uses the only slot of the first worker, so a second worker and its node are added;
after the session has ended, the worker is removed, and Ray removes the node that is then idle. Needs the extra
`cluster`. At the end it kills the processes of this cluster, and of no other one on the machine.

Prints one JSON object.
"""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from benchmarks.chaos.clients import LiveGroup
from benchmarks.serve.ray_cluster import ON_CPU, WORKER, n_late, until
from launcher.cluster.ray_placement import NAMESPACE, find_controller, load_ray
from models.checkpoint.embedded import TINY
from worker.config.service import ROOT

PORT, HEAD = 18_006, "ray.head.default"
IDLE_MINUTES = 0.1  # after which Ray removes a node that nothing uses


def command(*arguments: str) -> None:
    """Run `python -m launcher.cluster` with the Ray of this machine."""
    subprocess.run([sys.executable, "-m", "launcher.cluster", *arguments], cwd=ROOT, check=True, stdout=sys.stderr)


def worker_nodes(ray: Any) -> int:
    """Nodes that are alive, besides the head."""
    return sum(node["Alive"] and WORKER in node["Resources"] for node in ray.nodes())


def ready(ray: Any) -> int:
    """Workers that accept sessions."""
    workers = ray.get(find_controller(ray).describe.remote())["workers"]
    return sum(bool(one.get("is_ready")) and not one["is_draining"] for one in workers)


async def measure(ray: Any) -> dict[str, object]:
    """A session comes and goes."""
    found: dict[str, object] = {"part": "autoscaler", "nodes at first": worker_nodes(ray)}

    async def timed(name: str, holds: Callable[[], bool]) -> None:
        found[name] = await until(holds, name)
        print(json.dumps({name: found[name]}), file=sys.stderr, flush=True)

    async with LiveGroup([f"ws://127.0.0.1:{PORT}"], "autoscaler", 1.0) as group:
        await timed("second node s", lambda: worker_nodes(ray) == 2)
        await timed("second worker s", lambda: ready(ray) == 2)
        [client] = group.clients
        await until(lambda: client.n_answered >= 10, "units of the session")
        found |= {"units": client.n_answered, "late": n_late(group.clients), "moved": len(client.moves)}
    await timed("one worker s", lambda: ready(ray) == 1)
    await timed("one node s", lambda: worker_nodes(ray) == 1)
    return {**found, "nodes then": worker_nodes(ray), "workers then": ready(ray)}


class AutoscaledRay:
    """A head with Ray's autoscaler, as a context. Its provider of nodes starts them as processes on this machine."""

    def __init__(self, folder: Path):
        head: dict[str, Any] = {"resources": {"CPU": 1}, "node_config": {}, "max_workers": 0}
        node = {"resources": {"CPU": 1, WORKER: 1}, "node_config": {}, "min_workers": 0, "max_workers": 2}
        commands = ("initialization", "setup", "head_setup", "worker_setup", "head_start_ray", "worker_start_ray")
        self._folder = folder / "ray"  # stands in the commands of all of its nodes
        self._config = folder / "autoscaler.json"
        self._config.write_text(
            json.dumps(
                {
                    "cluster_name": "local",
                    "max_workers": 2,
                    "upscaling_speed": 1.0,
                    "idle_timeout_minutes": IDLE_MINUTES,
                    "provider": {
                        "type": "fake_multinode",
                        "disable_node_updaters": True,  # nothing is installed on a node
                        "disable_launch_config_check": True,
                        # All nodes have one address here: without this, Ray takes them for one node.
                        "use_node_id_as_ip": True,
                    },
                    "available_node_types": {HEAD: head, "worker": node},
                    "head_node_type": HEAD,
                    **{name: {} for name in ("auth", "docker", "file_mounts")},
                    **{f"{name}_commands": [] for name in commands},
                    **{name: [] for name in ("cluster_synced_files", "rsync_exclude", "rsync_filter")},
                }
            )
        )
        self._ray = str(Path(sys.executable).with_name("ray"))

    def __enter__(self) -> "AutoscaledRay":
        environ = {"AUTOSCALER_UPDATE_INTERVAL_S": "1", "RAY_FAKE_CLUSTER": "1", "RAY_worker_niceness": "0"}
        files = (f"--autoscaling-config={self._config}", f"--temp-dir={self._folder}")
        where = ("--head", "--num-cpus=1", "--num-gpus=0", *files)
        subprocess.run([self._ray, "start", *where], check=True, stdout=sys.stderr, env={**os.environ, **environ})
        return self

    def __exit__(self, *_: object) -> None:
        own = [one for one in psutil.process_iter() if self._is_own(one)]
        for one in list(own):
            with suppress(psutil.NoSuchProcess):
                own += one.children(recursive=True)
        for one in own:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        psutil.wait_procs(own, timeout=10)

    def _is_own(self, process: psutil.Process) -> bool:
        try:
            return any(str(self._folder) in part for part in process.cmdline())
        except psutil.Error:
            return False


def main() -> int:
    with tempfile.TemporaryDirectory() as folder, AutoscaledRay(Path(folder)):
        config = Path(folder) / "config.json"
        service = {"gateway_port": PORT, "data_dir": folder}
        config.write_text(json.dumps({"model": {"model_path": str(ROOT / TINY)}, "service": service}))
        limits = ("--min-workers", "1", "--max-workers", "2", "--max-sessions", "1", "--idle-s", "3")
        begun = time.monotonic()
        command("up", "--config", str(config), *limits, *ON_CPU)
        up_s = round(time.monotonic() - begun, 2)
        ray = load_ray()
        ray.init(address="auto", namespace=NAMESPACE, log_to_driver=False, configure_logging=False)
        print(json.dumps({"up s": up_s, **asyncio.run(measure(ray))}), flush=True)
        command("down")
        ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
