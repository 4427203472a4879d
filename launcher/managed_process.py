"""One process: started in a session of its own, its log and pid file, asked to stop, killed with all it started.

Knows files, signals and process groups. Does not know what the program does, nor when it is to be started again.
"""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path

import psutil

PARENT_DEATH = Path(__file__).with_name("parent_death.py")
TAIL_BYTES = 64 * 1024  # of a log that are looked at for a last word
SHOWN = 300  # characters of it
LOGGED = re.compile(r"\d\d:\d\d:\d\d [A-Z]+ ")
SERIOUS = re.compile(r"\d\d:\d\d:\d\d (ERROR|CRITICAL) \S+ \| |error: ")
TRACEBACK = "Traceback (most recent call last):"


@dataclass(frozen=True)
class Program:
    """What runs and where its files go.

    name: for people, `worker 0`. stem: of its files, `worker_0`. url: where it answers. environ: on top of the
    launcher's own.
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
    """A program's process, one after the other. Start it on the main thread: Linux ties it to the thread."""

    def __init__(self, program: Program, folder: Path, cwd: Path):
        """folder: of log and pid file. cwd: where it runs."""
        self.program = program
        self.log, self.pid_file = folder / f"{program.stem}.log", folder / f"{program.stem}.pid"
        self._cwd = cwd
        self._process: subprocess.Popen[bytes] | None = None
        self._begin = 0  # where the log of this process begins
        self._status: int | None = None

    def clear_log(self) -> None:
        """Keep the last run's log as `.log.1` and begin anew."""
        with suppress(FileNotFoundError):
            os.replace(self.log, f"{self.log}.1")
        self.log.touch()

    @property
    def pid(self) -> int:
        """0 if it never started."""
        return 0 if self._process is None else self._process.pid

    def start(self) -> None:
        """Raises: OSError if there is no room for a process or a file."""
        assert self.poll() is not None or self._process is None, "started while it runs"
        command = [sys.executable, "-IS", str(PARENT_DEATH), str(os.getpid()), *self.program.command]
        with self.log.open("ab") as log:
            self._begin = log.tell()
            self._process = subprocess.Popen(
                command,
                cwd=self._cwd,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **self.program.environ},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a terminal's Ctrl-C is for the launcher, which stops things in order
            )
        self._status = None
        with suppress(OSError):  # a disk that is full is no reason to lose hold of what runs
            self.pid_file.write_text(f"{self.pid}\n")

    def poll(self) -> int | None:
        """Exit status, negative for a signal; None while it runs, or before it started.

        What it left running is killed: its number is ours to name until its status has been fetched.
        """
        if self._process is None or self._status is not None:
            return self._status
        if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return None
        self._signal_all(signal.SIGKILL)
        self._status = self._process.wait()
        with suppress(OSError):
            self.pid_file.unlink(missing_ok=True)
        return self._status

    @property
    def is_running(self) -> bool:
        return self._process is not None and self.poll() is None

    def listens_on(self, port: int) -> bool:
        """Whether it is this process that answers there, and not one that was there before."""
        try:
            sockets = psutil.Process(self.pid).net_connections(kind="tcp")
        except psutil.NoSuchProcess:
            return False
        except (psutil.Error, OSError):  # a machine that does not say
            return True
        return any(one.status == psutil.CONN_LISTEN and one.laddr.port == port for one in sockets)

    def ask_to_stop(self) -> None:
        """SIGTERM, to the process alone: what it started is its own to stop."""
        if self.is_running:
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL, to it and all it started; `poll` tells when it is gone."""
        if self.is_running:
            self._signal_all(signal.SIGKILL)

    def _signal_all(self, number: int) -> None:
        with suppress(ProcessLookupError, PermissionError):  # nobody is left
            os.killpg(self.pid, number)

    def last_words(self) -> str:
        """The last serious line of this process's log, or its last one; empty if there is none."""
        with suppress(OSError), self.log.open("rb") as log:
            end = log.seek(0, os.SEEK_END)
            log.seek(max(min(self._begin, end), end - TAIL_BYTES))
            return last_words(log.read().decode("utf-8", errors="replace").splitlines())
        return ""


def last_words(lines: Sequence[str]) -> str:
    """The last line of level ERROR or worse with what was raised, else the last that says anything; cut to a length."""
    said = [line.rstrip() for line in lines if line.strip()]
    serious = [number for number, line in enumerate(said) if SERIOUS.match(line)]
    if not serious:
        return (said or [""])[-1].strip()[:SHOWN]
    word = SERIOUS.sub("", said[serious[-1]], count=1)
    behind = list(takewhile(lambda line: not LOGGED.match(line), said[serious[-1] + 1 :]))
    if TRACEBACK in behind:
        word += f": {behind[-1].strip()}"
    return word[:SHOWN]


def ending(status: int) -> str:
    """An exit status in words: `exit status 1`, `signal SIGTERM`."""
    if status >= 0:
        return f"exit status {status}"
    if -status == signal.SIGKILL:
        return "signal SIGKILL (somebody sent it, or memory ran out)"
    try:
        return f"signal {signal.Signals(-status).name}"
    except ValueError:
        return f"signal {-status}"
