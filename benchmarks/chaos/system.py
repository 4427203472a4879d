"""A gateway and two workers under a launcher: its processes, what they log and when, and the faults caused in them."""

import asyncio
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import httpx
import psutil

from benchmarks.chaos.clients import FaultSign
from benchmarks.chaos.folders import SmallDisk
from benchmarks.serve.processes import ROOT, free_port

N_WORKERS, N_SLOTS = 2, 6
START_S, STOP_S, ANSWER_S = 300.0, 90.0, 5.0
TAIL_S, POLL_S = 0.01, 0.05
MAX_WORKER_GB = 2.0
# Signs of a fault in the logs of the gateway and of the launcher.
SIGNS = {
    "gateway": (
        r"session \S+ moves: .*",
        r"worker_\d \(\S+\) is lost: .*",
        r"recording \S+ stopped: .*",
        r"usage of keys: .*",
        r"diagnostics of session .*",
    ),
    "worker": (
        r"WARNING worker\S* \| .*",
        r"ERROR \S+ \| .*",
        r"\S+ \| draining.*",
    ),
    "launcher": (
        r"(gateway|worker \d) (ended with|has not answered|broke down|holds|could not).*",
        r"states of workers: .*",
    ),
}


class Tail:
    """New lines of a file that match a sign, with the times at which they were seen.

    Args:
        who: whose file it is.
        signs: as in `SIGNS`; default: those of `who`.
    """

    def __init__(self, who: str, path: Path, notices: list[FaultSign], signs: Sequence[str] = ()):
        self._who, self._path, self._notices = who, path, notices
        self._signs = [re.compile(sign) for sign in signs or SIGNS[who]]
        self._position, self._rest = 0, b""

    def read(self) -> None:
        with suppress(OSError), self._path.open("rb") as file:
            if file.seek(0, os.SEEK_END) < self._position:
                self._position, self._rest = 0, b""  # a new file
            file.seek(self._position)
            data = file.read()
            self._position += len(data)
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                text = line.decode(errors="replace")
                found = next((match for sign in self._signs if (match := sign.search(text))), None)
                if found is not None:
                    self._notices.append(FaultSign(time.monotonic(), self._who, found[0][:300]))


class System:
    """`async with System(folder) as system:` starts all processes and waits until they serve.

    Args:
        folder: empty, for settings, logs, recordings and caches.
        flags: further ones of the launcher.

    Attributes:
        port: of the gateway.
        notices: signs of faults in the logs.
        disks: `logs`, `data` and `cache`.
    """

    def __init__(self, folder: Path, *flags: str):
        self.folder, self.port = folder, free_port()
        self.notices: list[FaultSign] = []
        self._flags = flags
        self._worker_port = free_port()
        self.disks = {name: SmallDisk(folder / name) for name in ("logs", "data", "cache")}
        self._control = folder / "control"
        self._output = folder / "launcher.txt"
        self._http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.port}", trust_env=False, timeout=ANSWER_S)

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        self._control.mkdir()
        config = self.folder / "config.json"
        service = {
            "data_dir": str(self.folder / "data"),
            "cache_dir": str(self.folder / "cache"),
            "max_worker_memory_gb": MAX_WORKER_GB,
        }
        config.write_text(json.dumps({"service": service, "recording": {"enabled": True}}))
        logs = self.folder / "logs"
        command = [sys.executable, "-m", "benchmarks.chaos.launched", str(self._control)]
        command += ["--config", str(config), "--log-dir", str(logs), "--http", "--port", str(self.port)]
        command += ["--worker-base-port", str(self._worker_port), "--num-workers", str(N_WORKERS)]
        command += ["--max-sessions", str(N_SLOTS), *self._flags]
        tails = [Tail("launcher", self._output, self.notices), Tail("gateway", logs / "gateway.log", self.notices)]
        tails += [Tail("worker", logs / f"worker_{index}.log", self.notices) for index in range(N_WORKERS)]
        self._tailing = asyncio.create_task(follow(tails), name="logs")
        with self._output.open("wb") as output:
            self.process = await asyncio.create_subprocess_exec(
                *command,
                cwd=ROOT,
                stdout=output,
                stderr=output,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
                start_new_session=True,
            )
        try:
            await self.wait_ready()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        with suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)
        for n_attempts in range(2):
            try:
                await asyncio.wait_for(self.process.wait(), STOP_S)
                break
            except TimeoutError:
                with suppress(ProcessLookupError):
                    self.process.send_signal(signal.SIGTERM if n_attempts == 0 else signal.SIGKILL)
        self._tailing.cancel()
        await asyncio.gather(self._tailing, return_exceptions=True)
        await self._http.aclose()
        for disk in self.disks.values():
            disk.close()

    # --- state ---------------------------------------------------------------------------------

    async def get(self, path: str) -> dict[str, Any]:
        """JSON of the gateway; empty without an answer."""
        with suppress(httpx.HTTPError, ValueError):
            answer: dict[str, Any] = (await self._http.get(path)).json()
            return answer
        return {}

    async def wait_for(self, holds: Callable[[dict[str, Any]], bool], path: str, what: str) -> float:
        """Poll a path until its JSON meets a condition. Returns: monotonic s."""
        end = time.monotonic() + START_S
        while not holds(answer := await self.get(path)):
            if time.monotonic() > end or self.process.returncode is not None:
                raise RuntimeError(f"expected {what}, got {answer}; {self._output.read_text()[-1000:]}")
            await asyncio.sleep(POLL_S)
        return time.monotonic()

    async def wait_ready(self) -> None:
        """Wait until all workers serve and all slots are free."""
        ready = {"ready_workers": N_WORKERS, "free_slots": N_WORKERS * N_SLOTS, "draining": False}
        await self.wait_for(lambda answer: ready.items() <= answer.items(), "/readyz", f"{ready}")

    async def workers_of(self, *sessions: str) -> dict[str, int]:
        """Numbers of the workers that have these sessions."""
        tasks = (await self.get("/status")).get("running_tasks", [])
        found = {task["session_id"]: int(task["worker_id"].removeprefix("worker_")) for task in tasks}
        return {name: found[name] for name in sessions if name in found}

    async def limit_count(self, limit: str) -> float:
        """How often a limit of clients was reached."""
        text = (await self._http.get("/metrics")).text
        found = re.search(rf'^duologue_gateway_limits_total{{limit="{limit}"}} (\S+)$', text, re.MULTILINE)
        return float(found[1]) if found else 0.0

    # --- faults --------------------------------------------------------------------------------

    def pid(self, stem: str) -> int:
        """Process of `gateway`, `worker_0` or `worker_1`; 0 if there is none."""
        module, _, index = stem.partition("_")
        wanted = ("server.main",) if module == "gateway" else ("worker.main", "--worker-index", index)
        for child in psutil.Process(self.process.pid).children():
            with suppress(psutil.Error):
                line = child.cmdline()
                at = line.index(wanted[0]) if wanted[0] in line else -1
                if at >= 0 and tuple(line[at : at + len(wanted)]) == wanted:
                    return child.pid
        return 0

    def signal(self, stem: str, number: int) -> float:
        """Send a signal. Returns: monotonic s."""
        os.kill(self.pid(stem), number)
        return time.monotonic()

    async def wait_replaced(self, stem: str, pid: int) -> None:
        """Wait until the launcher has started another process in the place of this one."""
        end = time.monotonic() + START_S
        while self.pid(stem) in (0, pid):
            if time.monotonic() > end:
                raise RuntimeError(f"expected another process of {stem}, got none")
            await asyncio.sleep(POLL_S)

    async def cause(self, stem: str, fault: str, **how: float) -> float:
        """Cause a fault of `injected` in a program. Returns: monotonic s."""
        pid = self.pid(stem)
        request, done = self._control / "request", self._control / f"{pid}.done"
        done.unlink(missing_ok=True)
        request.write_text(json.dumps({"fault": fault, **how}))
        request.replace(self._control / f"{pid}.json")
        end = time.monotonic() + ANSWER_S
        while not done.exists():
            if time.monotonic() > end:
                raise RuntimeError(f"expected {stem} to cause {fault}, got nothing")
            await asyncio.sleep(TAIL_S)
        return float(done.read_text())


async def follow(tails: Sequence[Tail]) -> None:
    """Read files until the task is cancelled."""
    while True:
        for tail in tails:
            tail.read()
        await asyncio.sleep(TAIL_S)
