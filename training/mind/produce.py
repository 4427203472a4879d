"""Producers: processes that draw records and write them as shards to a folder, as fast as they can.

Each producer writes its own numbers, so that several never make the same record. A full folder makes them wait.
"""

import contextlib
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from models.errors import ModelError
from training.mind.examples import Examples, Task
from training.mind.records import Record, read_records, write_records
from training.mind.stock.utterances import Stock
from training.mind.voices import engine_voices, training_voices

# Records of each task in a shard, about as many as a step needs with the shares at the end of the curriculum.
SHARD: dict[Task, int] = {"text": 32, "echo": 4, "captions": 1, "talk": 9, "written": 4, "chat": 16}
SPEECH_SHARD: dict[Task, int] = {"echo": 6, "talk": 2}
SPOKEN_LESSONS = 24  # in place of `echo` where the sentences of lessons are there already
# Of each shard that is held out.
HELD_OUT: dict[Task, int] = {"text": 16, "echo": 2, "captions": 2, "talk": 2, "written": 2, "chat": 6}
MAX_WAITING = 64  # shards in the folder
WAIT_S = 0.5
MAX_FAILURES = 10  # shards of one producer


@dataclass(frozen=True)
class ProducerPlan:
    """What is made.

    Args:
        examples: without voices; a producer starts its own, unless `silent`.
        folder: of the shards.
        first: first record number of this run; later runs begin elsewhere.
        shard: records of each task in a shard.
        silent: noise stands in for speech.
        stock: utterances and pictures are used in several records, see `Stock`.
        n_held_out: shards of phrases and scenes that training never sees; they are made early, the same in every run.
    """

    examples: Examples
    folder: Path
    first: int = 0
    shard: tuple[tuple[Task, int], ...] = tuple(SHARD.items())
    silent: bool = False
    stock: bool = False
    n_held_out: int = 0


class Producers:
    """Processes that write shards until `stop`."""

    def __init__(self, plan: ProducerPlan, n: int):
        plan.folder.mkdir(parents=True, exist_ok=True)
        self._folder = plan.folder
        context = multiprocessing.get_context("spawn")
        self._processes = [context.Process(target=_produce, args=(plan, i, n), daemon=True) for i in range(n)]
        for process in self._processes:
            process.start()

    def take(self) -> Iterator[list[Record]]:
        """The records of all shards that are there; their files are removed."""
        return self._take("*.shard")

    def take_held_out(self) -> Iterator[list[Record]]:
        """As `take`, for records that are held out."""
        return self._take("*.held")

    def _take(self, pattern: str) -> Iterator[list[Record]]:
        for file in sorted(self._folder.glob(pattern)):
            records = read_records(file)
            file.unlink()
            yield records

    @property
    def n_alive(self) -> int:
        return sum(process.is_alive() for process in self._processes)

    def pause(self) -> None:
        """Stop the processes until `resume`, so that the cores are free."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, number)

    def stop(self) -> None:
        """End all processes and remove what they have not finished."""
        for process in self._processes:
            process.terminate()
        self.resume()
        for process in self._processes:
            process.join()
        for file in self._folder.glob("*"):
            file.unlink()


def make_shard(examples: Examples, shard: Iterable[tuple[Task, int]], first: int, number: int) -> list[Record]:
    """The records of one shard. first: record number where shard 0 begins."""
    return [examples.record(task, first + number * n + i) for task, n in shard for i in range(n)]


def started(plan: ProducerPlan, number: int) -> tuple[Examples, Examples]:
    """The examples of a producer with voices, and those that are held out, which are the same in every run."""
    held_out = replace(plan.examples, split="held_out", sentences=())
    if plan.silent:
        return plan.examples, held_out
    voices = training_voices()
    stock = Stock(voices, f"{plan.first} {number}") if plan.stock else None
    return replace(plan.examples, voices=voices, stock=stock), replace(held_out, voices=engine_voices())


def _produce(plan: ProducerPlan, number: int, n: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.nice(5)
    torch.set_num_threads(1)
    (examples, held_out), parent = started(plan, number), os.getppid()
    failures = 0
    tasks = [(task, n) for task, n in HELD_OUT.items() if task in dict(plan.shard)]
    while os.getppid() == parent:
        if len(list(plan.folder.glob("*.shard"))) >= MAX_WAITING:
            time.sleep(WAIT_S)
            continue
        try:
            records = make_shard(examples, plan.shard, plan.first, number)
            write_records(plan.folder / f"{number:08d}.shard", records)
            if number < plan.n_held_out:
                write_records(plan.folder / f"{number:08d}.held", make_shard(held_out, tasks, 0, number))
        except (ModelError, ValueError, IndexError):
            # A text that an engine cannot speak costs its shard; many of them are a fault of the machine.
            failures += 1
            traceback.print_exc()
            if failures > MAX_FAILURES:
                raise
        number += n
