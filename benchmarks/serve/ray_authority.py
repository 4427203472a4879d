"""Deaths of the authority of a cluster with Ray: how long nothing is assigned, and what is left afterwards.

    python -m benchmarks.serve.ray_authority [--pace-s 1]

Two gateways, one worker with two slots, two live sessions and a waiting client on one machine. SIGKILL ends, one after
the other, the authority's process, its actor, and its actor together with the controller's. Each result has the
seconds until the authority answers and until it assigns slots (`/readyz`), what started it again, its terms, leases
and tickets before and after, and the units that were late. Needs the extra `cluster`. Prints one JSON object for each
death.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Callable, Sequence

import httpx
import psutil
import websockets

from benchmarks.chaos.clients import ChaosClient, LiveGroup
from benchmarks.serve.ray_cluster import LocalCluster, n_late, show, until

AUTHORITY, CONTROLLER = "server.cluster", "ray::ControllerActor"
N_SLOTS, N_MORE_UNITS = 2, 5


def authority_of(cluster: LocalCluster) -> psutil.Process:
    """The authority's process; another cluster may run beside this one."""
    folder = str(cluster.config.parent)
    return next(one for one in psutil.process_iter() if _has(one, AUTHORITY) and _has(one, folder))


def _has(process: psutil.Process, text: str) -> bool:
    try:
        return any(part.startswith(text) for part in process.cmdline())
    except psutil.Error:
        return False


def parent_of(process: psutil.Process) -> psutil.Process:
    """The process that started it."""
    found = process.parent()
    assert found is not None, f"expected a parent of process {process.pid}, got none"
    return found


def kill_program(cluster: LocalCluster) -> None:
    """End the authority's process."""
    authority_of(cluster).kill()


def kill_actor(cluster: LocalCluster) -> None:
    """End the actor of the authority, and with it the authority."""
    parent_of(authority_of(cluster)).kill()


def kill_both(cluster: LocalCluster) -> None:
    """End the controller's actor and that of the authority."""
    actor = parent_of(authority_of(cluster))
    controller = next(one for one in parent_of(actor).children() if _has(one, CONTROLLER))
    actor.kill()
    controller.kill()


Kill = Callable[[LocalCluster], None]
DEATHS: dict[str, Kill] = {"program": kill_program, "actor": kill_actor, "actor, controller": kill_both}


async def measure(name: str, cluster: LocalCluster, url: str, clients: Sequence[ChaosClient]) -> dict[str, object]:
    """One death under live sessions. url: of the authority."""
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=1.0) as http:
        before = (await http.get("/health")).json()
        ended_before = (await asyncio.to_thread(cluster.state))["authority"]["last_end"]
        late_before, moves_before = n_late(list(clients)), _n_moves(clients)
        DEATHS[name](cluster)
        at, answered_s = time.monotonic(), 0.0
        while True:
            await asyncio.sleep(0.05)
            try:
                health = (await http.get("/health")).json()
            except httpx.HTTPError:
                continue
            if health["term"] == before["term"]:
                continue
            answered_s = answered_s or time.monotonic() - at
            if (await http.get("/readyz")).status_code == 200:
                break
        ready_s = time.monotonic() - at
        await until(lambda: all(_n_since(one, at) >= N_MORE_UNITS for one in clients), "more units of each session")
        after = (await http.get("/health")).json()
        ended = (await asyncio.to_thread(cluster.state))["authority"]["last_end"]
    return {
        **{"killed": name, "answers after s": round(answered_s, 2), "assigns after s": round(ready_s, 2)},
        "started again by": "Ray" if ended in ("", ended_before) else "the controller",
        "terms": [before["term"], after["term"]],
        **{key: [before[key], after[key]] for key in ("leases", "queue_length", "n_ready")},
        **{"late": n_late(list(clients)) - late_before, "moved or ended": _n_moves(clients) - moves_before},
    }


def _n_since(client: ChaosClient, at: float) -> int:
    """Units that were sent since then and are answered."""
    return sum(unit.fingerprint is not None and unit.sent_at > at for unit in client.units)


def _n_moves(clients: Sequence[ChaosClient]) -> int:
    return sum(len(one.moves) + one.n_begun for one in clients)


async def wait(url: str) -> None:
    """A client that waits for a slot."""
    async with websockets.connect(url, close_timeout=2) as socket:
        async for _ in socket:
            pass


async def run(cluster: LocalCluster, pace_s: float) -> None:
    """All deaths."""
    url = f"http://{cluster.state()['authority']['address']}"
    async with LiveGroup(cluster.urls[:1] * N_SLOTS, "authority", pace_s) as group:
        waiting = asyncio.create_task(wait(f"{cluster.urls[0]}/ws/duplex/adx_waiting"), name="waiting client")
        async with httpx.AsyncClient(base_url=url, trust_env=False) as http:
            while (await http.get("/health")).json()["queue_length"] == 0:
                await asyncio.sleep(0.1)
        for name in DEATHS:
            show(await measure(name, cluster, url, group.clients))
            await asyncio.sleep(5 * pace_s)
        waiting.cancel()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serve.ray_authority", description="Authority with Ray.")
    parser.add_argument("--pace-s", type=float, default=1.0, metavar="S", help="between two units; default: 1")
    parser.add_argument("--port", type=int, default=8006, metavar="N", help="of the first gateway; default: 8006")
    args = parser.parse_args(argv)
    with LocalCluster(1, 0, args.port) as cluster:
        cluster.up(1, "--max-sessions", str(N_SLOTS))
        asyncio.run(run(cluster, args.pace_s))
        cluster.command("down")
    return 0


if __name__ == "__main__":
    sys.exit(main())
