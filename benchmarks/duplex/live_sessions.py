"""Many live sessions: each sends a unit every second on a real clock, half of them are spoken to, half only heard.

Phases are spread over the second and contexts over a range; windows slide as they do by default. A unit's time runs
from the moment it was due, so that whoever sends late counts against us. Knows schedules, deadlines and counts. Does
not know how an engine starts.
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
from benchmarks.duplex.engine import Running, device_used
from benchmarks.duplex.gpu_busy import Busy
from benchmarks.duplex.sessions_under_test import LISTEN, SPEAK, Scenes, SentUnit, Talker, percentiles

LOG = logging.getLogger(__name__)
DEADLINE_MS = 1000.0
MAX_MISSES = 1e-3  # of a row's units, for its sessions to count as served
SENDERS = 4
GIVEN_UP_S = 12.0  # behind: the row is over, it cannot catch up
DRAIN_S = 15.0
SECONDS_A_SESSION = 0.25  # to open and close one with a long prompt


@dataclass(frozen=True)
class LoadPlan:
    """counts: sessions of each row. seconds, warm_s: measured, and before that. contexts: rows of the shortest and of
    the longest prompt. n_frames: pictures in a unit. claim_units: the least that the claimed number is measured with,
    for claim_s seconds at most.
    """

    counts: Sequence[int]
    seconds: float
    warm_s: float
    contexts: tuple[int, int]
    n_frames: int
    claim_units: int = 3000
    claim_s: float = 60.0


def many_sessions(
    running: Running, plan: LoadPlan, *, left_s: Callable[[], float], save: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Each number of sessions once; the largest that is served again, for as long as `claim_units` take. If it is not
    served then, the next smaller one that is, until one stands.

    Returns: {rows, left_out, failed, claim}, given to `save` after each row. claim: {sessions, units, is_long}, the
    number served, its units, and whether they are as many as asked or took as long as they may. left_s: seconds that
    may still be used.
    """
    result: dict[str, Any] = {"rows": [], "left_out": [], "failed": [], "claim": None}

    def run(n: int, seconds: float) -> dict[str, Any] | None:
        if left_s() < seconds + plan.warm_s + SECONDS_A_SESSION * n:
            result["left_out"].append(f"{n} sessions for {seconds:.0f} s")
            return None
        try:
            return _row(running, replace(plan, seconds=seconds), n)
        except Exception as error:  # out of memory, for one: smaller numbers are not lost for it
            LOG.exception("%d sessions", n)
            result["failed"].append(f"{n} sessions: {type(error).__name__}: {error}"[:300])
            return None

    for n in plan.counts:
        if (row := run(n, plan.seconds)) is not None:
            result["rows"].append(row)
            save(result)
    rows = result["rows"]
    while (place := _claimed(rows)) is not None and not _is_long(rows[place], plan):
        n = rows[place]["sessions"]
        if (row := run(n, min(plan.claim_units / n, plan.claim_s))) is None:
            break
        row["first_run"], rows[place] = rows[place], row
        save(result)
    if place is not None:
        row = rows[place]
        result["claim"] = {"sessions": row["sessions"], "units": row["n"], "is_long": _is_long(row, plan)}
    save(result)
    return result


def _claimed(rows: Sequence[dict[str, Any]]) -> int | None:
    """Place of the row whose number of sessions counts as served."""
    return next((at for at, row in enumerate(rows) if row["sessions"] == sessions_ok(rows)), None)


def _is_long(row: dict[str, Any], plan: LoadPlan) -> bool:
    return "first_run" in row or row["n"] >= plan.claim_units


def sessions_ok(rows: Sequence[dict[str, Any]]) -> int:
    """The largest number of sessions with less than MAX_MISSES, all smaller numbers that were measured too."""
    served = 0
    for row in sorted(rows, key=lambda row: row["sessions"]):
        if row["miss_rate"] >= MAX_MISSES:
            break
        served = row["sessions"]
    return served


def _row(running: Running, plan: LoadPlan, n: int) -> dict[str, Any]:
    if running.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(running.device)
    talkers: list[Talker] = []
    try:
        done: queue.SimpleQueue[SentUnit] = queue.SimpleQueue()
        for number in range(n):
            mode = LISTEN if number % 2 else SPEAK
            context = plan.contexts[0] + (plan.contexts[1] - plan.contexts[0]) * number // max(n - 1, 1)
            config = running.engine.config.session.model_copy(update={"seed": number})
            talkers.append(Talker(running, f"{mode} {number}", context=context, config=config, seed=number, done=done))
        return _measured(running, plan, talkers)
    finally:
        for talker in talkers:
            talker.close()


def _measured(running: Running, plan: LoadPlan, talkers: Sequence[Talker]) -> dict[str, Any]:
    running.settle()
    before = running.late()
    sender = _Sender(talkers, Scenes(plan.n_frames), plan)
    thread = next((one for one in threading.enumerate() if one.name == "engine"), None)
    sender.begin()
    sender.wait_until(sender.begun + plan.warm_s)
    with Busy(running.device, thread) as busy:
        sender.wait_until(sender.begun + plan.warm_s + plan.seconds)
    sender.end()
    _drain(talkers)
    late = running.late()
    return {
        "sessions": len(talkers),
        **_outcome(sender.measured(), sender),
        "busy": busy.report(),
        "peak_memory": report.peak_memory(running.device),
        "device_used_bytes": device_used(running.device),
        "late": {name: late[name] - before[name] for name in late},
        "is_overloaded": sender.is_overloaded,
    }


def _drain(talkers: Sequence[Talker]) -> None:
    until = time.monotonic() + DRAIN_S
    while time.monotonic() < until and any(talker.n_waiting for talker in talkers):
        time.sleep(0.02)


def _outcome(units: list[SentUnit], sender: "_Sender") -> dict[str, Any]:
    totals = [unit.total_ms for unit in units]
    missed = sum(total is None or total > DEADLINE_MS for total in totals)
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
        "n_missed": missed,
        "miss_rate": missed / len(units) if units else 1.0,
        "n_lost": sum(total is None for total in totals),
        "errors": sorted({unit.error for unit in units if unit.error})[:5],
        "n_caught_up": sum(unit.result.n_caught_up for unit in ended),
        "samples_per_spoken_unit": sum(spoken) / len(spoken) if spoken else None,
        "n_codes": sorted({unit.result.n_speech_tokens for unit in ended if unit.session.startswith(SPEAK)}),
        "llm_rows": [min(rows), max(rows)] if rows else None,
        "send_late_ms": percentiles(sender.late_ms),
        "send_ms": percentiles(sender.send_ms),
    }


class _Sender:
    """Sends what is due: one thread keeps the clock, a few cut pictures and hand units over."""

    def __init__(self, talkers: Sequence[Talker], scenes: Scenes, plan: LoadPlan):
        self._talkers, self._scenes, self._plan = talkers, scenes, plan
        self._units: list[SentUnit] = []
        self._is_over = threading.Event()
        self._failure: BaseException | None = None
        self.late_ms: list[float] = []
        self.send_ms: list[float] = []
        self.is_overloaded = False

    def begin(self) -> None:
        self.begun = time.monotonic() + 0.1
        self._pool = ThreadPoolExecutor(SENDERS, thread_name_prefix="send")
        self._thread = threading.Thread(target=self._run, name="clock", daemon=True)
        self._thread.start()

    def wait_until(self, moment: float) -> None:
        """Or until the row is given up."""
        self._is_over.wait(max(moment - time.monotonic(), 0))

    def end(self) -> None:
        """Raises: what a unit could not be sent for."""
        self._is_over.set()
        self._thread.join()
        self._pool.shutdown()
        if self._failure is not None:
            raise self._failure

    def measured(self) -> list[SentUnit]:
        """Units that were due in the measured stretch."""
        begin = self.begun + self._plan.warm_s
        return [unit for unit in self._units if begin <= unit.due < begin + self._plan.seconds]

    def _run(self) -> None:
        n, last = len(self._talkers), self.begun + self._plan.warm_s + self._plan.seconds
        due = [(self.begun + number / n, number, 0) for number in range(n)]
        heapq.heapify(due)
        while due and not self._is_over.wait(max(due[0][0] - time.monotonic(), 0)):
            moment, number, unit = heapq.heappop(due)
            self._pool.submit(self._send, moment, number, unit)
            if moment + 1 < last:
                heapq.heappush(due, (moment + 1, number, unit + 1))
            if self._talkers[number].n_waiting > GIVEN_UP_S:
                self.is_overloaded = True
                self._is_over.set()

    def _send(self, due: float, number: int, unit: int) -> None:
        begun = time.monotonic()
        try:
            sent = self._talkers[number].send(self._scenes.sound(unit, number), self._scenes.pictures, due)
        except BaseException as error:
            self._failure = error
            return
        self._units.append(sent)
        self.late_ms.append(1e3 * (begun - due))
        self.send_ms.append(1e3 * (time.monotonic() - begun))
