"""Test servers: a worker without a model on a thread, and a gateway process in front of it."""

import asyncio
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.serve.fake_worker import FakeWorker
from worker.config.service import ROOT

START_S, STOP_S = 60.0, 30.0
LISTENS, READY = "listening on", "is ready"


class FakeWorkerThread:
    """A FakeWorker and its event loop. url: its address for clients."""

    def __init__(self, worker: FakeWorker, loop: asyncio.AbstractEventLoop, scheme: str):
        self.worker, self._loop = worker, loop
        self.url = f"{scheme}://127.0.0.1:{worker.port}/ws/duplex"

    def call(self, function: Callable[[], Any]) -> Any:
        """Call a function on the worker's thread. Returns: its result."""

        async def call() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(call(), self._loop).result(START_S)


@contextmanager
def fake_worker(**options: Any) -> Iterator[FakeWorkerThread]:
    """A listening worker, until the end of the block."""
    ready, threads, over = threading.Event(), [], asyncio.Event()

    async def live() -> None:
        async with FakeWorker(**options) as worker:
            scheme = "wss" if "tls" in options else "ws"
            threads.append(FakeWorkerThread(worker, asyncio.get_running_loop(), scheme))
            ready.set()
            await over.wait()

    thread = threading.Thread(target=lambda: asyncio.run(live()), daemon=True)
    thread.start()
    assert ready.wait(START_S), "expected a worker that listens"
    try:
        yield threads[0]
    finally:
        threads[0].call(over.set)
        thread.join(STOP_S)


@contextmanager
def gateway(*ports: int) -> Iterator[str]:
    """A gateway in front of ready workers on these ports. Yields: its address."""
    workers = ",".join(f"127.0.0.1:{port}" for port in ports)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "server.main", "--port", str(port), "--workers", workers]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        timer = threading.Timer(START_S, process.kill)
        timer.start()
        try:
            lines = []
            while sum(LISTENS in line for line in lines) < 1 or sum(READY in line for line in lines) < len(ports):
                lines.append(process.stderr.readline())
                assert lines[-1], f"expected a gateway that listens, got:\n{''.join(lines)}"
            timer.cancel()
            reader = threading.Thread(target=process.stderr.read, daemon=True)  # a full pipe would stop it
            reader.start()
            yield f"ws://127.0.0.1:{port}"
        finally:
            timer.cancel()
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
