"""Server processes under load: start, CPU and memory sampling, and clients in another process.

The benchmark itself is in `__main__`.
"""

import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import httpx
import psutil

from benchmarks.serve.clients import Load

ROOT = Path(__file__).resolve().parents[2]
LISTENING = re.compile(r"listening on (?:\w+://)?([0-9.]+):([0-9]+)")
START_S, STOP_S, POLL_S = 900.0, 60.0, 0.05
SAMPLE_S, FULL_EVERY = 0.5, 10  # interval of memory samples


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return one.getsockname()[1]


class ServedProgram:
    """`with ServedProgram("worker.main", ...) as worker:` starts a process and waits until it listens.

    port: its port. process: its psutil handle.
    """

    def __init__(self, module: str, *arguments: str, environ: Mapping[str, str] = {}):
        self._command = [sys.executable, "-m", module, *arguments]
        self._environ = {**os.environ, **environ}
        self.name = module

    def __enter__(self) -> Self:
        self._log = tempfile.NamedTemporaryFile("w+", suffix=".log")
        self._popen = subprocess.Popen(self._command, cwd=ROOT, env=self._environ, stderr=self._log)
        self.process = psutil.Process(self._popen.pid)
        try:
            self._until(lambda: (found := LISTENING.search(self.log)) and setattr(self, "port", int(found[2])) is None)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._popen.poll() is None:
            self._popen.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._popen.wait(STOP_S)
        self._popen.kill()
        self._popen.wait()
        self._log.close()

    @property
    def log(self) -> str:
        return Path(self._log.name).read_text(encoding="utf-8", errors="replace")

    def wait_ready(self, path: str = "/health", **fields: object) -> dict[str, Any]:
        """Poll until the JSON response has these fields. Returns: the response."""
        answer: dict[str, Any] = {}

        def has_fields() -> bool:
            with suppress(httpx.HTTPError, ValueError):
                answer.update(httpx.get(f"http://127.0.0.1:{self.port}{path}", trust_env=False, verify=False).json())
            return fields.items() <= answer.items()

        self._until(has_fields)
        return answer

    def wait_log(self, words: str) -> None:
        """Wait until the log contains `words`."""
        self._until(lambda: words in self.log)

    def text(self, path: str) -> str:
        """Body of a GET request."""
        return httpx.get(f"http://127.0.0.1:{self.port}{path}", trust_env=False, verify=False).text

    def cpu_s(self) -> float:
        """CPU seconds since the start."""
        times = self.process.cpu_times()
        return times.user + times.system

    def memory(self, *, full: bool) -> dict[str, int]:
        """Resident bytes; with `full` also the proportional set size, whose computation stops the process."""
        if not full:
            return {"rss": self.process.memory_info().rss}
        info = self.process.memory_full_info()
        return {"rss": info.rss, "pss": getattr(info, "pss", 0)}

    def _until(self, condition: Any) -> None:
        end = time.monotonic() + START_S
        while not condition():
            if self._popen.poll() is not None or time.monotonic() > end:
                last = self.log.strip().splitlines()[-1:]
                raise RuntimeError(f"{self.name}: expected it to start, got {last}, status {self._popen.poll()}")
            time.sleep(POLL_S)


def other_cpu_s(programs: Sequence[ServedProgram]) -> float:
    """CPU seconds of all programs since the machine's start, without those of `programs` and of this process."""
    times, own = psutil.cpu_times(), time.process_time() + sum(program.cpu_s() for program in programs)
    return float(times.user + times.nice + times.system - own)


@dataclass
class Watched:
    """A program under load. cpu_s: CPU seconds within `wall_s`. peak: peak bytes by kind."""

    cpu_s: float = 0.0
    peak: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class ServeOutcome:
    """Units as clients measured them, and the cost. watched: by the program's name."""

    units: list[dict[str, Any]]
    wall_s: float
    watched: dict[str, Watched]


def put_under(load: Load, programs: Sequence[ServedProgram]) -> ServeOutcome:
    """Run the clients in a separate process. Raises: RuntimeError if they fail."""
    command = [sys.executable, "-m", "benchmarks.serve.clients"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    watched = {program.name: Watched() for program in programs}
    over = threading.Event()
    sampling = threading.Thread(target=_sample, args=(programs, watched, over), daemon=True)
    with subprocess.Popen(command, cwd=ROOT, text=True, **pipes) as clients:
        try:
            clients.stdin.write(json.dumps(asdict(load)))
            clients.stdin.close()
            _expect(clients, "begin")
            begun, before = time.perf_counter(), [program.cpu_s() for program in programs]
            sampling.start()
            _expect(clients, "end")
            wall_s = time.perf_counter() - begun
            for program, cpu_s in zip(programs, before, strict=True):
                watched[program.name].cpu_s = program.cpu_s() - cpu_s
            over.set()
            sampling.join()
            units = json.loads(clients.stdout.readline())
        finally:
            over.set()
            if clients.poll() is None and sys.exc_info()[0] is not None:
                clients.kill()
    return ServeOutcome(units, wall_s, watched)


def _expect(clients: "subprocess.Popen[str]", word: str) -> None:
    if (line := clients.stdout.readline().strip()) != word:
        raise RuntimeError(f"clients: expected {word}, got {line or 'their end'}")


def _sample(programs: Sequence[ServedProgram], watched: dict[str, Watched], over: threading.Event) -> None:
    for number in itertools.count():
        for program in programs:
            peak = watched[program.name].peak
            for kind, n_bytes in program.memory(full=number % FULL_EVERY == 1).items():
                peak[kind] = max(peak.get(kind, 0), n_bytes)
        if over.wait(SAMPLE_S):
            return
