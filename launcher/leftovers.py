"""Processes of an earlier launcher in the same log folder, which was killed before it could stop them.

The kernel has sent them SIGTERM when their launcher ended, so they drain. A start waits for them: they hold ports and
GPU memory. Call this only while holding the folder's lock.
"""

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

POLL_S = 0.1
SAME_TIME_S = 2.0  # by which the system's start time of a process may be wrong


@dataclass(frozen=True)
class Leftover:
    """A process of an earlier launcher. name: of its program, such as `worker 0`."""

    name: str
    process: psutil.Process

    @property
    def is_running(self) -> bool:
        with suppress(psutil.Error):
            return self.process.is_running() and self.process.status() != psutil.STATUS_ZOMBIE
        return False

    def send(self, number: int) -> None:
        """Send a signal to the process; SIGKILL also to all that it has started."""
        with suppress(OSError, psutil.Error):
            if number == signal.SIGKILL:
                os.killpg(self.process.pid, number)
            else:
                self.process.send_signal(number)


def find_leftovers(folder: Path) -> list[Leftover]:
    """The running processes of the folder's pid files.

    A process that started after its pid file was written has only taken over the number and is left out.
    """
    found = []
    for file in (*sorted(folder.glob("gateway.pid")), *sorted(folder.glob("worker_*.pid"))):
        with suppress(OSError, ValueError, psutil.Error):
            process = psutil.Process(int(file.read_text()))
            if process.create_time() <= file.stat().st_mtime + SAME_TIME_S and os.getpgid(process.pid) == process.pid:
                found.append(Leftover(file.stem.replace("_", " "), process))
    return [one for one in found if one.is_running]


def end_leftovers(folder: Path, timeout_s: float, show: Callable[[str], None]) -> None:
    """Wait until all processes of an earlier launcher have ended.

    Args:
        folder: of logs and pid files.
        timeout_s: time that they have after SIGTERM; then they are killed.
        show: prints a line.
    """
    running = find_leftovers(folder)
    if not running:
        return
    for one in running:
        one.send(signal.SIGTERM)
    names = ", ".join(f"{one.name} (pid {one.process.pid})" for one in running)
    show(f"note: waiting up to {timeout_s:g} s for {names} of an earlier start_all.sh, which was killed")
    until = time.monotonic() + timeout_s
    while (running := [one for one in running if one.is_running]) and time.monotonic() < until:
        time.sleep(POLL_S)
    for one in running:
        show(f"note: {one.name} (pid {one.process.pid}) killed: it did not end within {timeout_s:g} s")
        one.send(signal.SIGKILL)
    while any(one.is_running for one in running):
        time.sleep(POLL_S)
