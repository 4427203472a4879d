"""Recorded sessions through a gateway, in front of a worker without a model: what is lost, and what the relay feels.

Each number of sessions runs twice, without and with recording, so that the cost of recording is the difference.
"""

import json
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.serve.processes import ServedProgram, ServeOutcome

DELAY = "duologue_gateway_loop_delay_seconds"
UNRECORDED = "duologue_gateway_unrecorded_messages"
STALL_S = 0.05
COMPLETE_S = 1800.0
POLL_S = 0.2
Metrics = Mapping[str, list[Any]]
# Runs a number of clients through the gateway on this port. Returns: the outcome.
RunClients = Callable[[ServedProgram, int], ServeOutcome]


def recorded_row(sessions: int, units: int, *, is_recorded: bool, start: Any, run: RunClients) -> dict[str, Any]:
    """One row of the table.

    Args:
        sessions: number of clients at once.
        units: seconds of each conversation.
        is_recorded: whether the gateway records them.
        start: called with the stack, the number of slots and the gateway's environment; returns the gateway.
        run: runs the clients.
    """
    with ExitStack() as stack:
        data_dir = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        environ = {
            "DUOLOGUE_RECORDING_ENABLED": "true" if is_recorded else "false",
            "DUOLOGUE_SERVICE_DATA_DIR": str(data_dir),
        }
        gateway = start(stack, sessions, environ)
        before = _delays(gateway.text("/metrics"))
        outcome = run(gateway, sessions)
        text = gateway.text("/metrics")
        delays = {edge: count - before.get(edge, 0.0) for edge, count in _delays(text).items()}
        row: dict[str, Any] = {
            "sessions": sessions,
            "recorded": is_recorded,
            "n": len(outcome.units),
            "reply_ms": [unit["reply"] for unit in outcome.units],
            "n_stalls": delays[float("inf")] - delays[STALL_S],
            "delay_below_ms": 1000 * min(edge for edge, n in delays.items() if n == delays[float("inf")]),
            "cpu_ms_per_session_s": 1000 * outcome.watched[gateway.name].cpu_s / outcome.wall_s / sessions,
            "n_unrecorded": _total(text, UNRECORDED),
        }
        if is_recorded:
            begin = time.monotonic()
            recordings = _complete(data_dir / "sessions", sessions)
            row["complete_s"] = time.monotonic() - begin
            row["n_chunks"] = sum(len(one["chunks"]) for one in recordings)
            row["n_answered"] = sum("unanswered" not in chunk for one in recordings for chunk in one["chunks"])
            row["lost"] = sessions * units - row["n_answered"]
    return row


def _complete(root: Path, n: int) -> list[dict[str, Any]]:
    """Wait until all recordings are complete. Returns: the content of each `recording.json`."""
    until = time.monotonic() + COMPLETE_S
    while True:
        done = [one for one in root.glob("*/recording.json") if not (one.parent / "timeline.bin").exists()]
        if len(done) == n:
            return [json.loads(one.read_text(encoding="utf-8")) for one in done]
        if time.monotonic() > until:
            raise RuntimeError(f"recordings: expected {n} complete ones, got {len(done)}")
        time.sleep(POLL_S)


def _delays(text: str) -> dict[float, float]:
    """Cumulative counts of the event loop's delays by bucket edge, in seconds."""
    return {
        float(sample.labels["le"]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in (family.samples if family.name == DELAY else ())
        if sample.name.endswith("_bucket")
    }


def _total(text: str, name: str) -> float:
    families = [family for family in text_string_to_metric_families(text) if family.name == name]
    return sum(sample.value for family in families for sample in family.samples if sample.name.endswith("_total"))


def recorded_line(row: dict[str, Any]) -> str:
    """The row as a line under `RECORDED_HEAD`. reply_ms: percentiles by then."""
    reply, lost = row["reply_ms"], row.get("lost")
    return (
        f"{row['sessions']:8} {'yes' if row['recorded'] else 'no':>8} {row['n']:6} {reply['p50']:10.2f} "
        f"{reply['p99']:8.2f} {reply['max']:8.2f} | {row['n_stalls']:6.0f} {row['delay_below_ms']:8.1f} "
        f"{row['cpu_ms_per_session_s']:15.2f} | {'' if lost is None else lost:>5} "
        f"{row.get('complete_s', 0.0):10.1f}"
    )


RECORDED_HEAD = (
    f"{'sessions':>8} {'recorded':>8} {'units':>6} {'reply p50':>10} {'p99':>8} {'max':>8} | {'stalls':>6} "
    f"{'below ms':>8} {'CPU a session-s':>15} | {'lost':>5} {'complete s':>10}"
)
