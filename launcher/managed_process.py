"""One program as a child process: its start, log, pid file and end, together with all processes that it starts.

Uses files, signals and process groups. Does not decide when a process starts again.
"""

import logging
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import BinaryIO

import psutil

LOG = logging.getLogger(__name__)
PARENT_DEATH = Path(__file__).with_name("parent_death.py")
TAIL_BYTES = 64 * 1024  # at the end of a log that are searched for the last message
MAX_MESSAGE_CHARS = 300
MAX_LOG_BYTES = 64 * 2**20  # a longer log is moved to `.log.1`
LOG_LINE = re.compile(r"\d\d:\d\d:\d\d [A-Z]+ ")
ERROR_LINE = re.compile(r"\d\d:\d\d:\d\d (ERROR|CRITICAL) \S+ \| |error: ")
TRACEBACK = "Traceback (most recent call last):"


@dataclass(frozen=True)
class Program:
    """A command and the names of its files.

    name: for display, such as `worker 0`. stem: of its files, such as `worker_0`. url: address of its HTTP server.
    environ: variables added to the launcher's environment.
    """

    name: str
    stem: str
    command: tuple[str, ...]
    url: str
    environ: Mapping[str, str] = field(default_factory=dict)

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])


class ChildProcess:
    """The current process of a program; a restart replaces it.

    Start it on the main thread: Linux sends the parent-death signal when the thread that started the process ends.
    """

    def __init__(self, program: Program, folder: Path, cwd: Path):
        """folder: for the log and the pid file. cwd: working directory of the process."""
        self.program = program
        self.log, self.pid_file = folder / f"{program.stem}.log", folder / f"{program.stem}.pid"
        self._cwd = cwd
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0  # byte offset in the log where the output of the current process starts
        self._status: int | None = None

    def clear_log(self) -> None:
        """Rename the log of the last run to `.log.1` and start an empty one."""
        with suppress(FileNotFoundError):
            os.replace(self.log, f"{self.log}.1")
        self.log.touch()

    def rotate_log(self) -> None:
        """Move a log above `MAX_LOG_BYTES` to `.log.1` and empty it; the process goes on appending to it."""
        with suppress(OSError):
            if self.log.stat().st_size > MAX_LOG_BYTES:
                shutil.copyfile(self.log, f"{self.log}.1")
                os.truncate(self.log, 0)
                self._log_start = 0

    @property
    def pid(self) -> int:
        """0 before the first start."""
        return 0 if self._process is None else self._process.pid

    def start(self, *flags: str) -> None:
        """Start the process, also without a log if that cannot be opened. flags: after its command. Raises: OSError."""
        assert self.poll() is not None or self._process is None, "expected no running process"
        command = [sys.executable, "-IS", str(PARENT_DEATH), str(os.getpid()), *self.program.command, *flags]
        with self._open_log() as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                command,
                cwd=self._cwd,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **self.program.environ},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches only the launcher, which stops its processes in order
            )
        self._status = None
        with suppress(OSError):  # the process stays under supervision without a pid file, such as on a full disk
            self.pid_file.write_text(f"{self.pid}\n")

    def _open_log(self) -> BinaryIO:
        try:
            return self.log.open("ab")
        except OSError as error:  # such as in a folder that became read-only
            LOG.warning("%s writes no log: %s", self.program.name, error)
            return open(os.devnull, "ab")

    def poll(self) -> int | None:
        """Exit status, negative for a signal; None while the process runs and before the first start.

        When the process has ended, this kills the rest of its process group first. The group's id cannot be reused
        before `wait` collects the exit status.
        """
        if self._process is None or self._status is not None:
            return self._status
        if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return None
        self._signal_group(signal.SIGKILL)
        self._status = self._process.wait()
        with suppress(OSError):
            self.pid_file.unlink(missing_ok=True)
        return self._status

    @property
    def is_running(self) -> bool:
        return self._process is not None and self.poll() is None

    def listens_on(self, port: int) -> bool:
        """Whether this process, rather than another one, listens on the port. True if the system does not report it."""
        try:
            sockets = psutil.Process(self.pid).net_connections(kind="tcp")
        except psutil.NoSuchProcess:
            return False
        except (psutil.Error, OSError):
            return True
        return any(one.status == psutil.CONN_LISTEN and one.laddr.port == port for one in sockets)

    @property
    def memory_bytes(self) -> int:
        """Memory of the process's own, without files that it maps, such as weights; 0 if the system hides it."""
        try:
            memory = psutil.Process(self.pid).memory_info()
        except (psutil.Error, OSError):
            return 0
        return int(memory.rss - getattr(memory, "shared", 0))

    def terminate(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Send a stop signal to the process alone, which stops its own children."""
        if self.is_running:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL to the process and all processes that it started. `poll` returns a status once it is gone."""
        if self.is_running:
            self._signal_group(signal.SIGKILL)

    def _signal_group(self, number: int) -> None:
        with suppress(ProcessLookupError, PermissionError):  # the group is empty
            os.killpg(self.pid, number)

    def last_message(self) -> str:
        """The message in the current process's log that `last_message` selects; empty if there is none."""
        with suppress(OSError), self.log.open("rb") as log:
            end = log.seek(0, os.SEEK_END)
            log.seek(max(min(self._log_start, end), end - TAIL_BYTES))
            return last_message(log.read().decode("utf-8", errors="replace").splitlines())
        return ""


def last_message(lines: Sequence[str]) -> str:
    """The last line of level ERROR or higher, otherwise the last line that is not blank, cut to a maximum length.

    If a traceback follows an error line, the exception is appended.
    """
    written = [line.rstrip() for line in lines if line.strip()]
    errors = [number for number, line in enumerate(written) if ERROR_LINE.match(line)]
    if not errors:
        return (written or [""])[-1].strip()[:MAX_MESSAGE_CHARS]
    message = ERROR_LINE.sub("", written[errors[-1]], count=1)
    after = list(takewhile(lambda line: not LOG_LINE.match(line), written[errors[-1] + 1 :]))
    if TRACEBACK in after:
        message += f": {after[-1].strip()}"
    return message[:MAX_MESSAGE_CHARS]


def describe_exit(status: int) -> str:
    """An exit status in words: `exit status 1`, `signal SIGTERM`."""
    if status >= 0:
        return f"exit status {status}"
    if -status == signal.SIGKILL:
        return "signal SIGKILL (sent by another process, or the system ran out of memory)"
    try:
        return f"signal {signal.Signals(-status).name}"
    except ValueError:
        return f"signal {-status}"
