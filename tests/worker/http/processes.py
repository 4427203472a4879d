"""A real worker process on a free port, which runs the embedded checkpoint on the CPU with one thread."""

import json
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

from models.checkpoint.embedded import TINY
from tests.programs.start import start

ROOT = Path(__file__).parents[3]
# Generous limits for a loaded machine with two slow cores; exceeding them means a hang.
START_S, ANSWER_S, STOP_S = 240.0, 60.0, 60.0
POLL_S = 0.05
LISTENING = "listening on "


class WorkerProcess:
    """`python -m worker.main` on a free port.

    Attributes:
        process: the process.
        lines: the lines of its log so far.
        port: its port; 0 before it listens.
    """

    def __init__(
        self,
        folder: Path,
        *flags: str,
        config: Mapping[str, Any] | None = None,
        environ: Mapping[str, str] = {},
        program: str = "worker.main",
    ):
        """folder: for its settings, caches and data. config: content of the settings file. program: a module."""
        path = folder / "config.json"
        given = dict(config or {})
        given["model"] = {"model_path": str(ROOT / TINY), **given.get("model", {})}
        path.write_text(json.dumps(given), encoding="utf-8")
        own = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled"), "DUOLOGUE_SERVICE_DATA_DIR": str(folder / "data")}
        arguments = ["--port", "0", "--config", str(path), "--device", "cpu", *flags]
        self.process = start(program, arguments, {**own, **environ})
        self.port = 0
        self.lines: list[str] = []
        self._listens = threading.Event()
        self._reader = threading.Thread(target=self._read, name="worker-log", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            if not self.port and LISTENING in line:
                self.port = int(line.rpartition(":")[2])
                self._listens.set()
        self._listens.set()  # the process has ended

    @property
    def log(self) -> str:
        return "\n".join(self.lines)

    def wait_listening(self, timeout: float = START_S) -> Self:
        assert self._listens.wait(timeout) and self.port, f"expected a worker that listens, got:\n{self.log}"
        return self

    def wait_state(self, *states: str, timeout: float = START_S) -> dict[str, Any]:
        """Wait until /health reports one of `states`. Returns: its body."""
        self.wait_listening(timeout)
        return self.wait_health(lambda body: body["state"] in states, f"state {' or '.join(states)}", timeout)

    def wait_health(self, fits: Any, what: str, timeout: float = ANSWER_S) -> dict[str, Any]:
        """Wait until `fits(body)` is true for the body of /health. Returns: the body."""
        body, until = None, time.monotonic() + timeout
        while time.monotonic() < until:
            assert self.process.poll() is None, (
                f"expected {what}, got exit status {self.process.returncode}\n{self.log}"
            )
            with suppress(urllib.error.URLError, ConnectionError):
                body = self.health()
                if fits(body):
                    return body
            time.sleep(POLL_S)
        raise AssertionError(f"expected {what} within {timeout:g} s, got {body}\n{self.log}")

    def wait_free(self, n: int, timeout: float = ANSWER_S) -> dict[str, Any]:
        """Wait until `n` slots are free."""
        return self.wait_health(lambda body: body["slots"]["free"] == n, f"{n} free slots", timeout)

    def wait_idle(self, n: int, timeout: float = ANSWER_S) -> dict[str, Any]:
        """Wait until `n` slots are free and the status is that of a worker without sessions."""
        return self.wait_health(
            lambda body: body["slots"]["free"] == n and body["worker_status"] == "idle", f"idle with {n} slots", timeout
        )

    def health(self) -> dict[str, Any]:
        return self.ask("/health")[1]

    def ask(self, path: str, *, post: Any = None, timeout: float = ANSWER_S) -> tuple[int, Any]:
        """Send a GET, or a POST with `post` as JSON. Returns: the status, and the body as JSON or text."""
        data = None if post is None else json.dumps(post).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data)
        request.add_header("Content-Type", "application/json")
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                status, body = answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                status, body = error.code, error.read().decode()
        with suppress(ValueError):
            return status, json.loads(body)
        return status, body

    def stop(self, number: int = signal.SIGTERM, timeout: float = STOP_S) -> int:
        """Send a signal and wait for the end. Returns: the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.wait(timeout)

    def wait(self, timeout: float = STOP_S) -> int:
        """Wait until the process ends by itself. Returns: the exit status."""
        status = self.process.wait(timeout)
        self._reader.join(timeout)
        return status

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join()
        self.process.stdout.close()


@contextmanager
def running(folder: Path, *flags: str, until: str | None = "IDLE", **options: Any) -> Iterator[WorkerProcess]:
    """A worker that is killed on exit. until: the state to wait for; None: do not wait."""
    worker = WorkerProcess(folder, *flags, **options)
    try:
        if until is not None:
            worker.wait_state(until)
        yield worker
    finally:
        worker.kill()
