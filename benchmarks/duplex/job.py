"""One part of the unit benchmark in a process of its own, which `duplex_child` begins with a job.

The job says what to build and what to measure, and where to write; the file is written anew as results come, so that a
process that is killed leaves what it has measured.
"""

import json
import logging
import os
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.duplex.correctness import Choices, against, conversation, identity, regions, told_from
from benchmarks.duplex.engine import EngineSpec, Running, Weights, measure_ceilings, start
from benchmarks.duplex.latency import add_floors, latency
from benchmarks.duplex.live_sessions import LoadPlan, many_sessions
from benchmarks.duplex.sessions_under_test import DecisionScript
from worker.assembly.backend_flags import limit_threads

PARENT_EVERY_S = 1.0
END_S = 5.0  # what a process needs at its end


class BenchJob:
    """What one process does. part: name of one of the methods below."""

    def __init__(self, job: dict[str, Any]):
        self._job, self._options = job, job["options"]
        self.spec = EngineSpec(**job["spec"])
        self._out, self._cache = Path(job["out"]), Path(job["cache"])
        self._until = job["launched"] + job["limit_s"]
        self.result: dict[str, Any] = {"spec": job["spec"]}

    def run(self) -> None:
        if self.spec.device == "cpu":
            limit_threads()
        getattr(self, self._job["part"])()
        self.result["is_complete"] = True
        self._save({})

    def start(self) -> None:
        """Nothing but that."""
        self._start().engine.close()

    def latency(self) -> None:
        with self._start(observer=DecisionScript()).engine:
            asked = {name: self._options[name] for name in ("n_units", "context", "n_frames")}
            found = latency(self._running, **asked, save=lambda found: self._save({"latency": found}))
            # Last: it takes memory, which the unit's peak must not hold.
            ceilings = measure_ceilings(self.spec)
            add_floors(found, self._running, ceilings, self._options["n_frames"])
        self._save({"ceilings": asdict(ceilings)})

    def sessions(self) -> None:
        options = {**self._options, "contexts": tuple(self._options["contexts"])}
        with self._start(observer=DecisionScript()).engine:
            many_sessions(
                self._running,
                LoadPlan(**options),
                left_s=self._left_s,
                save=lambda found: self._save({"sessions": found}),
            )

    def reference(self) -> None:
        """Eager's words, for `correctness` to compare with; codes and sound, on which no word hangs, are left out."""
        choices = Choices()
        with self._start(observer=choices).engine:
            choices.watch(self._running)
            told = conversation(self._running, choices, self._options["n_units"], speaks=False)
        self._save({"told": asdict(told)})

    def correctness(self) -> None:
        weights, choices, n_units = Weights.of(self.spec), Choices(), self._options["n_units"]
        done = self._options.get("done", {})  # by an earlier process that was cut short
        self.result.update(done)
        with self._start(observer=choices, weights=weights).engine:
            choices.watch(self._running)
            file = None if "against_eager" in done else self._options["reference"]
            if file is not None and "told" in (read := json.loads(Path(file).read_text())):
                told = told_from(read["told"])
                mine = conversation(self._running, choices, n_units, feeds=told.choices)
                self._save({"against_eager": against(told, mine, choices.own)})
            known = done.get("identity")
            identity(self._running, choices, n_units, lambda found: self._save({"identity": found}), known)
            self._regions(weights)

    def regions(self) -> None:
        weights = Weights.of(self.spec)
        with self._start(observer=DecisionScript(), weights=weights).engine:
            self._regions(weights)

    def _regions(self, weights: Weights) -> None:
        limit_s = min(self._options["region_limit_s"], self._left_s() - END_S)
        self._save(regions(self._running, weights, self._options["region_units"], self._save, limit_s))

    def _start(self, **options: Any) -> Running:
        self._running = start(self.spec, self._job["launched"], self._cache, **options)
        self._save({"start": self._running.start, "environment": report.environment(self._running.device)})
        return self._running

    def _left_s(self) -> float:
        return self._until - time.time()

    def _save(self, found: dict[str, Any]) -> None:
        self.result.update(found)
        report.write_json(self._out, self.result)


def _end_with(parent: int) -> None:
    """A parent that was killed takes this process with it, and the GPU's memory comes free."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_EVERY_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    _end_with(os.getppid())
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(name)s: %(message)s")
    BenchJob(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))).run()
    sys.stderr.flush()
    os._exit(0)  # what is loaded takes seconds to take apart, and nothing is left to do
