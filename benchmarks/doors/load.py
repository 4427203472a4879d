"""Stock sessions in one gateway at real-time pace: what they notice, and what the gateway's event loop does."""

import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.doors.client_processes import ClientProcess, client_processes
from benchmarks.doors.stock_load import StockLoad
from benchmarks.serve.processes import ROOT, ServedProgram

STOCK_PYTHON = ROOT / ".venv/clients/bin/python"  # made by run_tests.sh
DELAY = "duologue_gateway_loop_delay_seconds"
MISSED = "duologue_gateway_deadline_misses"
STALL_MS, LATE_MS = 20.0, 1000.0
WRITE_S = 5.0
Json = dict[str, Any]


def client_python(given: Path | None) -> str:
    """The interpreter of the clients: the given one, that of the stock clients, or this one."""
    if given is not None:
        return str(given)
    return str(STOCK_PYTHON) if STOCK_PYTHON.exists() else sys.executable


def stock_row(
    gateway: ServedProgram,
    times: Path,
    *,
    sessions: int,
    processes: int,
    seconds: float,
    chunk_ms: int,
    sound: bytes,
    python: str,
) -> Json:
    """Run the sessions. Returns: one row of the table.

    Args:
        gateway: a `benchmarks.doors.timed_gateway`.
        times: the file that it writes.
        processes: of clients, which share the sessions.
        sound: PCM16 at 24 kHz, which every client repeats.
        python: interpreter of the clients.
    """
    with tempfile.NamedTemporaryFile(suffix=".pcm") as file:
        file.write(sound)
        file.flush()
        counts = [sessions // processes + (number < sessions % processes) for number in range(processes)]
        firsts = [sum(counts[:number]) for number in range(processes)]
        loads = [
            StockLoad(gateway.port, count, first, sessions, seconds, chunk_ms, file.name)
            for count, first in zip(counts, firsts, strict=True)
            if count
        ]
        with client_processes(python, "benchmarks.doors.stock_load", loads) as clients:
            return _measured(gateway, times, clients, loads) | {"sessions": sessions, "chunk_ms": chunk_ms}


def _measured(gateway: ServedProgram, times: Path, clients: list[ClientProcess], loads: list[StockLoad]) -> Json:
    _callbacks(gateway, times)  # forgets those of the handshakes
    before, cpu_s, begun = _metrics(gateway), gateway.cpu_s(), time.perf_counter()
    for client in clients:
        client.expect("end")
    wall_s, cpu_s, after = time.perf_counter() - begun, gateway.cpu_s() - cpu_s, _metrics(gateway)
    callbacks = _callbacks(gateway, times)
    seen = [client.result() for client in clients]
    reply_ms = [ms for one in seen for ms in one["reply_ms"]]
    delays = {edge: n - before["delays"].get(edge, 0.0) for edge, n in after["delays"].items()}
    total = delays[float("inf")]
    return {
        "client": seen[0]["client"],
        "client_processes": len(clients),
        "wall_s": wall_s,
        "reply_ms": reply_ms,
        "n_late": sum(ms > LATE_MS for ms in reply_ms) + after["missed"] - before["missed"],
        "n_stalls": total - delays[STALL_MS / 1000],
        "delay_below_ms": 1000 * min(edge for edge, n in delays.items() if n == total),
        "callbacks": callbacks,
        "cpu_share": cpu_s / wall_s,
        "cpu_ms_per_session_s": 1000 * cpu_s / wall_s / sum(load.sessions for load in loads),
        **{key: sum(one[key] for one in seen) for key in ("n_events", "n_sound_bytes", "n_responses")},
    }


def _callbacks(gateway: ServedProgram, times: Path) -> Json:
    """Times of the event loop's callbacks since the last call."""
    times.unlink(missing_ok=True)
    os.kill(gateway.process.pid, signal.SIGUSR1)
    end = time.monotonic() + WRITE_S
    while not times.exists():
        if time.monotonic() > end:
            raise RuntimeError(f"{times}: expected the times of callbacks within {WRITE_S} s")
        time.sleep(0.01)
    found: Json = json.loads(times.read_text(encoding="utf-8"))
    return found


def _metrics(gateway: ServedProgram) -> Json:
    """Cumulative counts: `delays` of the event loop by bucket edge in s, `missed`: results with negative headroom."""
    found: Json = {"delays": {}, "missed": 0.0}
    for family in text_string_to_metric_families(gateway.text("/metrics")):
        for sample in family.samples:
            if sample.name == f"{DELAY}_bucket":
                found["delays"][float(sample.labels["le"])] = sample.value
            elif sample.name == f"{MISSED}_total":
                found["missed"] = sample.value
    return found
