"""A gateway whose event loop times each callback: `python -m benchmarks.doors.timed_gateway FILE ARGUMENTS ...`.

Everything else is `python -m server.main ARGUMENTS ...`. Each signal USR1 writes the longest callbacks since the one
before to FILE and starts over. A callback's CPU time does not grow while other processes run; its wall time does.
"""

import asyncio
import heapq
import json
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from server.main import main as serve

N_KEPT = 40  # longest callbacks
EDGES_MS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0)


class CallbackTimes:
    """Times of callbacks. file: where `write` leaves them."""

    def __init__(self, file: Path):
        self._file = file
        self._reset()

    def _reset(self) -> None:
        self._longest: list[tuple[float, float, int, str]] = []
        self._above: Counter[float] = Counter()
        self._n, self._cpu_ms, self._longest_wall_ms = 0, 0.0, 0.0

    def record(self, handle: asyncio.Handle, wall_ms: float, cpu_ms: float) -> None:
        """Count a callback that has run."""
        self._n += 1
        self._cpu_ms += cpu_ms
        self._longest_wall_ms = max(self._longest_wall_ms, wall_ms)
        if cpu_ms < EDGES_MS[0]:
            return
        self._above.update(edge for edge in EDGES_MS if cpu_ms >= edge)
        if len(self._longest) < N_KEPT or cpu_ms > self._longest[0][0]:
            entry = (cpu_ms, wall_ms, self._n, _described(handle))
            if len(self._longest) < N_KEPT:
                heapq.heappush(self._longest, entry)
            else:
                heapq.heapreplace(self._longest, entry)

    def write(self) -> None:
        """Write the times so far and forget them."""
        longest = [{"cpu_ms": c, "wall_ms": w, "callback": name} for c, w, _, name in sorted(self._longest)[::-1]]
        above = {str(edge): self._above[edge] for edge in EDGES_MS}
        report = {
            "n": self._n,
            "cpu_ms": self._cpu_ms,
            "longest_wall_ms": self._longest_wall_ms,
            "n_above_ms": above,
            "longest": longest,
        }
        draft = self._file.with_name(self._file.name + ".part")
        draft.write_text(json.dumps(report), encoding="utf-8")
        draft.replace(self._file)
        self._reset()


def _described(handle: asyncio.Handle) -> str:
    """The callback's function, or the coroutine that a task runs, with its place."""
    callback: Any = handle._callback  # type: ignore[attr-defined]
    task = getattr(callback, "__self__", None)
    if isinstance(task, asyncio.Task):
        frames = task.get_stack(limit=1)
        code = frames[-1].f_code if frames else getattr(task.get_coro(), "cr_code", None)
        return f"{task.get_name()}: {task.get_coro()} {code}"
    return repr(callback)


def _timed(times: CallbackTimes) -> None:
    run = asyncio.Handle._run  # type: ignore[attr-defined]

    def timed_run(handle: asyncio.Handle) -> None:
        wall, cpu = time.perf_counter(), time.thread_time()
        run(handle)
        cpu_ms = 1000 * (time.thread_time() - cpu)
        times.record(handle, 1000 * (time.perf_counter() - wall), cpu_ms)

    asyncio.Handle._run = timed_run  # type: ignore[attr-defined]


def main() -> int:
    times = CallbackTimes(Path(sys.argv[1]))
    _timed(times)
    signal.signal(signal.SIGUSR1, lambda *_: times.write())
    return serve(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
