"""The processes under test: workers, gateways and an authority, what they log and when, and their deaths.

A killed worker is started again, as the launcher does it. Nothing else is.
"""

import asyncio
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import httpx

from benchmarks.chaos.clients import FaultSign
from benchmarks.chaos.system import POLL_S, SIGNS, Tail, follow
from benchmarks.serve.processes import ROOT, free_port
from worker.config.service import INDUCTOR_VARIABLE
from worker.key_text import WORKER_SECRET_VARIABLE
from worker.log import LEVEL_VARIABLE

SINGLE, CLUSTER = "gateway", ("gateway_0", "gateway_1")  # with workers of its own list; with those of the authority
AUTHORITY = "authority"
RESTART_S = 1.0  # as in the launcher, after ten seconds of service
ANSWER_S, STOP_S = 5.0, 5.0
ROWS_OF_UNIT = 100  # that a window needs at the end of a slot
NO_LIMITS = {"sessions": 1000, "sockets": 1000, "requests_per_s": 1000.0}  # all clients have one address


@dataclass(frozen=True)
class ProgramLayout:
    """What is started.

    gpus: of the workers, by the driver's numbers; None: two workers on the CPU. model: checkpoint folder. slots: of
    each worker. context_rows: of a slot. cache: folder of compiled kernels. logs: folder. start_s: limit of a start.
    """

    gpus: tuple[int, ...] | None
    model: Path
    slots: int
    context_rows: int
    cache: Path
    logs: Path
    start_s: float

    @property
    def n_workers(self) -> int:
        return 2 if self.gpus is None else len(self.gpus)

    def settings(self) -> dict[str, Any]:
        """The settings file of all processes."""
        high = self.context_rows - ROWS_OF_UNIT
        return {
            "model": {"model_path": str(self.model), "device": "cpu" if self.gpus is None else "auto"},
            "service": {"data_dir": str(self.logs / "data"), "limits": NO_LIMITS},
            "duplex": {
                "context_rows": self.context_rows,
                "max_sessions": self.slots,
                "session": {"window": {"high_tokens": high, "low_tokens": high * 3 // 4}},
            },
        }


class Programs:
    """`async with Programs(layout) as programs:` starts all processes and waits until they serve.

    Attributes:
        notices: signs of deaths in the logs.
        ports: by name; workers are `worker_0`, `worker_1` and so on.
        ready_s: seconds from the launch of each worker until it first served.
    """

    def __init__(self, layout: ProgramLayout):
        self.layout, self.notices = layout, list[FaultSign]()
        self.workers = [f"worker_{number}" for number in range(layout.n_workers)]
        names = (*self.workers, AUTHORITY, SINGLE, *CLUSTER)
        self.ports = {name: free_port() for name in names}
        self.ready_s: dict[str, float] = {}
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._environ = {
            **os.environ,
            **{INDUCTOR_VARIABLE: str(layout.cache), WORKER_SECRET_VARIABLE: secrets.token_urlsafe(32)},
            **{"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", LEVEL_VARIABLE: "INFO"},
        }
        if layout.gpus is None:
            self._environ["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // layout.n_workers))

    async def __aenter__(self) -> Self:
        folder = self.layout.logs
        folder.mkdir(parents=True, exist_ok=True)
        self._config = folder / "config.json"
        self._config.write_text(json.dumps(self.layout.settings()), encoding="utf-8")
        self._http = httpx.AsyncClient(trust_env=False, timeout=ANSWER_S)
        try:
            await self._start_all()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for process in self._running.values():
            process.terminate()
        end = time.monotonic() + STOP_S
        while time.monotonic() < end and any(process.poll() is None for process in self._running.values()):
            await asyncio.sleep(POLL_S)
        for process in self._running.values():
            process.kill()
            process.wait()
        await self._http.aclose()

    def url(self, gateway: str) -> str:
        return f"ws://127.0.0.1:{self.ports[gateway]}"

    def kill(self, name: str) -> float:
        """Kill a process with SIGKILL; a worker is started again. Returns: monotonic s."""
        self._running[name].send_signal(signal.SIGKILL)
        at = time.monotonic()
        if name in self.workers:
            self._tasks.append(asyncio.create_task(self._restart(name), name=f"restart of {name}"))
        return at

    async def wait_ready(self, gateways: Sequence[str] = (SINGLE, *CLUSTER)) -> float:
        """Wait until these gateways have all workers, and all slots are free. Returns: monotonic s."""
        ready = {"ready_workers": self.layout.n_workers, "free_slots": self.layout.n_workers * self.layout.slots}
        for name in gateways:
            await self._wait_for(name, lambda answer: ready.items() <= answer.items(), f"{ready} at {name}")
        return time.monotonic()

    async def wait_back(self, at: float) -> float:
        """Wait until all workers serve. Returns: seconds since `at`."""
        n = self.layout.n_workers
        await self._wait_for(SINGLE, lambda answer: answer.get("ready_workers") == n, f"{n} workers")
        return time.monotonic() - at

    def log_of(self, name: str) -> str:
        """The end of a log."""
        return (self.layout.logs / f"{name}.log").read_text(encoding="utf-8", errors="replace")[-2000:]

    # --- processes -----------------------------------------------------------------------------

    async def _start_all(self) -> None:
        begun = time.monotonic()
        for name in self.workers:
            self._start(name, *self._worker_command(name))
        workers = ("--workers", ",".join(f"127.0.0.1:{self.ports[name]}" for name in self.workers))
        state = str(self.layout.logs / "authority.sqlite")
        self._start(AUTHORITY, "server.cluster", "--port", str(self.ports[AUTHORITY]), *workers, "--state", state)
        authority = ("--authority", f"127.0.0.1:{self.ports[AUTHORITY]}", "--gateway-name")
        for name in (SINGLE, *CLUSTER):
            source = workers if name == SINGLE else (*authority, name)
            flags = ("--http", "--port", str(self.ports[name]), "--log-dir", str(self.layout.logs))
            self._start(name, "server.main", *flags, *source)
        tails = [Tail("worker", self.layout.logs / f"{name}.log", self.notices) for name in self.workers]
        tails += [Tail(name, self.layout.logs / f"{name}.log", self.notices, SIGNS["gateway"]) for name in self.ports]
        self._tasks.append(asyncio.create_task(follow(tails), name="logs"))
        while len(self.ready_s) < len(self.workers):
            await asyncio.sleep(POLL_S)
            self._check(begun)
            for name in self.workers:
                if name not in self.ready_s and (await self._get(name, "/readyz")).get("ready"):
                    self.ready_s[name] = time.monotonic() - begun
        await self.wait_ready()

    def _worker_command(self, name: str) -> tuple[str, ...]:
        number = self.workers.index(name)
        gpu = number if self.layout.gpus is None else self.layout.gpus[number]
        return ("worker.main", "--worker-index", str(number), "--port", str(self.ports[name]), "--gpu-id", str(gpu))

    def _start(self, name: str, *command: str) -> None:
        environ = self._environ
        if name in self.workers and self.layout.gpus is not None:
            gpu = str(self.layout.gpus[self.workers.index(name)])
            environ = {**environ, "CUDA_VISIBLE_DEVICES": gpu, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        with (self.layout.logs / f"{name}.log").open("ab") as log:
            self._running[name] = subprocess.Popen(
                [sys.executable, "-m", *command, "--config", str(self._config)],
                **{"cwd": ROOT, "env": environ, "stdout": log, "stderr": log, "stdin": subprocess.DEVNULL},
            )

    async def _restart(self, name: str) -> None:
        while self._running[name].poll() is None:  # a process that used a GPU takes a while to end
            await asyncio.sleep(POLL_S)
        await asyncio.sleep(RESTART_S)
        self._start(name, *self._worker_command(name), "--low-priority-start")

    # --- state ---------------------------------------------------------------------------------

    async def _get(self, name: str, path: str) -> dict[str, Any]:
        """JSON of a process; empty without an answer."""
        with suppress(httpx.HTTPError, ValueError):
            answer: dict[str, Any] = (await self._http.get(f"http://127.0.0.1:{self.ports[name]}{path}")).json()
            return answer
        return {}

    async def _wait_for(self, name: str, holds: Callable[[dict[str, Any]], bool], what: str) -> None:
        begun = time.monotonic()
        while not holds(answer := await self._get(name, "/readyz")):
            self._check(begun, f"expected {what}, got {answer}")
            await asyncio.sleep(POLL_S)

    def _check(self, begun: float, what: str = "expected all workers to start") -> None:
        """Raises: RuntimeError after the time limit, or if a process has ended that was not killed."""
        for name, process in self._running.items():
            if process.poll() not in (None, -signal.SIGKILL):
                raise RuntimeError(f"{name} ended with status {process.returncode}: {self.log_of(name)}")
        if time.monotonic() - begun > self.layout.start_s:
            raise RuntimeError(f"{what} within {self.layout.start_s:g} s; {self.log_of(self.workers[0])}")
