"""Launcher processes for tests: of stub programs whose behavior a test changes, or of the real programs."""

import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]
WAIT_S = 60.0  # more than any step takes on a loaded machine with two cores
POLL_S = 0.02
# A restart policy with short intervals.
QUICK = {
    "initial_wait_s": 0.05,
    "max_wait_s": 0.2,
    "probe_timeout_s": 0.5,
    "starting_poll_s": 0.05,
    "ready_poll_s": 0.1,
    "grace_s": 30.0,
}


def free_ports(n: int) -> list[int]:
    """Consecutive free ports, chosen at random below the ephemeral range, so that parallel test runs rarely collide."""
    for _ in range(100):
        ports = range(first := 10_000 + secrets.randbelow(20_000), first + n)
        with ExitStack() as stack, suppress(OSError):
            for port in ports:
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return list(ports)
    raise AssertionError(f"expected {n} free ports, got none")


def wait_until(holds: Callable[[], Any], what: str, timeout: float = WAIT_S) -> Any:
    """Poll until `holds` returns a true value. Returns: that value."""
    until = time.monotonic() + timeout
    while not (got := holds()):
        assert time.monotonic() < until, f"expected {what} within {timeout:g} s, got none"
        time.sleep(POLL_S)
    return got


class Launched:
    """A launcher process. lines: its output so far, stdout and stderr."""

    def __init__(self, command: Sequence[str], *, ignored: Sequence[int] = (), environ: dict[str, str] | None = None):
        """ignored: signals that it inherits as ignored. SIGHUP gets its default action, also under nohup."""
        handlers = {signal.SIGHUP: signal.SIG_DFL, **dict.fromkeys(ignored, signal.SIG_IGN)}
        before = [(number, signal.signal(number, handler)) for number, handler in handlers.items()]
        try:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1", **(environ or {})},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
        finally:
            for number, handler in before:
                signal.signal(number, handler)
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, name="launcher-output", daemon=True)
        self._reader.start()
        self._seen: set[psutil.Process] = set()

    def _read(self) -> None:
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def wait_line(self, pattern: str, n: int = 1, timeout: float = WAIT_S) -> str:
        """Wait for the n-th line that contains the pattern. Returns: the line."""
        until = time.monotonic() + timeout
        while len(found := [line for line in list(self.lines) if re.search(pattern, line)]) < n:
            if time.monotonic() >= until or (self.process.poll() is not None and not self._reader.is_alive()):
                raise AssertionError(f"expected {n} lines with {pattern!r}, got:\n{self.output}")
            time.sleep(POLL_S)
        return found[n - 1]

    def family(self) -> set[psutil.Process]:
        """All descendants seen so far, including those that have ended."""
        self._seen |= set(psutil.Process(self.process.pid).children(recursive=True))
        return self._seen

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self, timeout: float = WAIT_S) -> int:
        """Wait for the end of the process. Returns: its exit status."""
        status = self.process.wait(timeout)
        self._reader.join(timeout)
        return status

    def expect_none_left(self) -> None:
        """Wait until every process that `family` returned has ended."""
        wait_until(lambda: not any(map(_runs, self._seen)), f"none of these left: {self._seen}")

    def clean_up(self) -> None:
        if self.process.poll() is None:
            self.family()
            self.process.kill()
        self.wait()
        for one in self._seen:
            if _runs(one):
                one.kill()
        self.process.stdout.close()


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Stubs(Launched):
    """A launcher of stub programs: a gateway, and one worker for each behavior."""

    def __init__(self, folder: Path, behaviors: Sequence[dict[str, Any]], ignored: Sequence[int], **plan_settings: Any):
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.set_behavior("gateway", {})
        for i, behavior in enumerate(behaviors):
            self.set_behavior(f"worker_{i}", behavior)
        plan = folder / "plan.txt"
        plan.write_text(json.dumps({"folder": str(folder), **plan_settings}))
        super().__init__([sys.executable, "-m", "tests.launcher.launch_stubs", str(plan)], ignored=ignored)

    def set_behavior(self, stem: str, behavior: dict[str, Any]) -> None:
        new = self.folder / f"{stem}.new"
        new.write_text(json.dumps(behavior))
        new.replace(self.folder / f"{stem}.json")

    def pid(self, stem: str) -> int:
        return int((self.folder / f"{stem}.pid").read_text())

    def events(self) -> list[str]:
        path = self.folder / "events"
        return path.read_text().splitlines() if path.exists() else []

    def pid_files(self) -> list[str]:
        return sorted(path.name for path in self.folder.glob("*.pid"))

    def ready(self, n: int = 1) -> "Stubs":
        """Wait for the ready line and for the n-th line about a worker that became ready."""
        self.wait_line("^ready: ")
        self.wait_line("ready in", n)
        self.family()
        return self


@contextmanager
def stubs(
    folder: Path,
    *behaviors: dict[str, Any],
    drain_s: float = 0.0,
    ignored: Sequence[int] = (),
    ports: Sequence[int] = (),
    max_worker_bytes: int | None = None,
    **policy: float,
) -> Iterator[Stubs]:
    """A launcher of stub programs; all its processes are killed on exit.

    Args:
        behaviors: one for each worker; none: one worker with the default behavior.
        drain_s: of the plan.
        ignored: signals that the launcher inherits as ignored.
        ports: of the gateway and the workers; none: free ones.
        max_worker_bytes: of the plan.
        policy: fields that differ from QUICK.
    """
    behaviors = behaviors or ({},)
    ports = ports or free_ports(1 + len(behaviors))
    settings = {"ports": list(ports), "drain_s": drain_s, "max_worker_bytes": max_worker_bytes}
    launched = Stubs(folder, behaviors, ignored, **settings, policy={**QUICK, **policy})
    try:
        yield launched
    finally:
        launched.clean_up()


@contextmanager
def launcher(
    *flags: str, command: Sequence[str] = (sys.executable, "-m", "launcher"), environ: dict[str, str] | None = None
) -> Iterator[Launched]:
    """`python -m launcher` with the real programs. command: the command to run instead."""
    launched = Launched([*command, *flags], environ=environ)
    try:
        yield launched
    finally:
        launched.clean_up()
