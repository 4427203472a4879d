"""Options of the unit benchmark. `python -m benchmarks.duplex --help` lists them. Does not run anything."""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.compile_options import TOGGLES, WAYS
from benchmarks.duplex.bench_sessions import SPOKEN_UNITS
from models.checkpoint.precision import PRESETS
from worker.config.compile import TARGETS

PARTS = ("latency", "sessions", "correctness", "start", "first_sound", "profile", "toggles")
UNQUANTIZED_PARTS = ("toggles",)
TURN_S = 2 * SPOKEN_UNITS  # seconds of a turn and of the silence after it
# Settings that may differ between the commands of one result: extent and output paths.
UNCHECKED_ON_RESUME = {
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

JsonDict = dict[str, Any]


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    has_cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.duplex", description="Measures the duplex engine.")
    parser.add_argument(
        "--config", choices=("tiny", "real"), default="tiny", help="real: released size, random weights"
    )
    parser.add_argument("--device", default="cuda" if has_cuda else "cpu", choices=("cpu", "cuda"))
    parser.add_argument(
        "--parts",
        type=_name_list(PARTS),
        help=f"some of {','.join(PARTS)}, or all; default: the first four that can run",
    )
    parser.add_argument("--way", choices=WAYS, help="how the engine runs; default: ours on a GPU, eager on a CPU")
    parser.add_argument("--budget-s", type=float, default=float("inf"), help="end after this many seconds")
    parser.add_argument("--json", type=Path, help="write all results to this file, after each result")
    parser.add_argument("--summary", type=Path, help="write the key figures to this file; null: not measured")
    parser.add_argument(
        "--folder", type=Path, help="keep kernels and intermediate results here; default: a temporary folder"
    )
    parser.add_argument("--resume", type=Path, help="continue this result of an earlier command with the same settings")
    parser.add_argument(
        "--cache-dir", type=Path, help="use and keep the compiled kernels in this folder; default: an empty folder"
    )
    parser.add_argument("--no-warm-up", action="store_true", help="start engines without the warm-up conversation")
    parser.add_argument(
        "--early-prefill",
        action=argparse.BooleanOptionalAction,
        default="auto",
        help="feed pictures before their units, or not; default: as duplex.early_prefill auto",
    )
    parser.add_argument(
        "--kv-layout",
        choices=("slots", "pages"),
        default="slots",
        help="model.kv_layout; correctness and toggles have slots",
    )
    parser.add_argument(
        "--decode-copy",
        action="store_true",
        help="model.decode_copy on, also with more slots or less memory than by default; without it off",
    )
    parser.add_argument(
        "--weights",
        choices=tuple(PRESETS),
        default="bf16",
        help=f"model.weights; of all parts but {' and '.join(UNQUANTIZED_PARTS)}. Of correctness only the regions then",
    )
    parser.add_argument("--llm-len", type=int, default=4608, help="context rows of a slot")
    parser.add_argument("--voices-s", type=float, default=12.0, help="seconds of voice prompts that fit")
    parser.add_argument("--frames", type=int, choices=(0, 1), default=1, help="images in each unit")
    parser.add_argument("--units", type=int, default=60, help="latency: units timed in each mode")
    parser.add_argument(
        "--context", type=int, default=1000, help="latency: context rows at the start of a conversation"
    )
    parser.add_argument(
        "--lead-s",
        type=float,
        default=0.5,
        help="latency: seconds by which pictures come before their units; 0: only with them",
    )
    parser.add_argument("--sessions", type=_number_list, default=(1, 4, 8, 16, 32, 64), help="numbers of live sessions")
    parser.add_argument("--seconds", type=float, default=8.0, help="sessions: measured seconds of each row")
    parser.add_argument(
        "--warm-seconds", type=float, default=2.0, help="sessions: seconds before the measurement, in which they begin"
    )
    parser.add_argument(
        "--contexts",
        type=_number_list,
        default=(1000, 3000),
        help="sessions: context rows of the shortest and longest prompt",
    )
    parser.add_argument(
        "--trials",
        action="store_true",
        help="sessions: those that listen send each unit in two halves, and it may run early at the first one",
    )
    parser.add_argument("--claim-units", type=int, default=3000, help="sessions: units that confirm the served number")
    parser.add_argument(
        "--claim-seconds", type=float, default=60.0, help="sessions: longest duration of the confirming run"
    )
    parser.add_argument("--correct-units", type=int, default=50, help="correctness: units of a conversation")
    parser.add_argument("--region-units", type=int, default=2, help="correctness: units whose regions are compared")
    parser.add_argument(
        "--region-limit-s", type=float, default=90.0, help="correctness: seconds after which no call is compared"
    )
    parser.add_argument(
        "--toggles", type=_name_list(TOGGLES), default=TOGGLES, help=f"some of {','.join(TOGGLES)}; default: all"
    )
    parser.add_argument("--toggle-units", type=int, default=20, help="toggles: units timed in each mode")
    parser.add_argument("--toggle-limit-s", type=float, default=150.0, help="toggles: time limit of one process")
    parser.add_argument(
        "--all-shapes", action="store_true", help="toggles: all buckets of a worker, not only those of a unit"
    )
    parser.add_argument(
        "--targets", type=_name_list(TARGETS), help="toggles: compile only these targets; default: each way's"
    )
    parser.add_argument("--no-cached", action="store_true", help="toggles: skip the second start from the cache")
    options = parser.parse_args(arguments)
    options.way = options.way or ("ours" if options.device == "cuda" else "eager")
    unquantized = () if options.weights == "bf16" else UNQUANTIZED_PARTS
    if options.parts is None:
        options.parts = tuple(part for part in PARTS[:4] if part not in unquantized)
    if wrong := [part for part in options.parts if part in unquantized]:
        parser.error(f"--parts with --weights {options.weights}: expected others, got {','.join(wrong)}")
    if "first_sound" in options.parts and options.seconds < TURN_S:
        what = f"at least {TURN_S}, a turn and the silence after it"
        parser.error(f"--parts first_sound: --seconds: expected {what}, got {options.seconds:g}")
    if options.device == "cuda" and not has_cuda:
        parser.error("--device: expected a CUDA device, got none")
    try:
        options.earlier = _load_earlier(options)
    except (OSError, ValueError) as error:
        parser.error(f"--resume: {error}")
    return options


def _load_earlier(options: argparse.Namespace) -> JsonDict | None:
    """The result that `--resume` names. Raises: ValueError if its settings or torch version differ."""
    if options.resume is None:
        return None
    earlier = json.loads(options.resume.read_text(encoding="utf-8"))
    now, before = json.loads(json.dumps(settings(options))), earlier["settings"]
    differing = [name for name in now if name not in UNCHECKED_ON_RESUME and now[name] != before.get(name)]
    if differing:
        expected = ", ".join(f"{name} {before.get(name)}" for name in differing)
        got = ", ".join(f"{name} {now[name]}" for name in differing)
        raise ValueError(f"{options.resume}: expected {expected}, got {got}")
    if earlier["environment"]["torch"] != torch.__version__:
        raise ValueError(f"expected torch {earlier['environment']['torch']}, got {torch.__version__}")
    return earlier


def settings(options: argparse.Namespace) -> JsonDict:
    values = {name: value for name, value in vars(options).items() if name != "earlier"}
    return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}


def _number_list(text: str) -> tuple[int, ...]:
    return tuple(sorted({int(part) for part in text.split(",")}))


def _name_list(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    def names(text: str) -> tuple[str, ...]:
        given = tuple(known) if text == "all" else tuple(text.split(","))
        if unknown := [name for name in given if name not in known]:
            raise argparse.ArgumentTypeError(f"expected some of {', '.join(known)}, got {', '.join(unknown)}")
        return given

    return names
