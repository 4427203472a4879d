"""A fleet of synthetic sessions: what gateways cost, and where they saturate.

`python -m benchmarks.fleet --help` lists the options; README.md explains the figures. `workers` has the workers and
`clients` the sessions, each in a process of its own. No model runs: units take as long as measured on a GPU.
"""

import argparse
import json
import math
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.fleet.clients import PHASES, FleetLoad, FleetOutcome
from benchmarks.fleet.workers import unit_s
from benchmarks.serve.processes import POLL_S, ROOT, START_S, ServedProgram, free_port
from server.health_watch import poll_interval_s

GATEWAY, WORKERS, AUTHORITY = "server.main", "benchmarks.fleet.workers", "server.cluster"
# All clients come from one address and have no key. All workers share a process: one that waits for a core is not lost.
NO_LIMITS = {
    "DUOLOGUE_SERVICE_MAX_QUEUE_SIZE": "100000",
    "DUOLOGUE_SERVICE_WORKER_TIMEOUT_S": "60",
    **{
        f"DUOLOGUE_SERVICE_LIMITS_{name}": "1000000"
        for name in ("SOCKETS", "SESSIONS", "REQUESTS_PER_S", "MESSAGES_PER_S", "MB_PER_S")
    },
}
SPARE_FILES = 200
SESSION_BYTES = 600_000  # of all processes together: refused before memory runs out
DEADLINE_MS = 1000.0
FULL_CORE = 0.9  # share of a core above which a process counts as saturated
USABLE = 0.7  # share of a core that the extrapolation plans with
SESSION_S = 120.0  # length of a session, for the extrapolation of the authority
PAPER = (10_000, 20_000)  # numbers of sessions for which the needs are computed, without a run


@dataclass(frozen=True)
class Used:
    """What a program has used. cpu_s: CPU seconds since its start. rss: resident bytes."""

    cpu_s: float
    rss: int


Phases = dict[str, dict[str, Used]]  # phase -> program -> what it had used at its end


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fleet", description="Synthetic sessions on gateways.")
    parser.add_argument(
        "--sessions", type=_numbers, default=(200, 1000), help="numbers of sessions with a slot; default: 200,1000"
    )
    parser.add_argument("--gateways", type=int, default=1, help="gateways, which share all workers; default: 1")
    parser.add_argument(
        "--authority", action="store_true", help="with one gateway too: an authority gives the slots (docs/cluster.md)"
    )
    parser.add_argument("--slots", type=int, default=64, help="slots of a worker; default: 64")
    parser.add_argument("--waiting", type=int, default=100, help="clients that wait in the queue; default: 100")
    parser.add_argument("--units", type=int, default=5, help="units of each session; default: 5")
    parser.add_argument(
        "--units-per-s",
        type=float,
        default=150.0,
        help="units a second of all sessions; where that is fewer than sessions, the second is stretched; default: 150",
    )
    parser.add_argument("--idle-s", type=float, default=10.0, help="seconds without a message; default: 10")
    parser.add_argument("--at-once", type=int, default=32, help="handshakes in progress at a time; default: 32")
    parser.add_argument("--json", type=Path, help="result file")
    options = parser.parse_args(arguments)
    for name in ("gateways", "slots", "units", "at_once"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: expected 1 or more, got {getattr(options, name)}")
    if options.waiting > min(options.sessions):
        parser.error(f"--waiting: expected at most --sessions ({min(options.sessions)}), got {options.waiting}")
    return options


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(sorted({int(part) for part in text.split(",")}))


def main(arguments: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments)
    result: dict[str, Any] = {
        "command": ["python", "-m", "benchmarks.fleet", *arguments],
        "environment": {
            "cores": os.cpu_count(),
            "python": sys.version.split()[0],
            "load_average": os.getloadavg()[0],
        },
        "rows": [],
    }
    for sessions in options.sessions:
        check_limits(sessions + options.waiting, options.gateways)
        row = measure(options, sessions)
        result["rows"].append(row)
        for line in lines_of(row):
            print(line, flush=True)
        if options.json:
            options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def check_limits(n_clients: int, n_gateways: int) -> None:
    """Check open files and memory before anything is started. Exits with a line for what would run out."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    # A session takes one file of the clients and of the workers, and two of its gateway.
    needed = max(n_clients, 2 * -(-n_clients // n_gateways)) + SPARE_FILES
    if hard != resource.RLIM_INFINITY and needed > hard:
        sys.exit(f"error: open files: expected a hard limit of {needed} or more (ulimit -Hn), got {hard}")
    available = psutil.virtual_memory().available
    if n_clients * SESSION_BYTES > available:
        sys.exit(
            f"error: memory: expected {n_clients * SESSION_BYTES / 1e9:.1f} GB or more, got {available / 1e9:.1f} GB"
        )


def measure(options: argparse.Namespace, sessions: int) -> dict[str, Any]:
    """One row: starts all programs, runs the clients, and computes what each phase cost."""
    n_workers = -(-sessions // options.slots)
    slots = -(-sessions // n_workers)
    load = FleetLoad(
        (),
        n_workers * slots,  # all slots have a session, so that further clients wait
        options.waiting,
        options.units,
        max(1.0, n_workers * slots / options.units_per_s),
        options.idle_s,
        options.at_once,
    )
    with ExitStack() as stack:
        workers = stack.enter_context(ServedProgram(WORKERS, "--workers", str(n_workers), "--slots", str(slots)))
        source = ("--workers", ",".join(ports_in(workers.log)))
        programs = {"workers": workers}
        if options.authority or options.gateways > 1:
            flags = ("--port", str(free_port()), *source)
            programs["authority"] = authority = stack.enter_context(ServedProgram(AUTHORITY, *flags, environ=NO_LIMITS))
            authority.wait_ready(n_ready=n_workers)
            source = ("--authority", f"127.0.0.1:{authority.port}")
        for number in range(options.gateways):
            programs[f"gateway {number}"] = _gateway(stack, number, source)
        gateways = [program for name, program in programs.items() if name.startswith("gateway")]
        for gateway in gateways:
            _wait_slots(gateway, load.sessions)
        load = replace(load, urls=tuple(f"ws://127.0.0.1:{gateway.port}" for gateway in gateways))
        used, at_s, outcome = _run_clients(load, programs)
    return row_of(load, n_workers, used, at_s, outcome)


def ports_in(text: str) -> list[str]:
    """The addresses that the process of the workers has logged."""
    found = re.search(r"ports: ([0-9,]+)", text)
    assert found is not None, f"workers: expected their ports, got {text}"
    return [f"127.0.0.1:{port}" for port in found[1].split(",")]


def _gateway(stack: ExitStack, number: int, source: tuple[str, str]) -> ServedProgram:
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    environ = {**NO_LIMITS, "DUOLOGUE_SERVICE_DATA_DIR": folder, "DUOLOGUE_LOG_LEVEL": "INFO"}
    name = ("--gateway-name", f"g{number}") if source[0] == "--authority" else ()
    flags = ("--port", str(free_port()), *source, *name, "--log-dir", folder)
    return stack.enter_context(ServedProgram(GATEWAY, *flags, environ=environ))


def _wait_slots(gateway: ServedProgram, n_slots: int) -> None:
    """Wait until a gateway has all slots."""
    end = time.monotonic() + START_S
    while f'duologue_gateway_slots{{kind="total"}} {n_slots:.1f}' not in gateway.text("/metrics"):
        if time.monotonic() > end:
            raise RuntimeError(f"{gateway.name}: expected {n_slots} slots within {START_S:g} s")
        time.sleep(POLL_S)


def _run_clients(
    load: FleetLoad, programs: Mapping[str, ServedProgram]
) -> tuple[Phases, dict[str, float], FleetOutcome]:
    """Run the clients. Returns: what programs had used at the end of each phase, when that was, what was measured."""
    command = [sys.executable, "-m", "benchmarks.fleet.clients"]
    used: Phases = {}
    at_s: dict[str, float] = {}
    with subprocess.Popen(command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as clients:
        try:
            clients.stdin.write(json.dumps(asdict(load)) + "\n")
            clients.stdin.flush()
            process = psutil.Process(clients.pid)
            for phase in PHASES:
                if (line := clients.stdout.readline().strip()) != phase:
                    raise RuntimeError(f"clients: expected the end of {phase}, got {line or 'their end'}")
                at_s[phase] = time.perf_counter()
                times = process.cpu_times()
                used[phase] = {"clients": Used(times.user + times.system, process.memory_info().rss)} | {
                    name: Used(program.cpu_s(), program.memory(full=False)["rss"]) for name, program in programs.items()
                }
            outcome = FleetOutcome(**json.loads(clients.stdout.readline()))
        finally:
            if clients.poll() is None and sys.exc_info()[0] is not None:
                clients.kill()
    return used, at_s, outcome


# --- arithmetic -----------------------------------------------------------------------------------


def row_of(
    load: FleetLoad, n_workers: int, used: Phases, at_s: Mapping[str, float], outcome: FleetOutcome
) -> dict[str, Any]:
    """The costs of each phase, from what programs had used at the ends of phases and when these were."""

    def spent_s(name: str, phase: str) -> float:
        before = PHASES[PHASES.index(phase) - 1]
        return sum(used[phase][one].cpu_s - used[before][one].cpu_s for one in used[phase] if one.startswith(name))

    def lasted_s(phase: str) -> float:
        return at_s[phase] - at_s[PHASES[PHASES.index(phase) - 1]]

    def grown(name: str) -> float:
        return sum(used["served"][one].rss - used["begin"][one].rss for one in used["begin"] if one.startswith(name))

    n, n_units = load.sessions, load.sessions * load.units
    empty = spent_s("gateway", "begin") / lasted_s("begin")  # share of a core
    idle_ms = max(0.0, 1000 * (spent_s("gateway", "idle") / lasted_s("idle") - empty) / n)
    unit_ms = 1000 * (spent_s("gateway", "served") - empty * lasted_s("served")) / n_units
    unit_ms -= idle_ms * lasted_s("served") / load.units
    expected_ms = 1000 * unit_s(-(-n // n_workers))
    row: dict[str, Any] = {
        "sessions": n,
        "workers": n_workers,
        "gateways": len(load.urls),
        "interval_s": load.interval_s,
        "admission_ms": _percentiles(outcome.admission),
        "prepared_ms": _percentiles(outcome.prepared),
        "admissions_per_s": n / outcome.admission_wall_s,
        "gateway_ms": {
            "admission": 1000 * spent_s("gateway", "admitted") / n,
            "empty_second": 1000 * empty / len(load.urls),
            "idle_second": idle_ms,
            "unit": max(0.0, unit_ms),
        },
        "gateway_bytes_per_session": grown("gateway") / n,
        "reply_ms": _percentiles(outcome.replies),
        "reply_above_unit_ms": _percentiles([reply - expected_ms for reply in outcome.replies]),
        "late": sum(reply > DEADLINE_MS for reply in outcome.replies) / len(outcome.replies),
        "cores": {
            phase: {name: spent_s(name, phase) / lasted_s(phase) for name in used[phase]}
            for phase in ("admitted", "served")
        },
        "queue": {
            "waiting": load.waiting,
            "displaced": displacement(outcome.order),
            "wait_ms": _percentiles(outcome.waits) if outcome.waits else None,
        },
    }
    if "authority" in used["begin"]:
        # A session costs one request for a slot and one return; a slot is given to each client of the queue, too.
        n_leases = n + load.waiting
        spent = spent_s("authority", "admitted") + spent_s("authority", "released")
        empty = spent_s("authority", "begin") / lasted_s("begin")
        ms = 1000 * (spent - empty * (lasted_s("admitted") + lasted_s("released"))) / n_leases
        idle_ms = 1000 * spent_s("authority", "idle") / lasted_s("idle")
        row["authority_ms"] = {"lease": max(0.0, ms), "idle_second": idle_ms}
    row["full"] = sorted(
        {name for shares in row["cores"].values() for name, share in shares.items() if share > FULL_CORE}
    )
    row["sessions_of_a_core"] = sessions_of_a_core(row["gateway_ms"])
    row["paper"] = [on_paper(row, n) for n in PAPER]
    return row


def sessions_of_a_core(gateway_ms: Mapping[str, float]) -> float:
    """Sessions with a unit a second that a gateway on one core carries, with 0.3 of the core left; by arithmetic."""
    busy_ms = gateway_ms["idle_second"] + gateway_ms["unit"]
    return max(0.0, USABLE * 1000 - gateway_ms["empty_second"]) / busy_ms if busy_ms else 0.0


def on_paper(row: Mapping[str, Any], n: int) -> dict[str, float | None]:
    """Gateways, memory and share of the authority's core for `n` sessions with one unit a second, computed from a row.

    Gateways and authority ask workers for their health, less often the more workers there are, so their time without a
    session is taken as proportional to the number of requests, which is an upper bound.

    empty_core: share of a gateway's core for a second without sessions. gateways: None if that is all it may use.
    authority_core: its share of a core if a session lasts `SESSION_S`; above 1 one process does not suffice.
    """
    cost, growth = row["gateway_ms"], polls_per_s(row["workers"] * n / row["sessions"]) / polls_per_s(row["workers"])
    empty_ms, busy_ms = cost["empty_second"] * growth, n * (cost["idle_second"] + cost["unit"])
    free_ms = 1000 * USABLE - empty_ms
    found: dict[str, float | None] = {"sessions": n, "empty_core": empty_ms / 1000}
    found["gateways"] = math.ceil(busy_ms / free_ms) if free_ms > 0 else None
    found["gateway_gb"] = n * row["gateway_bytes_per_session"] / 1e9
    if "authority_ms" in row:
        authority = row["authority_ms"]
        found["authority_core"] = (authority["idle_second"] * growth + authority["lease"] * n / SESSION_S) / 1000
    return found


def polls_per_s(n_workers: float) -> float:
    """Requests for health that a gateway sends each second."""
    return n_workers / poll_interval_s(math.ceil(n_workers))


def displacement(order: Sequence[int]) -> dict[str, float]:
    """How far clients were from the place of their arrival when they got a slot: share moved, and the largest move."""
    moves = [abs(place - number) for place, number in enumerate(order)]
    return (
        {"share": sum(move > 0 for move in moves) / len(moves), "max": max(moves)} if moves else {"share": 0, "max": 0}
    )


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    names = ("p50", "p95", "p99", "max")
    return dict(zip(names, map(float, np.percentile(values, (50, 95, 99, 100))), strict=True))


def lines_of(row: Mapping[str, Any]) -> list[str]:
    """The row in words."""
    cost, queue, served = row["gateway_ms"], row["queue"], row["cores"]["served"]
    admission, above, moved = row["admission_ms"], row["reply_above_unit_ms"], queue["displaced"]
    waits = queue["wait_ms"]
    lines = [
        f"{row['sessions']} sessions, {row['workers']} workers, {row['gateways']} gateways; "
        f"a unit of a session every {row['interval_s']:g} s",
        f"  admission: {row['admissions_per_s']:.0f} a second; ms p50 {admission['p50']:.1f}, "
        f"p95 {admission['p95']:.1f}, max {admission['max']:.1f}",
        f"  gateway, CPU ms: admission {cost['admission']:.2f}, unit {cost['unit']:.3f}, idle session-second "
        f"{cost['idle_second']:.3f}, second without sessions {cost['empty_second']:.0f}",
        f"  gateway, memory: {row['gateway_bytes_per_session'] / 1000:.0f} kB a session",
        f"  replies above the unit's time, ms: p50 {above['p50']:.1f}, p95 {above['p95']:.1f}, p99 {above['p99']:.1f}; "
        f"late {100 * row['late']:.2f} %",
        "  shares of a core, serving: " + ", ".join(f"{name} {share:.2f}" for name, share in served.items()),
        f"  queue of {queue['waiting']}: {100 * moved['share']:.0f} % out of order, by {moved['max']} at most"
        + (f"; from a freed slot to its client p50 {waits['p50']:.1f}, p95 {waits['p95']:.1f} ms" if waits else ""),
    ]
    if "authority_ms" in row:
        authority = row["authority_ms"]
        rate = 1000 / authority["lease"] if authority["lease"] else 0
        lines.append(
            f"  authority, CPU ms: lease {authority['lease']:.3f} ({rate:.0f} a second of a core), "
            f"a second without requests {authority['idle_second']:.1f}"
        )
    lines.append(f"  on paper: {row['sessions_of_a_core']:.0f} sessions a core of gateways at {USABLE:g} of it")
    for one in row["paper"]:
        authority = f", {one['authority_core']:.2f} of a core for the authority" if "authority_core" in one else ""
        lines.append(
            f"  on paper, {one['sessions']} sessions of {SESSION_S:.0f} s: "
            f"{one['gateways'] or 'no number of'} gateways, each with {one['empty_core']:.2f} of a core for the health "
            f"of workers, {one['gateway_gb']:.1f} GB for sessions{authority}"
        )
    if row["full"]:
        lines.append(f"  saturated: {', '.join(row['full'])}")
    return lines


if __name__ == "__main__":
    main()
