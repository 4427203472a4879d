"""Asks a served model spoken questions in real time: the wait from the end of a question to the first sound.

`python -m benchmarks.turns --help` lists the options; README.md explains the table.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from benchmarks.serve.processes import ROOT, ServedProgram, free_port
from benchmarks.turns.clients import TurnLoad
from benchmarks.turns.figures import PARTS, figures, summary
from benchmarks.turns.questions import Conditions
from benchmarks.turns.script import PREFIX

SCRIPTED, WORKER, GATEWAY = "benchmarks.turns.worker", "worker.main", "server.main"
TINY = "tiny"
REAL = "real"
MIN_QUESTIONS = 3  # of each session
MODEL_VARIABLES = ("DUOLOGUE_MODEL_", "DUOLOGUE_DUPLEX_")  # settings that the result names; others may be secret
MODES = ("auto", "off")
START_S, QUESTION_S = 4.0, 2.3  # of a row's clients; mean of the set with its pauses


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.turns", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--config", default=TINY, help="tiny, real (released size, random weights, 19 GB) or a checkpoint folder"
    )
    parser.add_argument("--folder", type=Path, help="where --config real is written and kept; default: temporary")
    parser.add_argument("--url", help="a server that runs already, which decides by itself; no worker is started")
    parser.add_argument(
        "--decisions",
        choices=("script", "model"),
        default="script",
        help="script: speak when the user has been silent; model: the weights decide",
    )
    parser.add_argument("--sessions", type=_numbers, default=(1,), help="numbers of concurrent sessions, as in 1,8,32")
    parser.add_argument("--modes", type=_modes, default=MODES, help="settings of early_unit; default: auto,off")
    parser.add_argument("--questions", type=int, default=40, help="questions of a row, of all its sessions together")
    parser.add_argument("--piece-ms", type=int, default=100, help="sound in one message")
    parser.add_argument("--spoken-piece-ms", type=int, default=40, help="the same beside speech")
    parser.add_argument("--early-pause-ms", type=int, default=160, help="the setting early_pause_ms")
    parser.add_argument("--silence-ms", type=int, default=200, help="silence at a unit's end that the script answers")
    parser.add_argument("--answer-units", type=int, default=2, help="seconds of a scripted answer")
    parser.add_argument("--pauses-ms", type=_pair, default=(80, 160), help="pauses inside questions, as in 80,160")
    parser.add_argument(
        "--hesitations", type=float, default=0.0, help="share of questions with pauses of 250 to 700 ms and fillers"
    )
    parser.add_argument("--snr-db", type=float, default=25.0, help="speech above the noise")
    parser.add_argument("--answer-s", type=float, default=3.0, help="silence after a question")
    parser.add_argument("--lead-s", type=float, default=4.0, help="silence before the first question")
    parser.add_argument("--no-pictures", action="store_true", help="send sound only")
    parser.add_argument("--device", default="auto", help="device of the worker: auto, cpu, cuda, cuda:N")
    parser.add_argument("--compile", action="store_true", help="compile at start")
    parser.add_argument("--cache", type=Path, help="folder of compiled kernels; default: a temporary one")
    parser.add_argument("--seed", type=int, default=0, help="of order, pauses and noise")
    parser.add_argument("--budget-s", type=float, help="start no row that would end later; it is named as left out")
    parser.add_argument("--json", type=Path, help="result file")
    options = parser.parse_args(arguments)
    if not 20 <= options.piece_ms <= 500 or 1000 % options.piece_ms:
        parser.error(f"--piece-ms: expected a divisor of 1000 from 20 to 500, got {options.piece_ms}")
    if not 10 <= options.spoken_piece_ms <= 500:
        parser.error(f"--spoken-piece-ms: expected 10 to 500, got {options.spoken_piece_ms}")
    return options


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(sorted({int(part) for part in text.split(",") if int(part) > 0}))


def _pair(text: str) -> tuple[int, int]:
    low, high = (int(part) for part in text.split(","))
    return low, high


def _modes(text: str) -> tuple[str, ...]:
    modes = tuple(text.split(","))
    if not set(modes) <= set(MODES):
        raise argparse.ArgumentTypeError(f"expected auto, off or both, got {text}")
    return modes


def main(arguments: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() and options.device != "cpu" else "cpu")
    decisions = "model" if options.url else options.decisions
    script = {"silence_ms": options.silence_ms, "answer_units": options.answer_units}
    result: dict[str, Any] = {
        **summary([]),
        "command": ["python", "-m", "benchmarks.turns", *arguments],
        "environment": {**report.environment(device), "load_average": os.getloadavg()[0]},
        "settings": {name: value for name, value in os.environ.items() if name.startswith(MODEL_VARIABLES)},
        "decisions": decisions,
        "script": script if decisions == "script" else None,
        "rows": [],
        "left_out": [],
    }
    with ExitStack() as stack:
        worker, url = (None, options.url) if options.url else _servers(stack, options, device)
        print(_header())
        for sessions in options.sessions:
            for mode in options.modes:
                if options.budget_s and time.monotonic() - report.BEGAN + _row_s(options, sessions) > options.budget_s:
                    result["left_out"].append(f"{sessions} sessions, early_unit {mode}")
                    print(f"{sessions:8} {mode:>5} left out: no time")
                else:
                    row = _row(options, url, worker, sessions, mode)
                    result["rows"].append(row)
                    result.update(summary(result["rows"]))
                    print(*_lines(row), sep="\n", flush=True)
                if options.json:
                    report.write_json(options.json, result)


def _servers(stack: ExitStack, options: argparse.Namespace, device: torch.device) -> tuple[ServedProgram, str]:
    """Start a worker and a gateway. Returns: the worker, and the gateway's address."""
    flags = ["--port", "0", "--device", options.device, "--max-sessions", str(options.sessions[-1])]
    flags += ["--compile" if options.compile else "--no-compile", "--drain-timeout", "5"]
    if (checkpoint := _checkpoint(stack, options, device)) is not None:
        flags += ["--model-path", str(checkpoint)]
    module = WORKER
    if options.decisions == "script":
        module = SCRIPTED
        flags += ["--silence-ms", str(options.silence_ms), "--answer-units", str(options.answer_units)]
    cache = options.cache or Path(stack.enter_context(tempfile.TemporaryDirectory()))
    worker = stack.enter_context(ServedProgram(module, *flags, environ={"TORCHINDUCTOR_CACHE_DIR": str(cache)}))
    worker.wait_ready(state="IDLE")
    arguments = ("--port", str(free_port()), "--workers", f"127.0.0.1:{worker.port}", "--log-level", "INFO")
    gateway = stack.enter_context(ServedProgram(GATEWAY, *arguments))
    gateway.wait_log("is ready")
    return worker, f"ws://127.0.0.1:{gateway.port}"


def _checkpoint(stack: ExitStack, options: argparse.Namespace, device: torch.device) -> Path | None:
    """The checkpoint folder, written first for `real`; None: the embedded one."""
    if options.config == TINY:
        return None
    if options.config != REAL:
        return Path(options.config)
    folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory())) / REAL
    if not folder.exists():
        command = [sys.executable, "-m", "benchmarks.released_size", str(folder), "--device", device.type]
        subprocess.run(command, cwd=ROOT, check=True)
    return Path(folder)


def _n_questions(options: argparse.Namespace, sessions: int) -> int:
    """Questions of each session."""
    return max(-(-options.questions // sessions), MIN_QUESTIONS)


def _row_s(options: argparse.Namespace, sessions: int) -> float:
    """Seconds of a row, about."""
    return START_S + options.lead_s + _n_questions(options, sessions) * (QUESTION_S + options.answer_s + 0.5)


def _row(
    options: argparse.Namespace, url: str, worker: ServedProgram | None, sessions: int, mode: str
) -> dict[str, Any]:
    load = TurnLoad(
        url=url,
        sessions=sessions,
        n_questions=_n_questions(options, sessions),
        conditions=Conditions(options.pauses_ms, options.hesitations, options.snr_db, options.answer_s, options.lead_s),
        config={
            "early_unit": mode,
            "early_pause_ms": options.early_pause_ms,
            "force_listen_count": 0,
            "drain_s": 0.0,
        },
        prefix=PREFIX,
        piece_ms=options.piece_ms,
        spoken_piece_ms=options.spoken_piece_ms,
        pictures=not options.no_pictures,
        seed=options.seed,
    )
    before = _early_units(worker)
    command = [sys.executable, "-m", "benchmarks.turns.clients"]
    done = subprocess.run(
        command, cwd=ROOT, input=json.dumps(asdict(load)), stdout=subprocess.PIPE, text=True, check=True
    )
    after = _early_units(worker)
    trials = {name: round(after[name] - before[name], 1) for name in after}
    return {"sessions": sessions, "early_unit": mode, **figures(json.loads(done.stdout)), "trials": trials}


def _early_units(worker: ServedProgram | None) -> dict[str, float]:
    """`early_units` of the worker's /health: `speculations`, `committed` and `wasted_ms`; none of a given server."""
    counts = {} if worker is None else worker.wait_ready()["early_units"]
    return {name: value for name, value in counts.items() if not isinstance(value, str)}


def _header() -> str:
    parts = "".join(f"{name + ' p50':>15}" for name in PARTS)
    return (
        f"{'sessions':>8} {'early':>5} {'answered':>8} | {'turn p50':>9} {'p95':>7} |{parts} {'saved p50':>10} |"
        f" {'player p50':>10} {'p95':>7} | {'early':>6} {'false':>6} {'missed':>6} {'late':>5}  (ms)"
    )


def _line(row: dict[str, Any]) -> str:
    parts = "".join(f"{_ms(row[f'{name}_ms'], 'p50'):>15}" for name in PARTS)
    shares = " ".join(f"{_percent(row[name]):>6}" for name in ("early_rate", "false_starts", "missed"))
    return (
        f"{row['sessions']:8} {row['early_unit']:>5} {row['answered']:4}/{row['questions']:<3} |"
        f" {_ms(row['turn_ms'], 'p50'):>9} {_ms(row['turn_ms'], 'p95'):>7} |{parts} {_ms(row['saved_ms'], 'p50'):>10} |"
        f" {_ms(row['playback_ms'], 'p50'):>10} {_ms(row['playback_ms'], 'p95'):>7} | {shares} {row['late_units']:5}"
    )


def _lines(row: dict[str, Any]) -> list[str]:
    """The line of a row, and one of each kind of question if there are several."""
    kinds = row["kinds"] if len(row["kinds"]) > 1 else {}
    return [_line(row), *(_kind_line(kind, found) for kind, found in kinds.items())]


def _kind_line(kind: str, found: dict[str, Any]) -> str:
    return (
        f"{kind:>14} {found['answered']:4}/{found['questions']:<3} | {_ms(found['turn_ms'], 'p50'):>9}"
        f" {_ms(found['turn_ms'], 'p95'):>7} | false {_percent(found['false_starts'])}, early"
        f" {_percent(found['false_starts_early'])}, missed {_percent(found['missed'])}"
    )


def _ms(values: dict[str, float] | None, which: str) -> str:
    return "-" if values is None else f"{values[which]:.0f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f}%"


if __name__ == "__main__":
    main()
