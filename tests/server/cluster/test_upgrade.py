"""All parts of a cluster are replaced one by one, in the order of docs/cluster.md, under live sessions.

Excluded without the extra `cluster`: `python -m pytest -m cluster tests/server/cluster/test_upgrade.py`.
"""

import asyncio
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.chaos.clients import LiveGroup
from tests.launcher.processes import free_ports
from tests.server.cluster.test_processes import programs
from tests.server.live_gateway import run

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(600)]
PATIENCE_S, PACE_S, N_UNITS = 180.0, 2.0, 3  # two real workers share the cores
SECRET = "of this test"


async def until(holds: Callable[[], Awaitable[object]], what: str) -> None:
    """Wait for a condition, which may fail while a process is away."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    if await holds():
                        return
                except httpx.HTTPError:
                    pass
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise AssertionError(f"expected {what} within {PATIENCE_S:g} s") from None


def test_every_part_is_replaced_and_no_session_ends(root: Path, tmp_path: Path) -> None:
    authority_port, *ports = free_ports(5)
    workers = {f"w{number}": f"127.0.0.1:{port}" for number, port in enumerate(ports[:2])}
    gateways = {f"g{number}": port for number, port in enumerate(ports[2:])}
    environ = {
        **os.environ,
        "DUOLOGUE_WORKER_SECRET": SECRET,
        "DUOLOGUE_SERVICE_DATA_DIR": str(tmp_path),
        "DUOLOGUE_SERVICE_DRAIN_TIMEOUT_S": "1",
    }
    arguments = {
        **{
            name: ("worker.main", "--port", address.rpartition(":")[2], "--max-sessions", "2", "--no-compile")
            for name, address in workers.items()
        },
        "authority": ("server.cluster", "--port", str(authority_port), "--state", str(tmp_path / "state")),
        **{
            name: (
                *("server.main", "--port", str(port), "--authority", f"127.0.0.1:{authority_port}"),
                *("--gateway-name", name, "--log-dir", str(tmp_path)),
            )
            for name, port in gateways.items()
        },
    }

    async def scenario() -> None:
        headers = {"x-duologue-worker-secret": SECRET}
        url = f"http://127.0.0.1:{authority_port}"
        with programs() as running:
            async with httpx.AsyncClient(base_url=url, headers=headers, trust_env=False, timeout=2.0) as http:

                def start(name: str) -> None:
                    with (tmp_path / f"{name}.log").open("ab") as log:
                        command = [sys.executable, "-m", *arguments[name]]
                        started = subprocess.Popen(command, cwd=root, env=environ, stdout=log, stderr=log)
                    running.setdefault(name, []).append(started)

                async def replace(name: str) -> None:
                    running[name][-1].terminate()
                    assert await asyncio.to_thread(running[name][-1].wait, PATIENCE_S) == 0, (
                        f"{name}: expected status 0"
                    )
                    start(name)

                async def worker(name: str) -> dict[str, Any]:
                    listed = (await http.get("/workers")).json()["workers"]
                    found: dict[str, Any] = next(one for one in listed if one["address"] == workers[name])
                    return found

                async def is_ready(name: str) -> bool:
                    return bool((await worker(name))["is_ready"])

                async def is_empty(name: str) -> bool:
                    found = await worker(name)
                    return not (found["leases"] or found["others"] or found["is_unsure"])

                async def register(name: str) -> bool:
                    return (await http.put(f"/workers/{workers[name]}")).is_success

                async def gateway_is_ready(name: str) -> bool:
                    return (await http.get(f"http://127.0.0.1:{gateways[name]}/readyz")).is_success

                for name in arguments:
                    start(name)
                for name in workers:
                    await until(lambda name=name: register(name), "the authority")
                    await until(lambda name=name: is_ready(name), "a worker")
                for name in gateways:
                    await until(lambda name=name: gateway_is_ready(name), "a gateway")

                urls = [f"ws://127.0.0.1:{port}" for port in gateways.values()]
                async with LiveGroup(urls, "upgrade", PACE_S) as group:

                    async def go_on() -> None:
                        counts = [one.n_answered + N_UNITS for one in group.clients]

                        async def have_units() -> bool:
                            return all(one.n_answered >= n for one, n in zip(group.clients, counts, strict=True))

                        await until(have_units, "units of all sessions")

                    await go_on()
                    for name in workers:
                        assert (await http.post(f"/workers/{workers[name]}")).is_success
                        await until(lambda name=name: is_empty(name), "no session at a worker that drains")
                        await replace(name)
                        assert await register(name)
                        await until(lambda name=name: is_ready(name), "the new worker")
                        await go_on()
                    await replace("authority")
                    await go_on()
                    for name in gateways:
                        await replace(name)
                        await until(lambda name=name: gateway_is_ready(name), "the new gateway")
                        await go_on()
                    ended = {one.name: one.n_begun for one in group.clients if one.n_begun}
                    assert not ended, f"expected every session to go on, got new ones: {ended}"
                    assert sum(len(one.moves) for one in group.clients) >= 2, "expected moves from drained workers"

    run(scenario)
