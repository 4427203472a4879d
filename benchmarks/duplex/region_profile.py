"""Where a second goes under load: time of every region on the device, and of the engine's thread.

Events of the device surround each call of a region, or each replay of its CUDA graph, on the stream of the call; on a
CPU they are times of the clock. Contains the measurement and its table. Does not start engines.
"""

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from benchmarks import report
from benchmarks.duplex.bench_sessions import LISTEN, SPEAK, BenchSession, SyntheticMedia, percentiles
from benchmarks.duplex.engine import RunningEngine, device_used
from benchmarks.duplex.live_sessions import DEADLINE_MS, SESSION_SETUP_S, LoadGenerator, LoadPlan, drain
from benchmarks.duplex.utilization import UtilizationMeter
from models.graphs.region_graphs import RegionTable
from models.graphs.streams import AsyncHostCopy
from worker.loop.unit_loop import UnitLoop

LOG = logging.getLogger(__name__)
PARTS = {
    "unit_step": "LLM decode",
    "unit_prefill": "LLM prefill",
    "vision": "pictures",
    "mel_unit": "sound heard",
    "audio_unit": "sound heard",
    "audio_overlap": "sound heard",
    "clips": "sound heard",
    "spoken_rows": "speech tokens",
    "speech_begin": "speech tokens",
    "speech_step": "speech tokens",
    "flow": "flow",
    "hift": "HiFT",
}
OTHER = "slots and windows"
READS = ("tolist", "cpu", "item")
GOLDEN_RATIO = 0.6180339887498949  # its multiples spread evenly over [0, 1), however many are taken


class Span(NamedTuple):
    """One call of a region. begin, end: ms on the device. n: rows of the batch, padding included."""

    part: str
    begin: float
    end: float
    n: int


@dataclass
class _Call:
    part: str
    n: int
    begin: Any
    end: Any = None


@dataclass
class ThreadTimes:
    """Seconds of the engine's thread: in calls of regions, in reads of results, in pauses, and in the whole loop."""

    calls: float = 0.0
    reads: float = 0.0
    pauses: float = 0.0
    loop: float = 0.0


@dataclass
class RegionProfile:
    """Records the body of a `with` statement; call `report` afterwards."""

    device: torch.device
    thread: ThreadTimes = field(default_factory=ThreadTimes)
    seconds: float = 0.0
    _calls: list[_Call] = field(default_factory=list)
    _is_inside: bool = False  # of a call or a read

    def __enter__(self) -> "RegionProfile":
        self._patches = ExitStack()
        call, profile = RegionTable.__call__, self

        def timed_call(table: RegionTable, name: str, *given: Any, **static: Any) -> Any:
            one = _Call(PARTS.get(name, OTHER), len(given[0]) if given else 1, profile._mark())
            with profile._adds("calls"):
                result = call(table, name, *given, **static)
            one.end = profile._mark()
            profile._calls.append(one)
            return result

        self._patches.enter_context(mock.patch.object(RegionTable, "__call__", timed_call))
        for owner, name, kind in (
            *((Tensor, name, "reads") for name in READS),
            (AsyncHostCopy, "result", "reads"),
            (UnitLoop, "_rest", "pauses"),
            (UnitLoop, "run", "loop"),
        ):
            self._patches.enter_context(mock.patch.object(owner, name, self._timed(getattr(owner, name), kind)))
        self._first, self._started_at = self._mark(), time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self._started_at
        self._patches.close()

    def spans(self) -> list[Span]:
        """Calls that ended within the body, by their begin; waits for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        whole = [call for call in self._calls if call.end is not None]
        found = [Span(one.part, self._ms(one.begin), self._ms(one.end), one.n) for one in whole]
        return sorted((one for one in found if one.begin >= 0), key=lambda one: one.begin)

    def _mark(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _ms(self, mark: Any) -> float:
        if self.device.type != "cuda":
            return 1e3 * (mark - self._first)
        ms: float = self._first.elapsed_time(mark)
        return ms

    def _timed(self, function: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def timed(*given: Any, **named: Any) -> Any:
            with self._adds(kind):
                return function(*given, **named)

        return timed

    @contextmanager
    def _adds(self, kind: str) -> Iterator[None]:
        """Add the time of the body to a field of `thread`; reads inside of a call or of a read are part of it."""
        if threading.current_thread().name != "engine" or (kind == "reads" and self._is_inside):
            yield
            return
        before, self._is_inside = self._is_inside, self._is_inside or kind in ("calls", "reads")
        start = time.perf_counter()
        try:
            yield
        finally:
            self._is_inside = before
            setattr(self.thread, kind, getattr(self.thread, kind) + time.perf_counter() - start)


def shares(spans: Sequence[Span]) -> tuple[dict[str, float], float]:
    """Time that is attributed to each part, and time in which no region ran, up to the end of the last span, in ms.

    A moment at which several parts run, on several streams, is divided evenly among them.
    """
    changes = sorted(
        [(span.begin, 1, span.part) for span in spans] + [(span.end, -1, span.part) for span in spans],
        key=lambda change: (change[0], change[1]),
    )
    running: defaultdict[str, int] = defaultdict(int)
    found: defaultdict[str, float] = defaultdict(float)
    idle, last = 0.0, 0.0
    for moment, change, part in changes:
        active = [one for one, n in running.items() if n]
        for one in active:
            found[one] += (moment - last) / len(active)
        if not active:
            idle += moment - last
        running[part] += change
        last = moment
    return dict(found), idle


def measure_profile(
    running: RunningEngine, plan: LoadPlan, *, left_s: Callable[[], float], save: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Open the sessions once, and profile each number of them under load.

    Args:
        left_s: returns the seconds that remain for this part.
        save: called with the result after each row.
    Returns: {rows, left_out, failed}.
    """
    result: dict[str, Any] = {"rows": [], "left_out": [], "failed": []}
    sessions: list[BenchSession] = []
    try:
        for n in sorted(plan.counts):
            if left_s() < plan.seconds + plan.warm_s + SESSION_SETUP_S * (n - len(sessions)):
                result["left_out"].append(f"{n} sessions")
                continue
            try:
                while len(sessions) < n:
                    sessions.append(_open(running, plan, len(sessions)))
                result["rows"].append(_measure_row(running, plan, sessions[:n]))
            except Exception as error:  # for example out of memory: the rows of smaller numbers stay valid
                LOG.exception("profiling %d sessions failed", n)
                result["failed"].append(f"{n} sessions: {type(error).__name__}: {error}"[:300])
                break
            save(result)
    finally:
        for session in sessions:
            session.close()
    save(result)
    return result


def _open(running: RunningEngine, plan: LoadPlan, number: int) -> BenchSession:
    shortest, longest = plan.contexts
    context = shortest + int((longest - shortest) * (GOLDEN_RATIO * number % 1))
    config = running.engine.config.session.model_copy(update={"seed": number})
    return BenchSession(
        running, f"{LISTEN if number % 2 else SPEAK} {number}", context=context, config=config, seed=number
    )


def _measure_row(running: RunningEngine, plan: LoadPlan, sessions: Sequence[BenchSession]) -> dict[str, Any]:
    running.wait_idle()
    if running.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(running.device)
    generator = LoadGenerator(sessions, SyntheticMedia(plan.n_frames), replace(plan, counts=(len(sessions),)))
    thread = next((one for one in threading.enumerate() if one.name == "engine"), None)
    generator.start()
    generator.wait_until(generator.started_at + plan.warm_s)
    with UtilizationMeter(running.device, thread) as busy, RegionProfile(running.device) as profile:
        generator.wait_until(generator.started_at + plan.warm_s + plan.seconds)
    generator.stop()
    drain(sessions)
    units = generator.measured_units()
    totals = [unit.total_ms for unit in units]
    return {
        "sessions": len(sessions),
        "n": len(units),
        "total_ms": percentiles(totals),
        "n_missed": sum(total is None or total > DEADLINE_MS for total in totals),
        "errors": sorted({unit.error for unit in units if unit.error})[:5],
        "is_overloaded": generator.is_overloaded,
        "busy": busy.report(),
        "peak_memory": report.peak_memory(running.device),
        "device_used_bytes": device_used(running.device),
        **figures(profile.spans(), profile.thread, profile.seconds),
    }


def figures(spans: Sequence[Span], thread: ThreadTimes, seconds: float) -> dict[str, Any]:
    """Figures of one profile, in ms of each second.

    Returns: {parts: {part: {calls, batch, span_ms, share_ms, batches}}, idle_ms, thread_ms}.
        span_ms: from begin to end of its calls, waits for other streams included; spans of several streams overlap.
        batches: {rows of a call: [calls, span_ms]}.
        share_ms: of the device's time; the parts and `idle_ms` add up to a second.
    """
    inside = [span._replace(end=min(span.end, 1e3 * seconds)) for span in spans if span.begin < 1e3 * seconds]
    found, _ = shares(inside)
    parts = {}
    for part in (*dict.fromkeys(PARTS.values()), OTHER):
        mine = [span for span in inside if span.part == part]
        parts[part] = {
            "calls": len(mine) / seconds,
            "batch": sum(span.n for span in mine) / len(mine) if mine else None,
            "span_ms": sum(span.end - span.begin for span in mine) / seconds,
            "share_ms": found.get(part, 0.0) / seconds,
            "batches": _by_batch(mine, seconds),
        }
    rest = thread.loop - thread.calls - thread.reads - thread.pauses
    per_second = {
        "calls": thread.calls,
        "reads": thread.reads,
        "pauses": thread.pauses,
        "Python": max(rest, 0.0),
        "outside of the loop": seconds - thread.loop,
    }
    return {
        "parts": parts,
        "idle_ms": 1e3 - sum(part["share_ms"] for part in parts.values()),
        "thread_ms": {name: 1e3 * value / seconds for name, value in per_second.items()},
    }


def _by_batch(spans: Sequence[Span], seconds: float) -> dict[int, list[float]]:
    found: defaultdict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for span in spans:
        for place, more in enumerate((1.0, span.end - span.begin)):
            found[span.n][place] += more / seconds
    return dict(sorted(found.items()))


def profile_lines(found: dict[str, Any]) -> list[str]:
    """The rows as a table."""
    lines = ["a second, in ms of the device: share of a part (spans of its calls), calls a second x mean batch"]
    rows = found["rows"]
    lines.append(f"{'part':20}" + "".join(f"{row['sessions']:>24} sessions" for row in rows))
    for part in rows[0]["parts"] if rows else ():
        lines.append(f"{part:20}" + "".join(f"{_part(row['parts'][part]):>33}" for row in rows))
    lines.append(f"{'no region runs':20}" + "".join(f"{row['idle_ms']:33.1f}" for row in rows))
    lines.append("a second, in ms of the engine's thread")
    for name in rows[0]["thread_ms"] if rows else ():
        lines.append(f"{name:20}" + "".join(f"{row['thread_ms'][name]:33.1f}" for row in rows))
    for row in rows:
        times = row["total_ms"]
        total = "/".join(f"{times[name]:.1f}" for name in ("p50", "p95", "p99")) if times else "-"
        gpu = row["busy"]["gpu_percent"]
        lines.append(
            f"{row['sessions']} sessions: {row['n']} units, {row['n_missed']} missed, p50/p95/p99 {total} ms with the "
            f"profile; GPU {'-' if gpu is None else f'{gpu:.0f} %'}{', overloaded' if row['is_overloaded'] else ''}"
        )
        lines += [f"  {error}" for error in row["errors"]]
    lines += [f"left out for lack of time: {one}" for one in found["left_out"]]
    return [*lines, *(f"failed: {one}" for one in found["failed"])]


def _part(part: dict[str, Any]) -> str:
    if not part["calls"]:
        return "-"
    return f"{part['share_ms']:.1f} ({part['span_ms']:.1f}), {part['calls']:.1f} x {part['batch']:.1f}"
