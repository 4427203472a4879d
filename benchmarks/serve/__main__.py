"""Live clients through a gateway: latency with a real worker, and overhead of the gateway.

`python -m benchmarks.serve --help` lists the options; README.md explains the tables. `processes` has the server
processes, `clients` the clients, which run in a separate process.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from prometheus_client.parser import text_string_to_metric_families

from benchmarks import report
from benchmarks.serve.clients import Load
from benchmarks.serve.processes import ROOT, ServedProgram, ServeOutcome, free_port, put_under
from benchmarks.serve.recorded import RECORDED_HEAD, recorded_line, recorded_row
from models.checkpoint.embedded import TINY

UNIT_MS, DEADLINE_MS = 1000.0, 1000.0
# The end of speech falls anywhere within a unit, which is processed when it is complete.
ALIGNMENT_MS = UNIT_MS * (np.arange(100) + 0.5) / 100
RELAY = "duologue_gateway_relay_seconds"
GATEWAY, WORKER, NULL = "server.main", "worker.main", "benchmarks.serve.fake_worker"
Percentiles = dict[str, float]


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serve", description="Times live clients.")
    parser.add_argument(
        "--sessions", type=_numbers, default=(1, 2), help="numbers of clients of the real worker; 0: none"
    )
    parser.add_argument(
        "--gateway-sessions", type=_numbers, default=(1, 8, 32), help="numbers of clients of the fake worker"
    )
    parser.add_argument(
        "--recorded-sessions",
        type=_numbers,
        default=(30,),
        help="numbers of clients whose sessions are recorded; 0: none",
    )
    parser.add_argument("--units", type=int, default=30, help="seconds of each conversation")
    parser.add_argument(
        "--rounds", type=int, default=2, help="alternating conversations with and without gateway, which share --units"
    )
    parser.add_argument("--video", type=Path, default=ROOT / "assets/warmup.mp4", help="media file that clients send")
    parser.add_argument("--sound", choices=("base64", "pcm16", "float32"), default="pcm16", help="encoding of sound")
    parser.add_argument("--model-path", type=Path, default=TINY, help="checkpoint folder; default: %(default)s")
    parser.add_argument("--device", default="auto", help="device of the worker: auto, cpu, cuda, cuda:N")
    parser.add_argument("--compile", action="store_true", help="compile at start")
    parser.add_argument("--max-sessions", type=int, help="slots of the worker; default: the largest of --sessions")
    parser.add_argument("--cache", type=Path, help="folder of compiled kernels; default: a temporary one")
    parser.add_argument("--json", type=Path, help="result file")
    options = parser.parse_args(arguments)
    if not 1 <= options.rounds <= options.units:
        parser.error(f"--rounds: expected 1 to --units ({options.units}), got {options.rounds}")
    return options


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(sorted({int(part) for part in text.split(",") if int(part)}))


def main(arguments: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() and options.device != "cpu" else "cpu")
    result: dict[str, Any] = {
        "command": ["python", "-m", "benchmarks.serve", *arguments],
        # Load average before the run.
        "environment": {**report.environment(device), "load_average": os.getloadavg()[0]},
        "alignment_ms": {"mean": UNIT_MS / 2, "p95": 0.95 * UNIT_MS, "by": "construction: units are whole seconds"},
        "worker": [],
        "gateway": [],
        "recorded": [],
    }
    parts = (
        (_real, options.sessions),
        (_overhead, options.gateway_sessions),
        (_recorded, options.recorded_sessions),
    )
    for part, sessions in parts:
        if sessions:
            part(options, result)
        if options.json:
            report.write_json(options.json, result)


def _gateway(stack: ExitStack, worker: ServedProgram, environ: Mapping[str, str] = {}) -> ServedProgram:
    arguments = ("--port", str(free_port()), "--workers", f"127.0.0.1:{worker.port}", "--log-level", "INFO")
    gateway = stack.enter_context(ServedProgram(GATEWAY, *arguments, environ=environ))
    gateway.wait_log("is ready")
    return gateway


def _load(options: argparse.Namespace, url: str, sessions: int, units: int, **more: Any) -> Load:
    return Load(url, sessions, units, str(options.video), options.sound, **more)


# --- a real worker --------------------------------------------------------------------------------


def _real(options: argparse.Namespace, result: dict[str, Any]) -> None:
    slots = options.max_sessions or options.sessions[-1]
    flags = ["--port", "0", "--device", options.device, "--max-sessions", str(slots)]
    flags += ["--compile" if options.compile else "--no-compile"]
    flags += ["--model-path", str(options.model_path)]
    with ExitStack() as stack:
        cache = options.cache or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        worker = stack.enter_context(ServedProgram(WORKER, *flags, environ={"TORCHINDUCTOR_CACHE_DIR": str(cache)}))
        health = worker.wait_ready(state="IDLE")
        model = Path(health["model"]["path"]).name
        result["model"], result["device"] = {**health["model"], "path": model}, health["device"]
        gateway = _gateway(stack, worker)
        print(f"a worker ({model}, {health['device']['type']}) behind the gateway; ms")
        print(
            f"{'sessions':>8} {'decision':>8} {'units':>6} {'reply p50':>10} {'p95':>8} {'p99':>8} {'late':>5} |"
            f" {'waiting p50':>11} {'model p50':>10} {'vocoder p50':>11} {'transport p50':>13} {'p95':>6}"
        )
        firsts = []
        for sessions in options.sessions:
            url = f"ws://127.0.0.1:{gateway.port}"
            load = _load(options, url, sessions, options.units, config={"force_listen_count": 0})
            outcome = put_under(load, (gateway, worker))
            for decision in ("LISTEN", "SPEAK"):
                row = _decision(sessions, decision, outcome)
                if row is not None:
                    result["worker"].append(row)
                    print(_decision_line(row))
            row = {"sessions": sessions, **_costs(outcome, sessions), "first_sound": _first_sound(outcome)}
            result["worker"].append(row)
            firsts.append(row)
        for row in firsts:
            print(_first_line(row))
            used = ", ".join(f"{name} {ms:.1f}" for name, ms in row["cpu_ms_per_session_s"].items())
            print(f"{'':8} CPU ms a second of a session: {used}")


def _decision(sessions: int, decision: str, outcome: ServeOutcome) -> dict[str, Any] | None:
    units = [unit for unit in outcome.units if unit["is_listen"] == (decision == "LISTEN")]
    if not units:
        return None
    waits = [unit["lag"] for unit in units]  # includes the engine's waiting time
    vocoder = [unit["stages"]["sound"] or 0.0 for unit in units]
    inner_wait = [unit["stages"]["wait"] or 0.0 for unit in units]
    return {
        "sessions": sessions,
        "decision": decision,
        "n": len(units),
        "reply_ms": _percentiles([unit["reply"] for unit in units]),
        "waiting_ms": _percentiles(waits),
        # The vocoder overlaps the model. Overlapped time is attributed to the vocoder.
        "model_ms": _percentiles(
            [unit["wall"] - wait - sound for unit, wait, sound in zip(units, inner_wait, vocoder, strict=True)]
        ),
        "vocoder_ms": _percentiles(vocoder),
        "transport_ms": _percentiles([_transport(unit) for unit in units]),
        "n_late": sum(unit["reply"] > DEADLINE_MS for unit in units),
    }


def _transport(unit: dict[str, Any]) -> float:
    """The client's time minus the worker's: both hops in both directions."""
    return unit["reply"] - unit["wall"] - (unit["lag"] - (unit["stages"]["wait"] or 0.0))


def _first_sound(outcome: ServeOutcome) -> dict[str, Any] | None:
    """Time from the end of speech to the first sound of the reply, over units with sound."""
    units = [unit for unit in outcome.units if unit["first"] is not None and unit["stages"]["first_sound"] is not None]
    if not units:
        return None
    firsts = np.array([unit["first"] for unit in units])
    server = [unit["stages"]["first_sound"] + unit["lag"] - (unit["stages"]["wait"] or 0.0) for unit in units]
    whole = [unit for unit in units if unit["n_pieces"] == 1]  # in these, all of the vocoder's time precedes the sound
    return {
        "n": len(units),
        "from_sending_ms": _percentiles(firsts.tolist()),
        "worker_ms": _percentiles(server),
        "transport_ms": _percentiles([first - inner for first, inner in zip(firsts, server, strict=True)]),
        "vocoder_of_the_unit_ms": _percentiles([unit["stages"]["sound"] or 0.0 for unit in units]),
        "n_in_one_piece": len(whole),
        "from_speech_end_ms": _percentiles(np.add.outer(firsts, ALIGNMENT_MS).ravel().tolist()),
    }


def _costs(outcome: ServeOutcome, sessions: int) -> dict[str, Any]:
    cpu = {name: 1000 * one.cpu_s / outcome.wall_s / sessions for name, one in outcome.watched.items()}
    peak = {name: one.peak for name, one in outcome.watched.items()}
    return {"cpu_ms_per_session_s": cpu, "memory": peak, "wall_s": outcome.wall_s}


def _decision_line(row: dict[str, Any]) -> str:
    reply, transport = row["reply_ms"], row["transport_ms"]
    return (
        f"{row['sessions']:8} {row['decision']:>8} {row['n']:6} {reply['p50']:10.1f} {reply['p95']:8.1f} "
        f"{reply['p99']:8.1f} {row['n_late']:5} | {row['waiting_ms']['p50']:11.1f} {row['model_ms']['p50']:10.1f} "
        f"{row['vocoder_ms']['p50']:11.1f} {transport['p50']:13.1f} {transport['p95']:6.1f}"
    )


def _first_line(row: dict[str, Any]) -> str:
    first = row["first_sound"]
    if first is None:
        return f"{row['sessions']:8} no sound"

    def both(key: str) -> str:
        return f"{first[key]['p50']:.1f}/{first[key]['p95']:.1f}"

    return (
        f"{row['sessions']:8} first sound p50/p95: {both('from_speech_end_ms')} from the end of speech = alignment "
        f"500/950 by construction + worker {both('worker_ms')} + transport {both('transport_ms')}; "
        f"the unit's vocoder {both('vocoder_of_the_unit_ms')}"
    )


# --- the gateway alone ----------------------------------------------------------------------------


def _overhead(options: argparse.Namespace, result: dict[str, Any]) -> None:
    print("\nthe gateway, in front of a worker without a model; ms")
    print(
        f"{'sessions':>8} {'way':>8} {'units':>6} {'reply p50':>10} {'p95':>8} {'p99':>8} {'max':>8} |"
        f" {'CPU a session-s':>15} {'RSS MB':>7} {'PSS MB':>7}"
    )
    for sessions in options.gateway_sessions:
        with ExitStack() as stack:
            worker = stack.enter_context(ServedProgram(NULL, "--port", "0", "--slots", str(sessions)))
            gateway = _gateway(stack, worker)
            ways = {
                "direct": (f"ws://127.0.0.1:{worker.port}/ws/duplex", (worker,)),
                "gateway": (f"ws://127.0.0.1:{gateway.port}", (gateway, worker)),
            }
            outcomes: dict[str, list[ServeOutcome]] = {way: [] for way in ways}
            for number in range(options.rounds):
                order = ways.items() if number % 2 == 0 else reversed(ways.items())
                for way, (url, programs) in order:
                    load = _load(options, url, sessions, options.units // options.rounds)
                    outcomes[way].append(put_under(load, programs))
            row = _gateway_row(sessions, outcomes)
            row["relay_ms"] = _histograms(gateway.text("/metrics"))
        result["gateway"].append(row)
        for line in _gateway_lines(row):
            print(line)


def _gateway_row(sessions: int, outcomes: dict[str, list[ServeOutcome]]) -> dict[str, Any]:
    replies = {way: [unit["reply"] for one in rounds for unit in one.units] for way, rounds in outcomes.items()}
    row: dict[str, Any] = {"sessions": sessions, "n": {way: len(values) for way, values in replies.items()}}
    row["reply_ms"] = {way: _percentiles(values) for way, values in replies.items()}
    direct, through = row["reply_ms"]["direct"], row["reply_ms"]["gateway"]
    row["overhead_ms"] = {key: through[key] - direct[key] for key in ("p50", "p95", "p99")}
    for way, name in (("direct", NULL), ("gateway", GATEWAY)):
        watched = [(one.watched[name], one.wall_s) for one in outcomes[way]]
        seconds = sessions * sum(wall_s for _, wall_s in watched)
        row[f"{way}_cpu_ms_per_session_s"] = 1000 * sum(one.cpu_s for one, _ in watched) / seconds
        row[f"{way}_memory"] = {kind: max(one.peak.get(kind, 0) for one, _ in watched) for kind in ("rss", "pss")}
    return row


def _gateway_lines(row: dict[str, Any]) -> list[str]:
    lines = []
    for way in ("direct", "gateway"):
        reply, memory = row["reply_ms"][way], row[f"{way}_memory"]
        lines.append(
            f"{row['sessions']:8} {way:>8} {row['n'][way]:6} {reply['p50']:10.2f} {reply['p95']:8.2f} "
            f"{reply['p99']:8.2f} {reply['max']:8.2f} | {row[f'{way}_cpu_ms_per_session_s']:15.2f} "
            f"{memory['rss'] / 1e6:7.0f} {memory['pss'] / 1e6:7.0f}"
        )
    more = row["overhead_ms"]
    lines.append(f"{'':8} overhead p50 {more['p50']:.2f}, p95 {more['p95']:.2f}, p99 {more['p99']:.2f}")
    for direction, relay in sorted(row["relay_ms"].items()):
        lines[-1] += f"; its own {direction}: p50 {relay['p50']:.2f}, p95 {relay['p95']:.2f}, p99 {relay['p99']:.2f}"
    return lines


def _histograms(text: str) -> dict[str, Percentiles]:
    """Percentiles in ms of the gateway's relay histogram by direction, interpolated linearly."""
    counts: dict[str, list[tuple[float, float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples if family.name == RELAY else ():
            if sample.name.endswith("_bucket"):
                bucket = (1000 * float(sample.labels["le"]), sample.value)
                counts.setdefault(sample.labels["direction"], [(0.0, 0.0)]).append(bucket)
    return {direction: _of_buckets(buckets) for direction, buckets in counts.items()}


# --- recorded sessions ----------------------------------------------------------------------------


def _recorded(options: argparse.Namespace, result: dict[str, Any]) -> None:
    print(f"\nrecorded sessions; ms; a stall is a delay of the event loop above 50 ms\n{RECORDED_HEAD}")

    def start(stack: ExitStack, sessions: int, environ: Mapping[str, str]) -> ServedProgram:
        worker = stack.enter_context(ServedProgram(NULL, "--port", "0", "--slots", str(sessions)))
        return _gateway(stack, worker, environ)

    def run(gateway: ServedProgram, sessions: int) -> ServeOutcome:
        return put_under(_load(options, f"ws://127.0.0.1:{gateway.port}", sessions, options.units), (gateway,))

    for sessions in options.recorded_sessions:
        for is_recorded in (False, True):
            row = recorded_row(sessions, options.units, is_recorded=is_recorded, start=start, run=run)
            row["reply_ms"] = _percentiles(row["reply_ms"])
            result["recorded"].append(row)
            print(recorded_line(row))


def _of_buckets(buckets: Sequence[tuple[float, float]]) -> Percentiles:
    """From pairs of bucket edge and cumulative count; the last edge is infinite."""
    found, total = {}, buckets[-1][1]
    for share in (50, 95, 99):
        wanted = total * share / 100
        for (low, below), (high, upto) in pairwise(buckets):
            if upto >= wanted:
                inside = (wanted - below) / (upto - below) if upto > below else 0.0
                found[f"p{share}"] = low if np.isinf(high) else low + inside * (high - low)
                break
    return found


def _percentiles(values: Sequence[float]) -> Percentiles:
    p50, p95, p99 = np.percentile(values, (50, 95, 99))
    return {"p50": float(p50), "p95": float(p95), "p99": float(p99), "max": float(max(values))}


if __name__ == "__main__":
    main()
