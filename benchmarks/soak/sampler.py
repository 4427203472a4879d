"""What gateway and worker hold at a moment: memory, descriptors, threads, slots, tickets."""

import os
import time
from collections.abc import Iterable
from typing import Any

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.serve.processes import ServedProgram, other_cpu_s
from benchmarks.soak.clients import UnitTime

MB = 2**20
GATEWAY = {
    "queue": ("duologue_gateway_queue_length", {}),
    "slots": ("duologue_gateway_slots", {"kind": "total"}),
    "slots_free": ("duologue_gateway_slots", {"kind": "free"}),
    "detached": ("duologue_gateway_detached_sessions", {}),
    "resume_journal_bytes": ("duologue_gateway_resume_journal_bytes", {}),
    "session_journal_bytes": ("duologue_gateway_session_journal_bytes", {}),
    "calls": ("duologue_gateway_open_calls", {}),
}
WORKER = {
    "slots": ("duologue_worker_slots", {"kind": "total"}),
    "slots_free": ("duologue_worker_slots", {"kind": "free"}),
    "context_rows": ("duologue_worker_context_rows", {"kind": "used"}),
    "graphs_after_warm_up": ("duologue_worker_compiled_after_warm_up", {"what": "graphs"}),
    "device_allocated_mb": ("duologue_worker_memory_bytes", {"kind": "allocated"}),
    "device_reserved_mb": ("duologue_worker_memory_bytes", {"kind": "reserved"}),
}
# What is 0 or as at the start once all clients have left.
LEFT_OVER = ("fds", "slots_free", "queue", "detached", "resume_journal_bytes", "session_journal_bytes", "calls")
Sample = dict[str, Any]


class Sampler:
    """Samples of one gateway and its worker.

    Args:
        gateway, worker: the processes.
        began: zero of the samples' times, monotonic.
    """

    def __init__(self, gateway: ServedProgram, worker: ServedProgram, began: float):
        self._programs = {"gateway": (gateway, GATEWAY), "worker": (worker, WORKER)}
        self._began = began
        self._cpu_s: dict[str, float] = {}
        self._others: tuple[float, float] | None = None  # when the last sample was taken, and `other_cpu_s` then

    def sample(self, units: Iterable[UnitTime] = ()) -> Sample:
        """The state now. units: those since the last sample."""
        row: Sample = {"s": round(time.monotonic() - self._began, 2), "load": os.getloadavg()[0]}
        listed = list(units)
        for name, (program, gauges) in self._programs.items():
            row[name] = _process(program) | _gauges(program.text("/metrics"), gauges)
            cpu_s = program.cpu_s()
            used = cpu_s - self._cpu_s.get(name, cpu_s)
            self._cpu_s[name] = cpu_s
            row[name]["cpu_ms_per_unit"] = 1000 * used / len(listed) if listed else None
        row["other_cpu"] = self._other_cpu()
        row["units"] = len(listed)
        row["late"] = sum(unit.ms > 1000 for unit in listed)
        return row

    def _other_cpu(self) -> float | None:
        """Cores that other programs of the machine have used since the last sample; None for the first one."""
        before, now = self._others, time.monotonic()
        self._others = now, other_cpu_s([program for program, _ in self._programs.values()])
        return None if before is None else round((self._others[1] - before[1]) / max(now - before[0], 1e-3), 3)


def _process(program: ServedProgram) -> Sample:
    process = program.process
    with process.oneshot():
        return {"rss_mb": process.memory_info().rss / MB, "fds": process.num_fds(), "threads": process.num_threads()}


def _gauges(text: str, wanted: dict[str, tuple[str, dict[str, str]]]) -> Sample:
    found: Sample = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            for key, (name, labels) in wanted.items():
                if sample.name == name and labels.items() <= sample.labels.items():
                    found[key] = sample.value / MB if key.endswith("_mb") else sample.value
    return found


def unit_windows(units: list[UnitTime], began: float, window_s: float) -> list[Sample]:
    """Percentiles of the units of the session that stays, by spans of time; without the last span, which is open."""
    by_window: dict[int, list[UnitTime]] = {}
    for unit in units:
        if unit.stays:
            by_window.setdefault(int((unit.at - began) // window_s), []).append(unit)
    rows = []
    for number in sorted(by_window)[:-1]:
        row: Sample = {"s": (number + 0.5) * window_s, "n": len(by_window[number])}
        for kind, spoken in (("listen", False), ("speak", True)):
            times = [unit.ms for unit in by_window[number] if unit.spoken is spoken]
            if times:
                p50, p99 = np.percentile(times, (50, 99))
                row |= {f"{kind}_p50": float(p50), f"{kind}_p99": float(p99)}
        rows.append(row)
    return rows


def note_other_programs(windows: list[Sample], samples: list[Sample], window_s: float) -> None:
    """Add to each window the cores that other programs used in it, which delay units: `other_cpu`."""
    for window in windows:
        begin = window["s"] - window_s / 2
        used = [row["other_cpu"] for row in samples if begin <= row["s"] < begin + window_s]
        known = [one for one in used if one is not None]
        window["other_cpu"] = float(np.mean(known)) if known else None


def left_over(before: Sample, after: Sample) -> list[str]:
    """What gateway and worker hold more than before, or free less, in words."""
    found = []
    for name in ("gateway", "worker"):
        for key in LEFT_OVER:
            if key not in before[name]:
                continue
            expected, got = before[name][key], after[name][key]
            if got < expected if key == "slots_free" else got > expected:
                found.append(f"{name} {key}: expected {expected:g}, got {got:g}")
    return found
