"""`start_all.sh` as users run it: start, conversation, queue, stop.

All tests of this file share one start and run in this order. The last one ends it. A worker that starts compiled, from
the cache of `precompile.py`, is in tests/worker/http/test_life.py.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from clients.duplex import connect
from models.checkpoint.embedded import TINY
from tests.launcher.processes import free_ports
from tests.worker.http.client_scripts import QUIET, VIDEO, assert_audible, sound_of
from worker.protocol.gateway_messages import Queued, QueueUpdate
from worker.protocol.messages import Result

pytestmark = pytest.mark.slow
START_S, STOP_S, TALK_S = 240.0, 60.0, 120.0
N_SLOTS = 2


class StartAll:
    """`bash start_all.sh` on free ports. lines: its output. url: of the gateway."""

    def __init__(self, root: Path, folder: Path, config: dict[str, Any]):
        self.folder = folder
        command = ["bash", "start_all.sh", "--config", str(folder / "config.json"), "--log-dir", str(folder / "tmp")]
        self.process = subprocess.Popen(
            command,
            cwd=root,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.lines: list[str] = []
        self.url = f"http://localhost:{config['service']['gateway_port']}"
        self._ready = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            if line.startswith("ready: "):
                self._ready.set()
        self._ready.set()

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def wait_ready(self) -> None:
        is_ready = self._ready.wait(START_S)
        assert is_ready and self.process.poll() is None, f"expected a line with the URL, got:\n{self.output}"

    def ask(self, path: str) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.url}{path}", timeout=10) as answer:
            return json.load(answer)

    def wait_free(self, n: int) -> dict[str, Any]:
        until = time.monotonic() + 10
        while (status := self.ask("/status"))["slots"]["free"] != n:
            assert time.monotonic() < until, f"expected {n} free slots, got {status}"
            time.sleep(0.05)
        return status


@pytest.fixture(scope="module")
def started(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartAll]:
    """Everything started, without a compiled model."""
    folder = tmp_path_factory.mktemp("start_all")
    gateway_port, worker_port = free_ports(2)
    config = {
        "model": {"model_path": str(root / TINY)},
        "service": {
            "gateway_port": gateway_port,
            "worker_base_port": worker_port,
            "compile": False,
            "cache_dir": str(folder / "kernels"),
            "max_warmup_chunks": 2,
            "drain_timeout_s": 5,
        },
        "duplex": {"max_sessions": N_SLOTS},
    }
    (folder / "config.json").write_text(json.dumps(config))
    running = StartAll(root, folder, config)
    try:
        running.wait_ready()
        yield running
    finally:
        if running.process.poll() is None:
            os.killpg(running.process.pid, signal.SIGTERM)
            running.process.wait(STOP_S)


def test_client_gets_an_audible_reply(started: StartAll, root: Path, tmp_path: Path) -> None:
    out = tmp_path / "reply.wav"
    command = [sys.executable, "-m", "clients.talk", "--url", started.url.replace("http", "ws"), "--input", VIDEO]
    done = subprocess.run(
        [*map(str, command), "--out", str(out), "--units", "6", "--fast", "--tail", "0"],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=TALK_S,
    )
    assert done.returncode == 0, f"expected exit status 0, got {done.returncode}:\n{done.stdout}\n{done.stderr}"
    numbers = [unit["index"] for unit in json.loads(out.with_suffix(".json").read_text())["units"]]
    assert numbers == list(range(6)), f"expected one result for each of 6 units in order, got {numbers}"
    assert_audible(out)
    started.wait_free(N_SLOTS)


def test_waiting_sessions_are_served_in_order(started: StartAll) -> None:
    """Two sessions run, three wait: each gets its position, and then the slot that becomes free, in order."""
    positions_of: dict[int, list[tuple[str, int]]] = {number: [] for number in range(5)}
    served: list[int] = []

    async def talk(number: int, arrived: asyncio.Event, until: asyncio.Event | None) -> None:
        def place(message: Queued | QueueUpdate) -> None:
            positions_of[number].append((message.type, message.position))
            arrived.set()

        async with connect(started.url.replace("http", "ws"), f"omni_{number}", on_queue=place) as client:
            served.append(number)
            arrived.set()
            await client.prepare(config=QUIET)
            await client.send_unit(sound_of(number))
            result = await anext(client)
            assert isinstance(result, Result), f"expected a result, got {result!r}"
            if until is not None:
                await until.wait()
            await client.stop()

    async def all_of_them() -> None:
        all_here, others_done = asyncio.Event(), asyncio.Event()
        until = {0: all_here, 1: others_done}
        talks = []
        for number in positions_of:
            arrived = asyncio.Event()
            talks.append(asyncio.create_task(talk(number, arrived, until.get(number))))
            await asyncio.wait_for(arrived.wait(), 30)
        queue = await asyncio.to_thread(started.ask, "/api/queue")
        waiting = [item["session_id"] for item in queue["items"]]
        assert waiting == ["omni_2", "omni_3", "omni_4"], f"expected three waiting clients in order, got {waiting}"
        all_here.set()
        await asyncio.wait_for(asyncio.gather(talks[0], *talks[N_SLOTS:]), 60)
        others_done.set()
        await asyncio.wait_for(talks[1], 60)

    asyncio.run(all_of_them())
    assert served == [0, 1, 2, 3, 4], f"expected to be served in the order of arrival, got {served}"
    for number in range(N_SLOTS, 5):
        positions = [position for _, position in positions_of[number]]
        assert positions_of[number][0] == ("queued", number - N_SLOTS + 1), (
            f"client {number}: got {positions_of[number]}"
        )
        assert positions == sorted(positions, reverse=True), f"client {number}: expected to move up, got {positions}"
    status = started.wait_free(N_SLOTS)
    assert (status["queue_length"], status["running_tasks"]) == (0, []), status


def test_one_signal_stops_all_processes(started: StartAll) -> None:
    children = psutil.Process(started.process.pid).children(recursive=True)
    assert len(children) >= 2, f"expected a gateway and a worker, got {children}"
    started.process.send_signal(signal.SIGINT)
    status = started.process.wait(STOP_S)
    assert status == 0, f"expected exit status 0, got {status}:\n{started.output}"
    left = [process for process in children if process.is_running()]
    assert not left, f"expected no process left, got {left}"
    assert not list((started.folder / "tmp").glob("*.pid")), "expected no pid file"
