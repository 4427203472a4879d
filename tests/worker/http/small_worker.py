"""A worker process with few slots and few solver steps, shared by the tests of a file."""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.models.token2wav.s3gen import tiny_s3gen
from tests.worker.http.processes import WorkerProcess, running
from tests.worker.http.scripted_client import ScriptedClient
from worker.protocol.messages import Result

N_SLOTS = 3
PROGRAM = "tests.worker.http.brief_worker"
SMALL = {"duplex": {"euler_steps": 1, "max_backlog_mb": 1}}


@contextmanager
def small_worker(folder: Path, *flags: str) -> Iterator[WorkerProcess]:
    """flags: further ones of the worker."""
    limits = ("--max-sessions", str(N_SLOTS), "--max-warmup-chunks", "2")
    conversion = {"model": {"s3gen_path": str(tiny_s3gen.write(folder))}}
    with running(folder, *limits, *flags, config={**SMALL, **conversion}, program=PROGRAM) as process:
        yield process


def undisturbed_results(worker: WorkerProcess) -> Callable[..., list[Result]]:
    """A function that returns the results of a session alone on the worker, computed once for each input."""
    known: dict[str, list[Result]] = {}

    def results(config: dict[str, Any], n: int, **given: Any) -> list[Result]:
        key = repr((config, n, given))
        if key not in known:
            with ScriptedClient(worker) as client:
                client.prepare(config)
                known[key] = client.units(range(n), **given)
            worker.wait_free(N_SLOTS)
        return known[key]

    return results


@contextmanager
def cancels_one(worker: WorkerProcess) -> Iterator[None]:
    """Check that one answer is cancelled, and none ends by itself, until all slots are free again."""
    before = ended_answers(worker)
    yield
    worker.wait_free(N_SLOTS)
    ended = ended_answers(worker) - before
    assert ended == {"cancelled": 1}, f"expected one cancelled answer, got {dict(ended)}"


def ended_answers(worker: WorkerProcess) -> Counter[str]:
    """Answers that ended so far, by how."""
    metrics = worker.ask("/metrics")[1]
    return Counter({how: int(float(n)) for how, n in re.findall(r'worker_chats_total{how="(\w+)"} (\S+)', metrics)})
