"""Units, late units and CPU use in each phase of a run, of live sessions and of the processes that serve them."""

import os
import threading
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks.chaos.clients import DEADLINE_S, ChaosClient, Unit

SAMPLE_S = 1.0  # between two samples of all processes; the CPU time of a process after its last sample is not counted
# A part of the command -> kind of process, in this order. All else below the benchmark is Ray's.
KINDS = (
    ("worker.main", "workers"),
    ("server.main", "gateways"),
    ("server.cluster", "authority"),
    ("ray::", "Ray's actors"),
    ("launcher.cluster", "commands"),
)
CLIENTS, RAY, OTHERS = "clients", "Ray", "other programs"


@dataclass
class Usage:
    """Seconds so far, at a time. cpu: by kind of process. waited: of workers, for a CPU. busy: of all CPUs."""

    at: float = 0.0
    cpu: Counter[str] = field(default_factory=Counter)
    waited: float = 0.0
    busy: float = 0.0


class ThreadWaits:
    """Seconds for which the threads of one process waited for a CPU, those that have ended included."""

    def __init__(self) -> None:
        self._ended_s = 0.0
        self._running: dict[int, float] = {}

    def add(self, running: dict[int, float]) -> None:
        """Add a sample: seconds of each thread that runs, by thread id."""
        for thread, seconds in self._running.items():
            if running.get(thread, -1.0) < seconds:  # it has ended; a thread with less time has only its id
                self._ended_s += seconds
        self._running = running

    @property
    def total_s(self) -> float:
        """Of all threads until the last sample."""
        return self._ended_s + sum(self._running.values())


class PhaseLog:
    """Phases of a run, as a context. A thread samples the processes below this one."""

    def __init__(self) -> None:
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._cpu: dict[int, tuple[str, float]] = {}  # pid -> kind, CPU s
        self._waits: dict[int, ThreadWaits] = {}  # of workers, by pid
        self._begun: list[tuple[str, Usage]] = []
        self._thread = threading.Thread(target=self._sample_often, name="phases", daemon=True)

    def __enter__(self) -> "PhaseLog":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def begin(self, name: str) -> None:
        """Begin a phase, which ends the one before."""
        self._begun.append((name, self._usage()))

    def rows(self, clients: Iterable[ChaosClient]) -> list[dict[str, object]]:
        """A row for each phase but the last one, which marks the end. A unit belongs to the phase of its sending."""
        units, now = [unit for client in clients for unit in client.units], time.monotonic()
        found = []
        for (name, begin), (_, end) in zip(self._begun, self._begun[1:], strict=False):
            seconds = end.at - begin.at
            own = [unit for unit in units if begin.at <= unit.sent_at < end.at]
            cores = {kind: (end.cpu[kind] - begin.cpu[kind]) / seconds for kind in sorted(end.cpu)}
            cores[OTHERS] = max(0.0, (end.busy - begin.busy) / seconds - sum(cores.values()))
            found.append(
                {
                    **{"phase": name, "seconds": round(seconds, 1), "units": len(own)},
                    **{"late": sum(is_late(unit, now) for unit in own), "slowest s": _slowest(own)},
                    "cores": {kind: round(share, 2) for kind, share in cores.items()},
                    "workers waited for a CPU, s a second": round((end.waited - begin.waited) / seconds, 2),
                }
            )
        return found

    def _sample_often(self) -> None:
        while not self._ended.wait(SAMPLE_S):
            self._usage()

    def _usage(self) -> Usage:
        with self._lock:
            own = psutil.Process()
            self._read(own, CLIENTS)
            for process in own.children(recursive=True):
                with suppress(psutil.Error):
                    self._read(process, _kind_of(process))
            times = psutil.cpu_times()
            usage = Usage(time.monotonic(), busy=sum(times[:3]) + times.irq + times.softirq)
            for kind, cpu_s in self._cpu.values():
                usage.cpu[kind] += cpu_s
            usage.waited = sum(one.total_s for one in self._waits.values())
            return usage

    def _read(self, process: psutil.Process, kind: str) -> None:
        times = process.cpu_times()
        self._cpu[process.pid] = kind, times.user + times.system
        if kind == "workers":
            self._waits.setdefault(process.pid, ThreadWaits()).add(thread_waits(process.pid))


def is_late(unit: Unit, now: float) -> bool:
    """Whether its result came late, or is missing for longer than the deadline. now: monotonic s."""
    return bool(unit.error) or (now if unit.answered_at is None else unit.answered_at) - unit.sent_at > DEADLINE_S


def thread_waits(pid: int) -> dict[int, float]:
    """Seconds for which each thread of a process was ready to run and had no CPU, by thread id."""
    found = {}
    for task in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with suppress(OSError):
            found[int(task.parent.name)] = int(task.read_text().split()[1]) / 1e9
    return found


def _kind_of(process: psutil.Process) -> str:
    command = " ".join(process.cmdline())
    return next((kind for part, kind in KINDS if part in command), RAY)


def _slowest(units: list[Unit]) -> float | None:
    seconds = [unit.answered_at - unit.sent_at for unit in units if unit.answered_at is not None]
    return round(max(seconds), 2) if seconds else None


def cpu_count() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0))
