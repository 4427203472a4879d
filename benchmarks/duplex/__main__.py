"""The duplex engine measured in one run: units, many sessions, correctness, start, and every switch by itself.

Each engine has a process of its own, one after the other, all with the same random weights. `python -m
benchmarks.duplex --help` lists the options; README.md says how to read the tables. Knows what is run in which order.
Does not measure, nor load anything.
"""

import argparse
import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from benchmarks.compile_options import TOGGLES, WAYS
from benchmarks.duplex.correctness import COMPARED_SLOTS
from benchmarks.duplex.engine import EngineSpec
from benchmarks.duplex.process import Found, Processes
from benchmarks.duplex.tables import lines, summary, toggle_table
from benchmarks.duplex.verdicts import verdict_lines, verdicts
from worker.config.compile import TARGETS

PARTS = ("latency", "sessions", "correctness", "start", "toggles")
CORRECT_SLOTS, CORRECT_ROWS = 8, 2560
STEPS = ("against_eager", "identity")  # of correctness, that a process which is cut short need not do again
# What may differ between the commands of one result: how far each goes, and where it writes.
FREE = {
    "parts",
    "toggles",
    "toggle_limit_s",
    "region_limit_s",
    "budget_s",
    "json",
    "summary",
    "cache_dir",
    "folder",
    "resume",
}
MIN_S = 15.0  # with less left no process is begun: it would not get through its imports


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    has_cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.duplex", description="Measures the duplex engine.")
    parser.add_argument(
        "--config", choices=("tiny", "real"), default="tiny", help="real: released size, random weights"
    )
    parser.add_argument("--device", default="cuda" if has_cuda else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--parts", type=_names(PARTS), default=PARTS[:-1], help=f"some of {','.join(PARTS)}, or all")
    parser.add_argument("--way", choices=WAYS, help="what is measured; default: ours on a GPU, eager on a CPU")
    parser.add_argument("--budget-s", type=float, default=float("inf"), help="end after so many seconds")
    parser.add_argument("--json", type=Path, help="write all results here, anew whenever there is one more")
    parser.add_argument("--summary", type=Path, help="write the few figures of this run here; null: not measured")
    parser.add_argument("--folder", type=Path, help="kernels and results on their way, kept; default: a temporary one")
    parser.add_argument("--resume", type=Path, help="go on with this result of an earlier command, same settings")
    parser.add_argument("--cache-dir", type=Path, help="kernels, as they are there and kept; default: fresh ones")
    parser.add_argument("--no-warm-up", action="store_true", help="starts without the conversation that ends them")
    parser.add_argument("--llm-len", type=int, default=4608, help="context rows of a slot")
    parser.add_argument("--voices-s", type=float, default=12.0, help="seconds of voices' prompts there is room for")
    parser.add_argument("--frames", type=int, choices=(0, 1), default=1, help="pictures in each unit")
    parser.add_argument("--units", type=int, default=60, help="latency: units timed in each mode")
    parser.add_argument("--context", type=int, default=1000, help="latency: rows a conversation begins with")
    parser.add_argument("--sessions", type=_numbers, default=(1, 4, 8, 16, 32, 64), help="numbers of live sessions")
    parser.add_argument("--seconds", type=float, default=8.0, help="sessions: measured in each row")
    parser.add_argument("--warm-seconds", type=float, default=2.0, help="sessions: before that")
    parser.add_argument("--contexts", type=_numbers, default=(1000, 3000), help="sessions: shortest and longest prompt")
    parser.add_argument("--claim-units", type=int, default=3000, help="sessions: least units of the number claimed")
    parser.add_argument("--claim-seconds", type=float, default=60.0, help="sessions: longest that takes")
    parser.add_argument("--correct-units", type=int, default=50, help="correctness: units of a conversation")
    parser.add_argument("--region-units", type=int, default=2, help="correctness: units whose regions are compared")
    parser.add_argument("--region-limit-s", type=float, default=90.0, help="correctness: no call compared after that")
    parser.add_argument(
        "--toggles", type=_names(TOGGLES), default=TOGGLES, help=f"some of {','.join(TOGGLES)}; default: all"
    )
    parser.add_argument("--toggle-units", type=int, default=20, help="toggles: units timed in each mode")
    parser.add_argument("--toggle-limit-s", type=float, default=150.0, help="toggles: longest that one process takes")
    parser.add_argument("--all-shapes", action="store_true", help="toggles: all sizes of a worker, not those of a unit")
    parser.add_argument("--targets", type=_names(TARGETS), help="toggles: compile only these; default: each way's")
    parser.add_argument("--no-cached", action="store_true", help="toggles: no second start from the cache")
    options = parser.parse_args(arguments)
    options.way = options.way or ("ours" if options.device == "cuda" else "eager")
    if options.device == "cuda" and not has_cuda:
        parser.error("--device: expected a CUDA device, got none")
    try:
        options.earlier = _earlier(options)
    except (OSError, ValueError) as error:
        parser.error(f"--resume: {error}")
    return options


def _earlier(options: argparse.Namespace) -> Found | None:
    """The result to go on with. Raises: ValueError if it is not of these settings and this torch."""
    if options.resume is None:
        return None
    earlier = json.loads(options.resume.read_text(encoding="utf-8"))
    now, before = json.loads(json.dumps(_settings(options))), earlier["settings"]
    differing = [name for name in now if name not in FREE and now[name] != before.get(name)]
    if differing:
        told = ", ".join(f"{name} {before.get(name)}" for name in differing)
        raise ValueError(f"expected the settings of {options.resume}, {told}; got others")
    if earlier["environment"]["torch"] != torch.__version__:
        raise ValueError(f"expected torch {earlier['environment']['torch']}, got {torch.__version__}")
    return earlier


def _settings(options: argparse.Namespace) -> Found:
    values = {name: value for name, value in vars(options).items() if name != "earlier"}
    return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(sorted({int(part) for part in text.split(",")}))


def _names(known: Sequence[str]) -> Any:
    def names(text: str) -> tuple[str, ...]:
        given = tuple(known) if text == "all" else tuple(text.split(","))
        if unknown := [name for name in given if name not in known]:
            raise argparse.ArgumentTypeError(f"expected some of {', '.join(known)}, got {', '.join(unknown)}")
        return given

    return names


class BenchRun:
    """One run under way."""

    def __init__(self, options: argparse.Namespace, command: list[str], folder: Path):
        self._options, self._folder, self._began = options, folder, time.monotonic()
        self._processes = Processes(folder)
        self._told: set[str] = set()
        self._before_s = 0.0
        now = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "torch": torch.__version__,
        }
        if options.earlier is not None:
            self.result: Found = {"resumed": [], **options.earlier, "left_out": []}
            self._before_s = self.result["wall_s"]
            before = self.result["settings"]
            parts = [part for part in PARTS if part in (*before["parts"], *options.parts)]
            self.result["settings"] = {**before, "parts": parts}
            done = [name for name, found in self.result["processes"].items() if _is_over(found)]
            self.result["resumed"].append({"command": command, "done_before": done, **now})
            return
        self.result = {
            "command": command,
            "resumed": [],
            "environment": now,
            "settings": _settings(options),
            "processes": {},
            "left_out": [],
        }

    def run(self) -> Found:
        """All parts, the most telling first."""
        try:
            self._serving("latency", 1, {"n_units": self._options.units, "context": self._options.context})
            self._serving("sessions", max(self._options.sessions), self._plan())
            if "correctness" in self._options.parts:
                self._correctness()
            if "toggles" in self._options.parts:
                self._toggles()
        finally:
            for name in self.result["processes"]:
                self._tell(name)
            self._save()
            self._end()
        return self.result

    def _plan(self) -> Found:
        options = self._options
        return {
            "counts": options.sessions,
            "seconds": options.seconds,
            "warm_s": options.warm_seconds,
            "contexts": (options.contexts[0], options.contexts[-1]),
            "claim_units": options.claim_units,
            "claim_s": options.claim_seconds,
        }

    def _serving(self, part: str, slots: int, asked: Found) -> None:
        """A part, and the starts of its engine if they are asked for: the part itself then starts from the cache."""
        starts = "start" in self._options.parts
        measures = part in self._options.parts or part in self._found(part)
        if measures and self._found(part).get("part") == "start":
            self.result["processes"].pop(part)  # an earlier command has only started it
        spec = self._spec(self._options.way, slots)
        cache = self._folder / part
        if starts:
            cold = f"cold {part}"
            if not (_is_over(self._found(part)) or cache.exists()):
                self.result["processes"].pop(cold, None)  # its kernels are gone, from which the part is to start
            if not _is_over(self._found(cold)):
                self.result["processes"].pop(part, None)  # it did not start from them
            self._process(cold, {"part": "start", "spec": spec}, cache, is_cold=True)
        elif self._options.cache_dir is not None:
            cache = self._options.cache_dir.resolve()
        if measures:
            job = {"part": part, "spec": spec, "options": {**asked, "n_frames": self._options.frames}}
            self._process(part, job, cache)
        elif starts:
            self._process(part, {"part": "start", "spec": spec}, cache)

    def _correctness(self) -> None:
        options = self._options
        cache = options.cache_dir.resolve() if options.cache_dir else self._folder / "sessions"
        is_gpu = options.device == "cuda"
        slots = CORRECT_SLOTS if is_gpu else COMPARED_SLOTS
        rows = min(CORRECT_ROWS, options.llm_len)
        asked: Found = {
            "n_units": options.correct_units,
            "region_units": options.region_units,
            "region_limit_s": options.region_limit_s,
            "reference": None,
        }
        eager = self._spec("eager", slots, llm_len=rows, warms_up=False)
        found = self._process("reference", {"part": "reference", "spec": eager, "options": asked}, cache)
        if "told" in found:
            asked["reference"] = str(self._folder / "reference.json")
            report.write_json(self._folder / "reference.json", {"told": found["told"]})
        spec = self._spec(options.way, slots, llm_len=rows, warms_up=False)
        done = {key: self._found("correctness")[key] for key in STEPS if key in self._found("correctness")}
        job = {"part": "correctness", "spec": spec, "options": {**asked, "done": done}}
        self._process("correctness", job, cache)
        # The sizes that compared units have, and no more: compiling them is most of what this takes.
        wide = {"config": "tiny", "dtype": "float32", "llm_len": rows, "warms_up": False, "unit_shapes": is_gpu}
        slots = min(slots, COMPARED_SLOTS)
        spec = self._spec("eager" if options.way == "eager" else "float32", slots, plain=True, **wide)
        self._process("float32", {"part": "regions", "spec": spec, "options": asked}, self._folder / "float32")
        if is_gpu and options.way != "eager":
            spec = self._spec("float32-kernels", slots, **wide)
            job = {"part": "regions", "spec": spec, "options": asked}
            self._process("float32 kernels", job, self._folder / "float32-kernels")

    def _toggles(self) -> None:
        """All ways, then starts from the caches of those that got through."""
        options = self._options
        sizes = {"unit_shapes": not options.all_shapes, "targets": options.targets}
        specs = {name: self._spec(name, 1, **sizes) for name in options.toggles}
        is_kept = options.cache_dir is not None
        for name, spec in specs.items():
            asked = {"n_units": options.toggle_units, "context": options.context, "n_frames": options.frames}
            job = {"part": "latency", "spec": spec, "options": asked, "is_kept": is_kept}
            self._process(f"toggle {name}", job, self._cache_of(name), options.toggle_limit_s, is_cold=not is_kept)
        for name, spec in specs.items():
            is_compiled = WAYS[name].compile.get("enabled", True) and not (options.no_cached or is_kept)
            is_whole = self._found(f"toggle {name}").get("is_complete") and self._cache_of(name).exists()
            if is_compiled and is_whole:
                job = {"part": "start", "spec": spec}
                self._process(f"cached {name}", job, self._cache_of(name), options.toggle_limit_s)

    def _cache_of(self, way: str) -> Path:
        return (self._options.cache_dir or self._folder).resolve() / f"toggle-{way}"

    def _spec(self, way: str, slots: int, **more: Any) -> Found:
        options = self._options
        given = {
            "config": options.config,
            "llm_len": options.llm_len,
            "voices_s": options.voices_s,
            "warms_up": not options.no_warm_up,
            **more,
        }
        return asdict(EngineSpec(device=options.device, way=way, slots=slots, **given))

    def _found(self, name: str) -> Found:
        return self.result["processes"].get(name, {})

    def _process(
        self, name: str, job: Found, cache: Path, limit_s: float = float("inf"), *, is_cold: bool = False
    ) -> Found:
        """What a process has found, now or in an earlier command. is_cold: its folder of kernels has to be empty."""
        if _is_over(found := self._found(name)):
            return found
        left = self._options.budget_s - (time.monotonic() - self._began)
        if left < MIN_S:
            self.result["left_out"].append(name)
            self._save()
            return {}
        if is_cold:
            shutil.rmtree(cache, ignore_errors=True)
        print(f"{time.monotonic() - self._began:7.1f} s  {name}", file=sys.stderr, flush=True)
        job = {"options": {}, **job}

        def tell(found: Found) -> None:
            kept = {"is_kept": True} if job.get("is_kept") else {}
            self.result["processes"][name] = {"part": job["part"], **kept, **job["options"].get("done", {}), **found}
            self.result["environment"].update(found.pop("environment", {}))
            self._save()

        found = self._processes.run(job, cache, min(left, limit_s, 1e6), tell)
        # It was the command that ended, not the process at a limit of its own: the next command runs it again.
        found["process"]["is_cut"] = bool(found["process"]["killed"]) and left < limit_s
        tell(found)
        self._tell(name)
        return found

    def _tell(self, name: str) -> None:
        if name not in self._told:
            self._told.add(name)
            print("\n".join(lines(name, self.result["processes"][name])), flush=True)

    def _end(self) -> None:
        told = toggle_table(self.result["processes"])
        told += verdict_lines(self.result)
        told += [f"resumed by: {' '.join(one['command'])}" for one in self.result["resumed"]]
        told += [f"left out for lack of time: {name}" for name in self.result["left_out"]]
        told += [f"{name}: {value}" for name, value in summary(self.result).items()]
        print("\n".join(told), flush=True)

    def _save(self) -> None:
        self.result["wall_s"] = self._before_s + time.monotonic() - self._began
        self.result["verdicts"] = verdicts(self.result)
        if self._options.json is not None:
            report.write_json(self._options.json, self.result)
        if self._options.summary is not None:
            report.write_json(self._options.summary, summary(self.result))


def _is_over(found: Found) -> bool:
    """Whether a process has ended by itself or at a limit of its own."""
    return "process" in found and not found["process"].get("is_cut")


def main(arguments: list[str] | None = None) -> Found:
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments)
    # Told to end, it still ends its processes and says what it has found.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    command = ["python", "-m", "benchmarks.duplex", *arguments]
    if options.folder is not None:
        options.folder.mkdir(parents=True, exist_ok=True)
        return BenchRun(options, command, options.folder.resolve()).run()
    with tempfile.TemporaryDirectory(prefix="duplex-") as folder:
        return BenchRun(options, command, Path(folder)).run()


if __name__ == "__main__":
    main()
