"""The served system of an evaluation: gateway and worker, started as a user starts them."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

from models.errors import ModelError

ROOT = Path(__file__).parents[2]
START_S, STOP_S, POLL_S = 600.0, 60.0, 0.1
SLOTS = 2


@dataclass(frozen=True)
class ServedSystem:
    """A running system. url: of the gateway. start_s: from the start of the program to its readiness."""

    url: str
    start_s: float


@contextmanager
def served(model: Path, work: Path) -> Iterator[ServedSystem]:
    """Start a gateway and a worker with a checkpoint; both end with the context.

    Args:
        work: folder for logs and data.
    Raises: ModelError if they do not become ready.
    """
    work.mkdir(parents=True, exist_ok=True)
    gateway, worker = _free_port(), _free_port()
    command = [sys.executable, "-m", "launcher", "--http", "--port", str(gateway), "--worker-base-port", str(worker)]
    command += ["--model-path", str(model.resolve()), "--num-workers", "1", "--max-sessions", str(SLOTS)]
    command += ["--log-dir", str(work / "logs")]
    environ = {**os.environ, "DUOLOGUE_SERVICE_DATA_DIR": str(work / "data")}
    begun = time.monotonic()
    with (work / "launcher.log").open("w") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            _wait_ready(process, gateway, work / "launcher.log")
            yield ServedSystem(f"ws://127.0.0.1:{gateway}", time.monotonic() - begun)
        finally:
            process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)
            process.kill()
            process.wait()


def _wait_ready(process: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end and process.poll() is None:
        with suppress(httpx.HTTPError):
            if httpx.get(f"http://127.0.0.1:{port}/readyz", trust_env=False).status_code == httpx.codes.OK:
                return
        time.sleep(POLL_S)
    last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-3:]
    raise ModelError("python -m launcher", expected="a gateway with a ready worker", got=" ".join(last) or "no log")


def _free_port() -> int:
    with closing(socket.create_server(("127.0.0.1", 0))) as one:
        port: int = one.getsockname()[1]
        return port
