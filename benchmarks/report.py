"""Results as table rows and JSON, and the environment of a run."""

import json
import os
import platform
import resource
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from models.graphs.growing_memory import mapped_bytes
from worker.version import driver_version, package_version

BEGAN = time.monotonic()  # start of the process, approximately
Row = dict[str, Any]
COMPILED = ("compiled", "by_layer")
HEADER = (
    f"{'region':16} {'bucket':34} {'eager p50/p95':>17} {'compiled p50/p95':>18} {'graph p50/p95':>17} {'device':>8} "
    f"{'GB':>8} {'floor ms':>9}  {'best/floor':>10}"
)


def environment(device: torch.device) -> dict[str, Any]:
    """Versions, machine and time of a run."""
    facts: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": package_version("triton"),
        "cuda": torch.version.cuda,
        "driver": None,
        "gpu": None,
        "cpu": f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads",
    }
    if device.type == "cuda":
        facts["gpu"] = torch.cuda.get_device_name(device)
        facts["driver"] = driver_version()
    return facts


def peak_memory(device: torch.device) -> dict[str, int]:
    """Peak bytes: of the device since its counters were reset, of the process since its start.

    Growing blocks count with what they hold now: they do not shrink.
    """
    peak = {"host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    if device.type == "cuda":
        peak["allocated_bytes"] = torch.cuda.max_memory_allocated(device) + mapped_bytes(device)
        peak["reserved_bytes"] = torch.cuda.max_memory_reserved(device) + mapped_bytes(device)
    return peak


def best_ms(row: Row) -> float | None:
    """The smallest p50 over all modes that ran."""
    return min((mode["p50_ms"] for mode in row["modes"].values() if "p50_ms" in mode), default=None)


def line(row: Row) -> str:
    """One row of the table, with the faster of two ways to compile; `L` marks compilation by layer."""
    modes = row["modes"]
    bucket = " ".join(f"{axis}={size}" for axis, size in row["bucket"].items())
    timed = [name for name in COMPILED if "p50_ms" in modes.get(name, {})]
    ran = [name for name in COMPILED if name in modes]
    name = min(timed, key=lambda name: modes[name]["p50_ms"]) if timed else (ran or ["compiled"])[0]
    compiled = _pair(modes.get(name)) + ("L" if name == "by_layer" else " ")
    graph = modes.get("graph")
    device = f"{graph['device_p50_ms']:.3f}" if graph and "device_p50_ms" in graph else "-"
    n_bytes, floor_ms, ratio = row["bytes"], row["floor_ms"], row["best_over_floor"]
    moved = f"{n_bytes['total'] / 1e9:.4f}" if n_bytes else "-"
    limit = f"{floor_ms:.4f} {row['floor_bound'][0]}" if floor_ms else "-"
    gap = f"{ratio:.2f}" if ratio else "-"
    return (
        f"{row['region']:16} {bucket:34} {_pair(modes.get('eager')):>17} {compiled:>18} {_pair(graph):>17} {device:>8} "
        f"{moved:>8} {limit:>11} {gap:>8}"
    )


def _pair(mode: dict[str, Any] | None) -> str:
    if mode is None:
        return "-"
    return "failed" if "error" in mode else f"{mode['p50_ms']:.3f}/{mode['p95_ms']:.3f}"


def say(text: str) -> None:
    """One line of progress."""
    print(f"{time.monotonic() - BEGAN:9.2f} s  {text}", file=sys.stderr, flush=True)


def write_json(path: Path, report: dict[str, Any]) -> None:
    """Replace the file atomically, so that a killed run leaves the last complete one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".part")
    draft.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    draft.replace(path)
