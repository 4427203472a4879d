"""Low CPU priority for a worker that starts beside others that serve. Torch-free; without Linux it does nothing.

Two nice values are raised, because each counts only on some systems:

- that of the threads. A process needs CAP_SYS_NICE, or a limit RLIMIT_NICE that allows its present value, to return to
  it. A thread tries this first, because capabilities of a user namespace, as in a rootless container, do not count;
- that of the autogroup, by which the kernel divides the CPU between sessions (setsid) outside of CPU cgroups. Any
  process may raise and restore it. It is changed only by a process that leads a session of its own.

The idle policy would give less to a start, but a worker that is added because all CPUs are busy would never be ready.
For the same reason the priority is low for a limited time.
"""

import logging
import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

LOG = logging.getLogger(__name__)
PROC = Path("/proc/self")
LOW = 10  # nice value: about a tenth of the CPU time of a process at 0, if both want all of it
MAX_LOW_S = 60.0  # a start that takes longer goes on at the priority from before: others use all of the CPU
# The kernel accepts one write to an autogroup of the machine every 0.1 s, if the writer is no administrator.
N_WRITES, WRITE_S = 50, 0.11


class StartPriority:
    """The priority of this process, which is low until `restore`. Make it before the process has threads.

    Args:
        proc: folder of the process's files.
        limit_s: seconds after which it is restored in any case.
    """

    def __init__(self, proc: Path = PROC, limit_s: float = MAX_LOW_S):
        self._proc, self._lock = proc, threading.Lock()
        self._thread_nice = self._group_nice = None
        if sys.platform == "linux":
            self._thread_nice = _restorable_nice()
            self._group_nice = _own_autogroup_nice(proc)
        if self._thread_nice is not None:
            os.setpriority(os.PRIO_PROCESS, 0, LOW)
        if self._group_nice is not None and not self._write_group(LOW):
            self._group_nice = None
        LOG.info("low CPU priority until the worker is ready, for %g s at most: %s", limit_s, self)
        self._timer = threading.Timer(limit_s, self.restore)
        self._timer.daemon = True
        self._timer.start()

    def __str__(self) -> str:
        used = ["threads"] * (self._thread_nice is not None) + ["autogroup"] * (self._group_nice is not None)
        return ", ".join(used) or "not possible on this system"

    def restore(self) -> None:
        """Return to the priority from before, with all threads. A second call does nothing."""
        self._timer.cancel()
        with self._lock:
            self._restore()

    def _restore(self) -> None:
        nice, self._thread_nice = self._thread_nice, None
        while nice is not None and (low := [one for one in self._threads() if _nice_of(one) == LOW]):
            for thread in low:  # they may start threads meanwhile
                with suppress(ProcessLookupError):
                    os.setpriority(os.PRIO_PROCESS, thread, nice)
        nice, self._group_nice = self._group_nice, None
        if nice is not None and not self._write_group(nice):
            LOG.warning("the CPU priority stays low: the nice value of the autogroup could not be restored")

    def _threads(self) -> list[int]:
        return [int(name) for name in os.listdir(self._proc / "task")]

    def _write_group(self, nice: int) -> bool:
        for _ in range(N_WRITES):
            try:
                (self._proc / "autogroup").write_text(str(nice))
            except BlockingIOError:
                time.sleep(WRITE_S)
            except OSError:
                return False
            else:
                return True
        return False


def _nice_of(thread: int) -> int | None:
    with suppress(ProcessLookupError):
        return os.getpriority(os.PRIO_PROCESS, thread)
    return None


def _restorable_nice() -> int | None:
    """The nice value of this thread, if it is below `LOW` and the process may return to it; None otherwise."""
    nice, tried = os.getpriority(os.PRIO_PROCESS, 0), threading.Event()

    def lower_and_restore() -> None:  # on Linux the value of one thread
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, LOW)
            os.setpriority(os.PRIO_PROCESS, 0, nice)
            tried.set()

    if nice >= LOW:
        return None
    thread = threading.Thread(target=lower_and_restore, name="nice")
    thread.start()
    thread.join()
    while (PROC / "task" / str(thread.native_id)).exists():  # `join` returns shortly before the thread has ended
        time.sleep(0.001)
    return nice if tried.is_set() else None


def _own_autogroup_nice(proc: Path) -> int | None:
    """The nice value of this process's autogroup; None without one, or if other programs may be in it."""
    if os.getsid(0) != os.getpid():
        return None
    with suppress(OSError, ValueError, IndexError):
        nice = int((proc / "autogroup").read_text().rsplit(maxsplit=1)[1])
        return nice if nice < LOW else None
    return None
