"""An authority, two gateways and a worker as processes that are killed.

Excluded without the extra `cluster`: `python -m pytest -m cluster tests/server/cluster/test_processes.py`.
"""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.launcher.processes import free_ports
from tests.server.live_gateway import Client, connect_to, run

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
AWAY_S = 10.0


@contextmanager
def programs() -> Iterator[dict[str, list[subprocess.Popen[bytes]]]]:
    """Processes by name, which end with the context."""
    running: dict[str, list[subprocess.Popen[bytes]]] = {}
    try:
        yield running
    finally:
        for one in (one for started in running.values() for one in started):
            one.kill()
            one.wait()


def test_sessions_outlive_a_killed_authority_and_slots_of_a_killed_gateway_are_given_again(
    root: Path, tmp_path: Path
) -> None:
    authority_port, worker_port, *gateway_ports = free_ports(4)
    environ = {**os.environ, "DUOLOGUE_WORKER_SECRET": "of this test", "DUOLOGUE_SERVICE_DATA_DIR": str(tmp_path)}
    authority = ("server.cluster", "--port", str(authority_port), "--state", str(tmp_path / "state"))

    async def scenario() -> None:
        with programs() as running:

            def start(name: str, *arguments: str) -> None:
                command = [sys.executable, "-m", *arguments]
                with (tmp_path / f"{name}.log").open("ab") as log:
                    started = subprocess.Popen(command, cwd=root, env=environ, stdout=log, stderr=log)
                running.setdefault(name, []).append(started)

            start("worker", "benchmarks.serve.fake_worker", "--port", str(worker_port), "--slots", "2")
            start("authority", *authority, "--workers", f"127.0.0.1:{worker_port}")
            for number, port in enumerate(gateway_ports):
                name, address = f"g{number}", f"127.0.0.1:{authority_port}"
                options = ("--gateway-name", name, "--log-dir", str(tmp_path))
                start(name, "server.main", "--port", str(port), "--authority", address, *options)

            async def connect(port: int, name: str) -> Client:
                async with asyncio.timeout(120):
                    while True:
                        try:
                            return await connect_to(port, name)
                        except OSError:
                            await asyncio.sleep(0.2)

            clients = [await (await connect(port, f"omni_{port}")).prepared() for port in gateway_ports]
            waiting = await connect(gateway_ports[1], "omni_waiting")
            await waiting.receive("queued")
            running["authority"][-1].kill()
            until = time.monotonic() + AWAY_S
            while time.monotonic() < until:
                for client in clients:
                    await client.unit()
                await asyncio.sleep(0.5)
            start("authority", *authority)
            running["g0"][-1].kill()
            async with asyncio.timeout(120):  # its lease expires, or is never claimed again
                await waiting.with_slot()
            await clients[1].unit()

    run(scenario)
