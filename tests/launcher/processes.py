"""Launchers as processes: of stubs whose moods a test changes, or of the real thing; and what they print."""

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
WAIT_S = 60.0  # what a loaded machine with two slow cores may take; what takes longer hangs
POLL_S = 0.02
# Patience in tests: everything at once.
QUICK = {
    "first_s": 0.05,
    "most_s": 0.2,
    "answer_s": 0.5,
    "starting_poll_s": 0.05,
    "serving_poll_s": 0.1,
    "grace_s": 30.0,
}


def free_ports(n: int) -> list[int]:
    """Ports next to each other that nobody has; below those that connections get, and other runs hit others."""
    for _ in range(100):
        ports = range(first := 10_000 + secrets.randbelow(20_000), first + n)
        with ExitStack() as stack, suppress(OSError):
            for port in ports:
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return list(ports)
    raise AssertionError(f"expected {n} free ports, got none")


def wait_until(holds: Callable[[], Any], what: str, timeout: float = WAIT_S) -> Any:
    """Returns: what `holds` gave when it was true."""
    until = time.monotonic() + timeout
    while not (got := holds()):
        assert time.monotonic() < until, f"expected {what} within {timeout:g} s, got none"
        time.sleep(POLL_S)
    return got


class Launched:
    """A launcher. lines: what it printed so far, both streams."""

    def __init__(self, command: Sequence[str], *, ignored: Sequence[int] = (), environ: dict[str, str] | None = None):
        """ignored: signals that it inherits as ignored. SIGHUP is not among them because it is here, under nohup."""
        handlers = {signal.SIGHUP: signal.SIG_DFL, **dict.fromkeys(ignored, signal.SIG_IGN)}
        before = [(number, signal.signal(number, handler)) for number, handler in handlers.items()]
        try:
            self.process = subprocess.Popen(
                [sys.executable, *command],
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
        """The n-th line that the pattern is found in."""
        until = time.monotonic() + timeout
        while len(found := [line for line in list(self.lines) if re.search(pattern, line)]) < n:
            if time.monotonic() >= until or (self.process.poll() is not None and not self._reader.is_alive()):
                raise AssertionError(f"expected {n} lines with {pattern!r}, got:\n{self.output}")
            time.sleep(POLL_S)
        return found[n - 1]

    def family(self) -> set[psutil.Process]:
        """All that it ever was seen to have started, and what that started."""
        self._seen |= set(psutil.Process(self.process.pid).children(recursive=True))
        return self._seen

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self, timeout: float = WAIT_S) -> int:
        """Until it is over. Returns: its exit status."""
        status = self.process.wait(timeout)
        self._reader.join(timeout)
        return status

    def expect_nobody_left(self) -> None:
        """Nothing that `family` saw runs any more."""
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
    """A launcher of stubs: a gateway, and workers by their moods."""

    def __init__(self, folder: Path, moods: Sequence[dict[str, Any]], ignored: Sequence[int], **told: Any):
        """told: of the plan."""
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.set_mood("gateway", {})
        for i, mood in enumerate(moods):
            self.set_mood(f"worker_{i}", mood)
        plan = folder / "plan.txt"
        plan.write_text(json.dumps({"folder": str(folder), **told}))
        super().__init__(["-m", "tests.launcher.run_plan", str(plan)], ignored=ignored)

    def set_mood(self, stem: str, mood: dict[str, Any]) -> None:
        new = self.folder / f"{stem}.new"
        new.write_text(json.dumps(mood))
        new.replace(self.folder / f"{stem}.json")

    def pid(self, stem: str) -> int:
        return int((self.folder / f"{stem}.pid").read_text())

    def events(self) -> list[str]:
        path = self.folder / "events"
        return path.read_text().splitlines() if path.exists() else []

    def pid_files(self) -> list[str]:
        return sorted(path.name for path in self.folder.glob("*.pid"))

    def ready(self, n: int = 1) -> "Stubs":
        """Until it is ready, or a worker has got ready for the n-th time."""
        self.wait_line("^ready: ")
        self.wait_line("ready in", n)
        self.family()
        return self


@contextmanager
def stubs(
    folder: Path,
    *moods: dict[str, Any],
    drain_s: float = 0.0,
    ignored: Sequence[int] = (),
    ports: Sequence[int] = (),
    **policy: float,
) -> Iterator[Stubs]:
    """Nothing of it outlives the test.

    moods: of the workers; none: one with nothing special. ports: of the gateway and the workers; none: free ones.
    policy: what differs from QUICK.
    """
    moods = moods or ({},)
    ports = ports or free_ports(1 + len(moods))
    launched = Stubs(folder, moods, ignored, ports=list(ports), drain_s=drain_s, policy={**QUICK, **policy})
    try:
        yield launched
    finally:
        launched.clean_up()


@contextmanager
def launcher(*flags: str, environ: dict[str, str] | None = None) -> Iterator[Launched]:
    """`python -m launcher`, the real thing."""
    launched = Launched(["-m", "launcher", *flags], environ=environ)
    try:
        yield launched
    finally:
        launched.clean_up()
