"""Unit benchmark of the duplex engine: latency, live sessions, correctness, start time, and each setting by itself.

Each engine runs in its own process, one after the other, all with the same random weights. `python -m
benchmarks.duplex --help` lists the options; README.md explains the tables. Contains the order of the processes. Does
not measure.
"""

import argparse
import json
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from benchmarks.compile_options import WAYS
from benchmarks.duplex.correctness import COMPARED_SLOTS
from benchmarks.duplex.engine import EngineSpec
from benchmarks.duplex.options import PARTS, parse, settings
from benchmarks.duplex.process import JobRunner, JsonDict
from benchmarks.duplex.tables import format_process, kept_summary, summary, toggle_table
from benchmarks.duplex.verdicts import format_verdicts, verdicts

FIRST_SOUND_SESSIONS = 2  # or more: half of them speak
CORRECT_SLOTS, CORRECT_ROWS = 8, 2560
RESUMABLE_STEPS = ("against_eager", "identity")  # steps of `correctness` that a killed process need not repeat
ONE_SLOT = "profile, one slot"
MIN_PROCESS_S = 15.0  # no process starts with less time left: importing takes longer


class BenchRun:
    """One run: its processes, results and remaining time."""

    def __init__(self, options: argparse.Namespace, command: list[str], folder: Path):
        self._options, self._folder, self._started_at = options, folder, time.monotonic()
        self._processes = JobRunner(folder)
        self._printed: set[str] = set()
        self._earlier_wall_s = 0.0
        is_kept = options.summary is not None and options.summary.exists()
        self._kept_summary: JsonDict = json.loads(options.summary.read_text(encoding="utf-8")) if is_kept else {}
        now = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "torch": torch.__version__,
        }
        if options.earlier is not None:
            self.result: JsonDict = {"resumed": [], **options.earlier, "left_out": []}
            self._earlier_wall_s = self.result["wall_s"]
            before = self.result["settings"]
            parts = [part for part in PARTS if part in (*before["parts"], *options.parts)]
            self.result["settings"] = {**before, "parts": parts}
            done = [name for name, found in self.result["processes"].items() if _is_finished(found)]
            self.result["resumed"].append({"command": command, "done_before": done, **now})
            return
        self.result = {
            "command": command,
            "resumed": [],
            "environment": now,
            "settings": settings(options),
            "processes": {},
            "left_out": [],
        }

    def run(self) -> JsonDict:
        """Run all parts, the most informative first."""
        try:
            self._run_serving_part("latency", 1, self._latency_plan())
            self._run_serving_part("sessions", max(self._options.sessions), self._load_plan())
            if "correctness" in self._options.parts:
                self._run_correctness()
            if "first_sound" in self._options.parts:
                self._run_serving_part("first_sound", max(self._options.sessions), self._first_sound_plan())
            if "profile" in self._options.parts:
                self._run_profile()
            if "toggles" in self._options.parts:
                self._run_toggles()
        finally:
            for name in self.result["processes"]:
                self._print_process(name)
            self._save()
            self._print_summary()
        return self.result

    def _load_plan(self) -> JsonDict:
        options = self._options
        return {
            "counts": options.sessions,
            "seconds": options.seconds,
            "warm_s": options.warm_seconds,
            "contexts": (options.contexts[0], options.contexts[-1]),
            "claim_units": options.claim_units,
            "claim_s": options.claim_seconds,
            "trials": options.trials,
        }

    def _first_sound_plan(self) -> JsonDict:
        counts = [n for n in self._options.sessions if n >= FIRST_SOUND_SESSIONS]
        return {**self._load_plan(), "counts": counts}

    def _latency_plan(self) -> JsonDict:
        options = self._options
        return {"n_units": options.units, "context": options.context, "lead_s": options.lead_s}

    def _run_serving_part(self, part: str, slots: int, part_options: JsonDict) -> None:
        """Run a part. With `start`, start once with an empty cache first; the part then uses that cache."""
        starts = "start" in self._options.parts
        measures = part in self._options.parts or part in self._process_result(part)
        if measures and self._process_result(part).get("part") == "start":
            self.result["processes"].pop(part)  # an earlier command measured only the start
        spec = self._engine_spec(self._options.way, slots, kv_layout=self._options.kv_layout)
        cache = self._folder / part
        if starts:
            cold = f"cold {part}"
            if not (_is_finished(self._process_result(part)) or cache.exists()):
                self.result["processes"].pop(cold, None)  # the part starts from these kernels, which are gone
            if not _is_finished(self._process_result(cold)):
                self.result["processes"].pop(part, None)  # it started from other kernels
            self._run_process(cold, {"part": "start", "spec": spec}, cache, is_cold=True)
        elif self._options.cache_dir is not None:
            cache = self._options.cache_dir.resolve()
        if measures:
            job = {"part": part, "spec": spec, "options": {**part_options, "n_frames": self._options.frames}}
            self._run_process(part, job, cache)
        elif starts:
            self._run_process(part, {"part": "start", "spec": spec}, cache)

    def _run_profile(self) -> None:
        """Profile the largest number of sessions and the smaller ones, then start with one slot for its memory."""
        most = max(self._options.sessions)
        self._run_serving_part("profile", most, self._load_plan())
        if most > 1:
            cache = self._options.cache_dir.resolve() if self._options.cache_dir else self._folder / "profile"
            job = {"part": "start", "spec": self._engine_spec(self._options.way, 1, kv_layout=self._options.kv_layout)}
            self._run_process(ONE_SLOT, job, cache)

    def _run_correctness(self) -> None:
        options = self._options
        cache = options.cache_dir.resolve() if options.cache_dir else self._folder / "sessions"
        is_gpu = options.device == "cuda"
        slots = CORRECT_SLOTS if is_gpu else COMPARED_SLOTS
        rows = min(CORRECT_ROWS, options.llm_len)
        part_options: JsonDict = {
            "n_units": options.correct_units,
            "region_units": options.region_units,
            "region_limit_s": options.region_limit_s,
            "reference": None,
        }
        if options.weights != "bf16":  # whose tokens and sound are others than those of the plain model
            spec = self._engine_spec(options.way, slots, llm_len=rows, warms_up=False)
            self._run_process("correctness", {"part": "regions", "spec": spec, "options": part_options}, cache)
            return
        eager = self._engine_spec("eager", slots, llm_len=rows, warms_up=False)
        found = self._run_process("reference", {"part": "reference", "spec": eager, "options": part_options}, cache)
        if "transcript" in found:
            part_options["reference"] = str(self._folder / "reference.json")
            report.write_json(self._folder / "reference.json", {"transcript": found["transcript"]})
        spec = self._engine_spec(options.way, slots, llm_len=rows, warms_up=False)
        done = {
            key: self._process_result("correctness")[key]
            for key in RESUMABLE_STEPS
            if key in self._process_result("correctness")
        }
        job = {"part": "correctness", "spec": spec, "options": {**part_options, "done": done}}
        self._run_process("correctness", job, cache)
        # Only the buckets of the compared units: compilation takes most of the time.
        float32 = {"config": "tiny", "dtype": "float32", "llm_len": rows, "warms_up": False, "unit_shapes": is_gpu}
        slots = min(slots, COMPARED_SLOTS)
        spec = self._engine_spec("eager" if options.way == "eager" else "float32", slots, plain=True, **float32)
        self._run_process(
            "float32", {"part": "regions", "spec": spec, "options": part_options}, self._folder / "float32"
        )
        if is_gpu and options.way != "eager":
            spec = self._engine_spec("float32-kernels", slots, **float32)
            job = {"part": "regions", "spec": spec, "options": part_options}
            self._run_process("float32 kernels", job, self._folder / "float32-kernels")

    def _run_toggles(self) -> None:
        """Run all ways, then start again from the cache of each complete one."""
        options = self._options
        sizes = {"unit_shapes": not options.all_shapes, "targets": options.targets}
        specs = {name: self._engine_spec(name, 1, **sizes) for name in options.toggles}
        is_kept = options.cache_dir is not None
        for name, spec in specs.items():
            part_options: JsonDict = {"n_units": options.toggle_units, "context": options.context, "lead_s": 0.0}
            part_options["n_frames"] = options.frames
            job = {"part": "latency", "spec": spec, "options": part_options, "is_kept": is_kept}
            self._run_process(
                f"toggle {name}", job, self._toggle_cache(name), options.toggle_limit_s, is_cold=not is_kept
            )
        for name, spec in specs.items():
            is_compiled = WAYS[name].compile.get("enabled", True) and not (options.no_cached or is_kept)
            is_whole = self._process_result(f"toggle {name}").get("is_complete") and self._toggle_cache(name).exists()
            if is_compiled and is_whole:
                job = {"part": "start", "spec": spec}
                self._run_process(f"cached {name}", job, self._toggle_cache(name), options.toggle_limit_s)

    def _toggle_cache(self, way: str) -> Path:
        return (self._options.cache_dir or self._folder).resolve() / f"toggle-{way}"

    def _engine_spec(self, way: str, slots: int, **more: Any) -> JsonDict:
        options = self._options
        given = {
            "config": options.config,
            "llm_len": options.llm_len,
            "voices_s": options.voices_s,
            "warms_up": not options.no_warm_up,
            "early_prefill": options.early_prefill,
            "decode_copy": options.decode_copy,
            "weights": options.weights,
            **more,
        }
        return asdict(EngineSpec(device=options.device, way=way, slots=slots, **given))

    def _process_result(self, name: str) -> JsonDict:
        return self.result["processes"].get(name, {})

    def _run_process(
        self, name: str, job: JsonDict, cache: Path, limit_s: float = float("inf"), *, is_cold: bool = False
    ) -> JsonDict:
        """Result of a process, of an earlier command or run now. is_cold: empty its kernel cache first."""
        if _is_finished(found := self._process_result(name)):
            return found
        left = self._options.budget_s - (time.monotonic() - self._started_at)
        if left < MIN_PROCESS_S:
            self.result["left_out"].append(name)
            self._save()
            return {}
        if is_cold:
            shutil.rmtree(cache, ignore_errors=True)
        print(f"{time.monotonic() - self._started_at:7.1f} s  {name}", file=sys.stderr, flush=True)
        job = {"options": {}, **job}

        def on_result(found: JsonDict) -> None:
            kept = {"is_kept": True} if job.get("is_kept") else {}
            self.result["processes"][name] = {"part": job["part"], **kept, **job["options"].get("done", {}), **found}
            self.result["environment"].update(found.pop("environment", {}))
            self._save()

        found = self._processes.run(job, cache, min(left, limit_s, 1e6), on_result)
        # Killed by the command's budget rather than by its own limit: the next command runs it again.
        found["process"]["is_cut"] = bool(found["process"]["killed"]) and left < limit_s
        on_result(found)
        self._print_process(name)
        return found

    def _print_process(self, name: str) -> None:
        if name not in self._printed:
            self._printed.add(name)
            print("\n".join(format_process(name, self.result["processes"][name])), flush=True)

    def _print_summary(self) -> None:
        lines = toggle_table(self.result["processes"])
        lines += format_verdicts(self.result)
        lines += [f"resumed by: {' '.join(one['command'])}" for one in self.result["resumed"]]
        lines += [f"left out for lack of time: {name}" for name in self.result["left_out"]]
        lines += [f"{name}: {value}" for name, value in summary(self.result).items()]
        print("\n".join(lines), flush=True)

    def _save(self) -> None:
        self.result["wall_s"] = self._earlier_wall_s + time.monotonic() - self._started_at
        self.result["verdicts"] = verdicts(self.result)
        if self._options.json is not None:
            report.write_json(self._options.json, self.result)
        if self._options.summary is not None:
            report.write_json(self._options.summary, kept_summary(self.result, self._kept_summary))


def _is_finished(found: JsonDict) -> bool:
    """Whether a process has ended by itself or at its own limit."""
    return "process" in found and not found["process"].get("is_cut")


def main(arguments: list[str] | None = None) -> JsonDict:
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments)
    # On SIGTERM the run still kills its processes and prints its results.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    command = ["python", "-m", "benchmarks.duplex", *arguments]
    if options.folder is not None:
        options.folder.mkdir(parents=True, exist_ok=True)
        return BenchRun(options, command, options.folder.resolve()).run()
    with tempfile.TemporaryDirectory(prefix="duplex-") as folder:
        return BenchRun(options, command, Path(folder)).run()


if __name__ == "__main__":
    main()
