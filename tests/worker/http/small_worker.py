"""A worker process with few slots and short sound, which whole files of tests talk to."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.worker.http.processes import Talker, WorkerProcess, running
from worker.protocol.messages import Result

N_SLOTS = 3
SMALL = {"duplex": {"euler_steps": 1, "max_backlog_mb": 1}}


@contextmanager
def small_worker(folder: Path) -> Iterator[WorkerProcess]:
    flags = ("--max-sessions", str(N_SLOTS), "--max-warmup-chunks", "2")
    with running(folder, *flags, config=SMALL) as process:
        yield process


def heard_alone(worker: WorkerProcess) -> Callable[..., list[Result]]:
    """Gives results of a session that has the worker for itself, computed once."""
    known: dict[str, list[Result]] = {}

    def results(config: dict[str, Any], n: int, **given: Any) -> list[Result]:
        key = repr((config, n, given))
        if key not in known:
            with Talker(worker) as talker:
                talker.prepare(config)
                known[key] = talker.units(range(n), **given)
            worker.wait_free(N_SLOTS)
        return known[key]

    return results
