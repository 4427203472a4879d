"""Load of many live sessions: each sends a unit every second in real time, every second session listens, the others
speak.

Send times are spread over the second and context lengths over a range; windows slide with the default settings.
Sessions begin one after the other during the warm-up, in all but its last second. A unit's time starts when it is due,
so late sending counts as latency. Does not start engines.
"""

import heapq
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks import report
from benchmarks.duplex.bench_sessions import LISTEN, SPEAK, BenchSession, SentUnit, SyntheticMedia, percentiles
from benchmarks.duplex.engine import RunningEngine, device_used
from benchmarks.duplex.utilization import UtilizationMeter
from models.inputs.audio_sizes import SAMPLE_RATE
from worker.early.trial import EarlyEnd, EarlyTrial

LOG = logging.getLogger(__name__)
DEADLINE_MS = 1000.0
HALF_S, HALF = 0.5, SAMPLE_RATE // 2  # the first half of a second, in s and samples
MAX_MISSES = 1e-3  # share of late units below which a number of sessions counts as served
SEND_THREADS = 4
MAX_PENDING_UNITS = 12  # of one session; beyond it the row ends as overloaded
DRAIN_S = 15.0
SESSION_SETUP_S = 0.25  # to open and close a session with a long prompt


@dataclass(frozen=True)
class LoadPlan:
    """The load to measure.

    Attributes:
        counts: number of sessions of each row.
        seconds, warm_s: measured seconds, and seconds before them.
        contexts: context rows of the shortest and of the longest prompt.
        n_frames: images in a unit.
        trials: sessions that listen send each unit in two halves, and the engine may run it at the first one.
        claim_units: units with which the largest served number of sessions is measured again.
        claim_s: longest duration of that run.
    """

    counts: Sequence[int]
    seconds: float
    warm_s: float
    contexts: tuple[int, int]
    n_frames: int
    claim_units: int = 3000
    claim_s: float = 60.0
    trials: bool = False


def measure_sessions(
    running: RunningEngine, plan: LoadPlan, *, left_s: Callable[[], float], save: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Measure each number of sessions once, then the largest served number again over `claim_units`.

    If the second run is not served, the next smaller served number is measured again, until one is confirmed.

    Args:
        left_s: returns the seconds that remain for this part.
        save: called with the result after each row.
    Returns: {rows, left_out, failed, claim}. claim: {sessions, units, is_long}, the number served, its units, and
        whether they reach `claim_units` or come from a second run.
    """
    result: dict[str, Any] = {"rows": [], "left_out": [], "failed": [], "claim": None}

    def run(n: int, seconds: float) -> dict[str, Any] | None:
        if left_s() < seconds + plan.warm_s + SESSION_SETUP_S * n:
            result["left_out"].append(f"{n} sessions for {seconds:.0f} s")
            return None
        try:
            return _measure_row(running, replace(plan, seconds=seconds), n)
        except Exception as error:  # for example out of memory: the rows of smaller numbers stay valid
            LOG.exception("measuring %d sessions failed", n)
            result["failed"].append(f"{n} sessions: {type(error).__name__}: {error}"[:300])
            return None

    for n in plan.counts:
        if (row := run(n, plan.seconds)) is not None:
            result["rows"].append(row)
            save(result)
    rows = result["rows"]
    while (index := _claimed_row(rows)) is not None and not _is_claim_complete(rows[index], plan):
        n = rows[index]["sessions"]
        if (row := run(n, min(plan.claim_units / n, plan.claim_s))) is None:
            break
        row["first_run"], rows[index] = rows[index], row
        save(result)
    if index is not None:
        row = rows[index]
        result["claim"] = {"sessions": row["sessions"], "units": row["n"], "is_long": _is_claim_complete(row, plan)}
    save(result)
    return result


def _claimed_row(rows: Sequence[dict[str, Any]]) -> int | None:
    """Index of the row with the largest served number of sessions."""
    return next((index for index, row in enumerate(rows) if row["sessions"] == max_served_sessions(rows)), None)


def _is_claim_complete(row: dict[str, Any], plan: LoadPlan) -> bool:
    return "first_run" in row or row["n"] >= plan.claim_units


def max_served_sessions(rows: Sequence[dict[str, Any]]) -> int:
    """Largest number of sessions below MAX_MISSES for which all smaller measured numbers are too."""
    served = 0
    for row in sorted(rows, key=lambda row: row["sessions"]):
        if row["miss_rate"] >= MAX_MISSES:
            break
        served = row["sessions"]
    return served


def _measure_row(running: RunningEngine, plan: LoadPlan, n: int) -> dict[str, Any]:
    if running.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(running.device)
    sessions: list[BenchSession] = []
    try:
        done: queue.SimpleQueue[SentUnit] = queue.SimpleQueue()
        for number in range(n):
            mode = LISTEN if number % 2 else SPEAK
            context = plan.contexts[0] + (plan.contexts[1] - plan.contexts[0]) * number // max(n - 1, 1)
            early_unit = "auto" if plan.trials and mode == LISTEN else "off"
            config = running.engine.config.session.model_copy(update={"seed": number, "early_unit": early_unit})
            sessions.append(
                BenchSession(running, f"{mode} {number}", context=context, config=config, seed=number, done=done)
            )
        return _measure(running, plan, sessions)
    finally:
        for session in sessions:
            session.close()


def _measure(running: RunningEngine, plan: LoadPlan, sessions: Sequence[BenchSession]) -> dict[str, Any]:
    running.wait_idle()
    before = running.compile_counts_since_ready()
    generator = LoadGenerator(sessions, SyntheticMedia(plan.n_frames), plan)
    thread = next((one for one in threading.enumerate() if one.name == "engine"), None)
    generator.start()
    generator.wait_until(generator.started_at + plan.warm_s)
    with UtilizationMeter(running.device, thread) as busy:
        generator.wait_until(generator.started_at + plan.warm_s + plan.seconds)
    generator.stop()
    drain(sessions)
    late = running.compile_counts_since_ready()
    return {
        "sessions": len(sessions),
        **_row_figures(generator.measured_units(), generator),
        "busy": busy.report(),
        "peak_memory": report.peak_memory(running.device),
        "device_used_bytes": device_used(running.device),
        "late": {name: late[name] - before[name] for name in late},
        "trials": generator.ended_trials(),
        "is_overloaded": generator.is_overloaded,
    }


def drain(sessions: Sequence[BenchSession]) -> None:
    """Wait until all units have ended, for at most `DRAIN_S`."""
    until = time.monotonic() + DRAIN_S
    while time.monotonic() < until and any(session.n_waiting for session in sessions):
        time.sleep(0.02)


def _row_figures(units: list[SentUnit], generator: "LoadGenerator") -> dict[str, Any]:
    totals = [unit.total_ms for unit in units]
    late = [unit for unit in units if unit.total_ms is None or unit.total_ms > DEADLINE_MS]
    speaking = [unit for unit in units if unit.session.startswith(SPEAK)]
    listening = [unit for unit in units if unit.session.startswith(LISTEN)]
    ended = [unit for unit in units if unit.result is not None]
    spoken = [unit.n_samples for unit in speaking if unit.result is not None]
    rows = [unit.result.context_len for unit in ended]
    return {
        "n": len(units),
        "n_speaking": len(speaking),
        "total_ms": percentiles(totals),
        "listen_ms": percentiles([unit.total_ms for unit in listening]),
        "speak_ms": percentiles([unit.total_ms for unit in speaking]),
        "first_sound_ms": percentiles([unit.first_sound_ms for unit in units]),
        "wait_ms": percentiles([unit.result.times.wait for unit in ended]),
        "n_missed": len(late),
        "miss_rate": len(late) / len(units) if units else 1.0,
        "missed_at_s": sorted(round(unit.due - generator.started_at, 1) for unit in late),
        "n_lost": sum(total is None for total in totals),
        "errors": sorted({unit.error for unit in units if unit.error})[:5],
        "n_caught_up": sum(unit.result.n_caught_up for unit in ended),
        "samples_per_spoken_unit": sum(spoken) / len(spoken) if spoken else None,
        "n_codes": sorted({unit.result.n_speech_tokens for unit in ended if unit.session.startswith(SPEAK)}),
        "llm_rows": [min(rows), max(rows)] if rows else None,
        "send_late_ms": percentiles(generator.late_ms),
        "send_ms": percentiles(generator.send_ms),
    }


class LoadGenerator:
    """Sends units when they are due: one thread keeps the schedule, a pool prepares and sends the units."""

    def __init__(
        self,
        sessions: Sequence[BenchSession],
        media: SyntheticMedia,
        plan: LoadPlan,
        offsets: Sequence[float] | None = None,
    ):
        """offsets: when each session's units are due after a whole second, in s; None = evenly spread."""
        n = len(sessions)
        self._offsets = offsets or [number / n for number in range(n)]
        self._sessions, self._media, self._plan = sessions, media, plan
        self._units: list[SentUnit] = []
        self._halves: list[SentUnit] = []
        self._stopped = threading.Event()
        self._failure: BaseException | None = None
        self.late_ms: list[float] = []
        self.send_ms: list[float] = []
        self.is_overloaded = False

    def start(self) -> None:
        self.started_at = time.monotonic() + 0.1
        self._pool = ThreadPoolExecutor(SEND_THREADS, thread_name_prefix="send")
        self._thread = threading.Thread(target=self._run, name="clock", daemon=True)
        self._thread.start()

    def wait_until(self, moment: float) -> None:
        """Wait until `moment`, or until the load is stopped as overloaded."""
        self._stopped.wait(max(moment - time.monotonic(), 0))

    def stop(self) -> None:
        """Stop sending. Raises: the error with which a send failed."""
        self._stopped.set()
        self._thread.join()
        self._pool.shutdown()
        if self._failure is not None:
            raise self._failure

    def measured_units(self) -> list[SentUnit]:
        """Units that were due in the measured span."""
        begin = self.started_at + self._plan.warm_s
        return [unit for unit in self._units if begin <= unit.due < begin + self._plan.seconds]

    def ended_trials(self) -> dict[str, float]:
        """Trials of the measured span by how they ended, and the time of the engine's thread that they took, in ms."""
        begin = self.started_at + self._plan.warm_s
        outcomes = [half.trial.outcome for half in self._halves if half.trial is not None and half.due >= begin]
        counts = {end.value: sum(one.end is end for one in outcomes) for end in EarlyEnd}
        return {**counts, "spent_ms": sum(one.spent_ms for one in outcomes)}

    def _run(self) -> None:
        last = self.started_at + self._plan.warm_s + self._plan.seconds
        n, joining_s = len(self._offsets), max(self._plan.warm_s - 1, 0)
        joins = [int(joining_s * number / n) for number in range(n)]
        due = [
            (self.started_at + join + offset, number, 0, False)
            for number, (join, offset) in enumerate(zip(joins, self._offsets, strict=True))
        ]
        heapq.heapify(due)
        while due and not self._stopped.wait(max(due[0][0] - time.monotonic(), 0)):
            moment, number, unit, is_first_half = heapq.heappop(due)
            self._pool.submit(self._send, moment, number, unit, is_first_half)
            if is_first_half:
                continue
            if moment + 1 < last:
                heapq.heappush(due, (moment + 1, number, unit + 1, False))
                if self._has_halves(number):
                    heapq.heappush(due, (moment + HALF_S, number, unit + 1, True))
            if self._sessions[number].n_waiting > MAX_PENDING_UNITS:
                self.is_overloaded = True
                self._stopped.set()

    def _has_halves(self, number: int) -> bool:
        return self._plan.trials and self._sessions[number].name.startswith(LISTEN)

    def _send(self, due: float, number: int, unit: int, is_first_half: bool) -> None:
        started_at = time.monotonic()
        sound, images = self._media.audio(unit, number), self._media.images
        try:
            if is_first_half:
                self._halves.append(self._sessions[number].send(sound[:HALF], images, due, trial=EarlyTrial()))
                return
            if unit and self._has_halves(number):
                sound, images = sound[HALF:], []
            sent = self._sessions[number].send(sound, images, due)
        except BaseException as error:
            self._failure = error
            return
        self._units.append(sent)
        self.late_ms.append(1e3 * (started_at - due))
        self.send_ms.append(1e3 * (time.monotonic() - started_at))
