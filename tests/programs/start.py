"""Starts programs. Most are forked from a process that has imported their modules: imports take longer than the rest
of a start. A program whose modules could have been imported differently in a process of its own gets one.
"""

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[2]
START_S = 240.0  # of the imports on a loaded machine; exceeding it means a hang
# Threads of numerical libraries, which read it when they are imported; and output that arrives at once.
SETTINGS = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
# Modules that a program imports before it serves; programs with the same modules share a fork server. No gateway has
# torch, and no worker has torch's compiler before something compiles.
GATEWAY, WORKER = ("server.main", "benchmarks.serve.fake_worker"), ("worker.main", "worker.serving")
MODULES: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(GATEWAY, GATEWAY),
    **dict.fromkeys(("worker.main", "tests.worker.http.brief_worker"), WORKER),
}
# Beginnings of variables that none of these modules reads when it is imported.
READ_LATER = ("DUOLOGUE_", "TORCHINDUCTOR_", "_TORCHINDUCTOR_", "PYTEST_", "CXX")
BOOT = "import sys; from tests.programs.fork_server import main; main(int(sys.argv[1]), sys.argv[2:])"


def start(
    module: str, arguments: Sequence[str], environ: Mapping[str, str] = {}
) -> "subprocess.Popen[str] | ForkedProgram":
    """`python -m module arguments...` in the root folder. Its stdout and stderr are the stream `stdout`.

    environ: variables that differ from this process's, besides SETTINGS.
    """
    whole = {**os.environ, **SETTINGS, **environ}
    if module in MODULES and can_fork() and _read_at_import(whole) == _read_at_import(_first_environ()):
        return fork_server(MODULES[module]).start(module, arguments, whole)
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env=whole,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )


def can_fork() -> bool:
    """Whether processes have descriptors, and no GPU whose state a forked process would inherit."""
    return hasattr(os, "pidfd_open") and not Path("/dev/nvidiactl").exists()


@cache
def _first_environ() -> dict[str, str]:
    return {**os.environ, **SETTINGS}


_first_environ()  # before any test changes a variable


def _read_at_import(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if not name.startswith(READ_LATER)}


class ForkedProgram:
    """A running program, with the part of `subprocess.Popen` that tests use. It is no child of this process."""

    def __init__(self, pid: int, child: int, status: int, stdout: IO[str]):
        """child: descriptor of the process. status: descriptor that the exit status is read from."""
        self.pid, self.stdout = pid, stdout
        self.returncode: int | None = None
        self._child, self._status = child, status
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        return self._ended(0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end. Returns: the exit status. Raises: subprocess.TimeoutExpired."""
        status = self._ended(timeout)
        if status is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return status

    def send_signal(self, number: int) -> None:
        with self._lock:
            if self.returncode is None:
                with suppress(ProcessLookupError):  # it has ended
                    signal.pidfd_send_signal(self._child, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _ended(self, timeout: float | None) -> int | None:
        """The exit status; None if the process runs."""
        waiting = select.poll()
        with self._lock:
            if self.returncode is not None:
                return self.returncode
            waiting.register(self._status, select.POLLIN)
        if not waiting.poll(None if timeout is None else 1000 * timeout):
            return None
        with self._lock:
            if self.returncode is None:
                data = os.read(self._status, 16)
                if not data:
                    raise RuntimeError(f"expected the exit status of process {self.pid}, got the fork server's end")
                self.returncode = int(data)
                os.close(self._status)
                os.close(self._child)
        return self.returncode


class ForkServer:
    """A process that has imported these modules, until this process ends."""

    def __init__(self, modules: Sequence[str]):
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.settimeout(START_S)
        self._lock = threading.Lock()
        command = [sys.executable, "-c", BOOT, str(theirs.fileno()), *modules]
        with theirs:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=_first_environ(),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        atexit.register(self.close)
        assert self._connection.recv(16) == b"ready", f"expected a fork server of {modules}, got its end"

    def start(self, module: str, arguments: Sequence[str], environ: Mapping[str, str]) -> ForkedProgram:
        request = {
            "module": module,
            "arguments": list(arguments),
            "environ": dict(environ),
            "folder": str(ROOT),
            "ignored": [number for number in signal.valid_signals() if signal.getsignal(number) == signal.SIG_IGN],
        }
        output, their_output = os.pipe()
        status, their_status = os.pipe()
        with self._lock:
            socket.send_fds(self._connection, [json.dumps(request).encode()], [their_output, their_status])
            pid, [child], _, _ = socket.recv_fds(self._connection, 16, 1)
        os.close(their_output)
        os.close(their_status)
        return ForkedProgram(int(pid), child, status, open(output, errors="replace"))

    def close(self) -> None:
        self._connection.close()
        self._process.wait()


@cache
def fork_server(modules: tuple[str, ...]) -> ForkServer:
    """The server with these modules, which the first program starts."""
    return ForkServer(modules)
