"""Times a worker process from outside: start with an empty and a filled cache, /health, live conversations.

`python -m benchmarks.worker --help` lists the options; README.md explains the table.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import report
from benchmarks.worker.process import ROOT, ClientRun, ClientScript, WorkerProcess, converse
from worker.protocol.messages import Spec

STATES = ("LOADING", "COMPILING", "WARMING_UP", "IDLE", "BUSY")


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.worker", description="Times a worker process.")
    parser.add_argument("--sessions", type=_numbers, default=(1, 2), help="numbers of concurrent conversations")
    parser.add_argument("--units", type=int, default=30, help="seconds of each conversation")
    parser.add_argument("--video", type=Path, default=ROOT / "assets/warmup.mp4", help="media file that clients send")
    parser.add_argument("--starts", default="cold,cached", help="cold, cached, or both, in this order")
    parser.add_argument("--cache", type=Path, help="cache folder; default: a temporary one")
    parser.add_argument("--sound", choices=("base64", "pcm16", "float32"), default="base64", help="encoding of sound")
    parser.add_argument("--eager", action="store_true", help="do not compile")
    parser.add_argument("--unload", action="store_true", help="unload the model at the end")
    parser.add_argument("--logs", type=Path, help="folder for the worker's logs; default: a temporary one")
    parser.add_argument("--json", type=Path, help="write all results here")
    parser.add_argument("worker", nargs="*", help="arguments for worker.main, after --")
    options = parser.parse_args(arguments)
    if not set(options.starts.split(",")) <= {"cold", "cached"}:
        parser.error(f"--starts: expected cold, cached or both, got {options.starts}")
    return options


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(sorted({int(part) for part in text.split(",")}))


def main(arguments: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    result: dict[str, Any] = {
        "command": ["python", "-m", "benchmarks.worker", *arguments],
        "environment": report.environment(device),
        "starts": [],
        "rows": [],
    }
    with tempfile.TemporaryDirectory() as folder:
        cache = options.cache or Path(folder) / "cache"
        for kind in options.starts.split(","):
            log = (options.logs or Path(folder)) / f"{kind}.log"
            log.parent.mkdir(parents=True, exist_ok=True)
            with WorkerProcess(_worker_arguments(options), cache, log) as worker:
                result["starts"].append(_started(kind, worker))
                if kind == options.starts.split(",")[-1]:
                    _conversations(options, worker, result)
                    if options.unload:
                        result["unload"] = _unload(worker)
            result["starts"][-1]["exit_status"] = worker.exit_status
            if options.json:
                report.write_json(options.json, result)


def _worker_arguments(options: argparse.Namespace) -> list[str]:
    compiled = "--no-compile" if options.eager else "--compile"
    return [compiled, "--max-sessions", str(options.sessions[-1]), *options.worker]


def _started(kind: str, worker: WorkerProcess) -> dict[str, Any]:
    health = worker.health
    row = {
        "kind": kind,
        "total_s": worker.start_s,
        "stages_s": health["start_seconds"],
        "weights": health["model"]["weights"],
        "states": list(worker.states),
        "compile": health["compile"],
        "memory": health["memory"],
        "health_ms": {state: _percentiles(list(worker.polls[state])) for state in STATES if worker.polls[state]},
    }
    stages = ", ".join(f"{state.lower()} {seconds:.1f}" for state, seconds in row["stages_s"].items())
    print(f"{kind:7} start {row['total_s']:6.1f} s ({stages}), resident {health['memory']['resident'] / 1e6:.0f} MB")
    print(_weights(row["weights"]))
    for state, ms in row["health_ms"].items():
        print(_poll_row(state, ms))
    return row


def _weights(load: dict[str, float]) -> str:
    """Reading rates of the weights; files in the page cache are faster than the disk."""
    return f"        weights {load['bytes'] / 1e9:.2f} GB in {load['seconds']:.2f} s, {load['gb_per_s']:.2f} GB/s"


def _poll_row(state: str, ms: dict[str, float]) -> str:
    return f"        /health while {state:10} p50 {ms['p50']:6.1f}  p99 {ms['p99']:6.1f}  max {ms['max']:6.1f} ms"


def _conversations(options: argparse.Namespace, worker: WorkerProcess, result: dict[str, Any]) -> None:
    spec = Spec(sound_in=options.sound, sound_out=options.sound)
    script = ClientScript.of(options.video, options.units, spec, {"force_listen_count": 0})
    columns = f"{'sessions':8}{'decision':>10}{'units':>7}{'reply p50':>11}{'p95':>8}{'p99':>8}"
    print(f"{columns}{'first sound p95':>17}{'late':>6}  (ms)")
    for n_sessions in options.sessions:
        worker.polls.clear()
        runs = converse(worker, script, n_sessions)
        time.sleep(0.2)
        for decision in ("LISTEN", "SPEAK"):
            row = _row(n_sessions, decision, runs)
            if row is None:
                continue
            result["rows"].append(row)
            reply, first = row["reply_ms"], row["first_sound_ms"]
            sound = f"{first['p95']:.1f}" if first else "-"
            print(
                f"{n_sessions:8}{decision:>10}{row['n']:7}{reply['p50']:11.1f}{reply['p95']:8.1f}{reply['p99']:8.1f}"
                f"{sound:>17}{row['n_late']:6}"
            )
        busy = _percentiles(worker.polls["BUSY"])
        result["rows"].append({"sessions": n_sessions, "health_ms": busy, "memory": worker.health["memory"]})
        if busy:
            print(_poll_row("BUSY", busy))
    late, resident = worker.health["compile"]["after_warm_up"], worker.health["memory"]["resident"]
    print(f"resident {resident / 1e6:.0f} MB; since warm-up: {late}")


def _unload(worker: WorkerProcess) -> dict[str, Any]:
    start = time.perf_counter()
    response = worker.ask("POST", "/model/unload")
    seconds, memory = time.perf_counter() - start, response["memory"]
    print(f"unloaded in {seconds:.1f} s: {memory['before'] / 1e6:.0f} MB to {memory['after'] / 1e6:.0f} MB")
    return {"seconds": seconds, **memory}


def _row(n_sessions: int, decision: str, runs: list[ClientRun]) -> dict[str, Any] | None:
    pairs = [
        (ms, one)
        for run in runs
        for ms, one in zip(run.replies_ms, run.results, strict=True)
        if one.is_listen == (decision == "LISTEN")
    ]
    if not pairs:
        return None
    first = [one.stages["first_sound"] for _, one in pairs if one.stages.get("first_sound") is not None]
    return {
        "sessions": n_sessions,
        "decision": decision,
        "n": len(pairs),
        "reply_ms": _percentiles([ms for ms, _ in pairs]),
        "wall_clock_ms": _percentiles([one.wall_clock_ms for _, one in pairs]),
        "first_sound_ms": _percentiles(first),
        "n_late": sum(ms > 1000 for ms, _ in pairs),
        "kv_rows": max(one.kv_cache_length for _, one in pairs),
    }


def _percentiles(values: list[float]) -> dict[str, float] | None:
    if not values:
        return None
    p50, p95, p99 = np.percentile(values, (50, 95, 99))
    return {"p50": float(p50), "p95": float(p95), "p99": float(p99), "max": max(values)}


if __name__ == "__main__":
    main()
