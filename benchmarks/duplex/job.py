"""Runs one part of the unit benchmark; `benchmarks.duplex.child` is its process.

The job file contains the engine to build, the part to measure and the output path. The output is rewritten after each
result, so a killed process leaves the results measured so far.
"""

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.duplex.bench_sessions import DecisionScript
from benchmarks.duplex.correctness import (
    ChoiceRecorder,
    Transcript,
    compare_regions,
    compare_repeats,
    compare_with_reference,
    run_conversation,
)
from benchmarks.duplex.engine import EngineSpec, RunningEngine, Weights, measure_ceilings, start
from benchmarks.duplex.first_sound import measure_first_sound
from benchmarks.duplex.latency import add_floors, measure_latency
from benchmarks.duplex.live_sessions import LoadPlan, measure_sessions
from benchmarks.duplex.region_profile import measure_profile
from worker.assembly.backend_flags import limit_threads

Measure = Callable[..., dict[str, Any]]  # of (running, plan, left_s, save)
PARENT_POLL_S = 1.0
EXIT_S = 5.0  # reserved for the end of the process


class BenchJob:
    """The work of one process. The job's `part` is the name of the method that `run` calls."""

    def __init__(self, job: dict[str, Any]):
        self._job, self._options = job, job["options"]
        self.spec = EngineSpec(**job["spec"])
        self._out, self._cache = Path(job["out"]), Path(job["cache"])
        self._deadline = job["launched"] + job["limit_s"]
        self.result: dict[str, Any] = {"spec": job["spec"]}

    def run(self) -> None:
        limit_threads(self.spec.device)
        getattr(self, self._job["part"])()
        self.result["is_complete"] = True
        self._save({})

    def start(self) -> None:
        """Start the engine and measure nothing else."""
        self._start().engine.close()

    def latency(self) -> None:
        with self._start(observer=DecisionScript()).engine:
            part_options = {name: self._options[name] for name in ("n_units", "context", "n_frames", "lead_s")}
            found = measure_latency(self._running, **part_options, save=lambda found: self._save({"latency": found}))
            # Last, because it allocates memory that must not count towards the units' peak.
            ceilings = measure_ceilings(self.spec)
            add_floors(found, self._running, ceilings, self._options["n_frames"])
        self._save({"ceilings": asdict(ceilings)})

    def sessions(self) -> None:
        self._under_load("sessions", measure_sessions)

    def first_sound(self) -> None:
        self._under_load("first_sound", measure_first_sound)

    def profile(self) -> None:
        self._under_load("profile", measure_profile)

    def _under_load(self, name: str, measure: Measure) -> None:
        plan = LoadPlan(**{**self._options, "contexts": tuple(self._options["contexts"])})
        with self._start(observer=DecisionScript()).engine:
            measure(self._running, plan, left_s=self._left_s, save=lambda found: self._save({name: found}))

    def reference(self) -> None:
        """Record the eager engine's tokens, the reference of `correctness`.

        Speech is off: text does not depend on speech tokens or sound.
        """
        choices = ChoiceRecorder()
        with self._start(observer=choices).engine:
            choices.record_logits(self._running)
            transcript = run_conversation(self._running, choices, self._options["n_units"], speaks=False)
        self._save({"transcript": transcript.to_json()})

    def correctness(self) -> None:
        weights, choices, n_units = Weights.create(self.spec), ChoiceRecorder(), self._options["n_units"]
        done = self._options.get("done", {})  # results of an earlier process that was killed
        self.result.update(done)
        with self._start(observer=choices, weights=weights).engine:
            choices.record_logits(self._running)
            file = None if "against_eager" in done else self._options["reference"]
            if file is not None and "transcript" in (read := json.loads(Path(file).read_text())):
                reference = Transcript.from_json(read["transcript"])
                mine = run_conversation(self._running, choices, n_units, forced=reference.choices)
                self._save({"against_eager": compare_with_reference(reference, mine, choices.own_logits)})
            known = done.get("identity")
            compare_repeats(self._running, choices, n_units, lambda found: self._save({"identity": found}), known)
            self._regions(weights)

    def regions(self) -> None:
        weights = Weights.create(self.spec)
        plain = weights if self.spec.weights == "bf16" else Weights.create(replace(self.spec, weights="bf16"))
        with self._start(observer=DecisionScript(), weights=weights).engine:
            self._regions(plain)

    def _regions(self, weights: Weights) -> None:
        limit_s = min(self._options["region_limit_s"], self._left_s() - EXIT_S)
        self._save(compare_regions(self._running, weights, self._options["region_units"], self._save, limit_s))

    def _start(self, **options: Any) -> RunningEngine:
        self._running = start(self.spec, self._job["launched"], self._cache, **options)
        self._save({"start": self._running.start, "environment": report.environment(self._running.device)})
        return self._running

    def _left_s(self) -> float:
        return self._deadline - time.time()

    def _save(self, found: dict[str, Any]) -> None:
        self.result.update(found)
        report.write_json(self._out, self.result)


def _exit_with_parent(parent: int) -> None:
    """Exit when the parent process ends, which frees the GPU memory."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_POLL_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    _exit_with_parent(os.getppid())
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(name)s: %(message)s")
    BenchJob(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))).run()
    sys.stderr.flush()
    os._exit(0)  # skips the teardown of the loaded libraries, which takes seconds
