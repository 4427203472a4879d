"""Phases of a run with live sessions: whose units are late, and which processes used the CPUs."""

import subprocess
import sys
import time

import pytest

from benchmarks.chaos.clients import ChaosClient, Unit
from benchmarks.serve.cluster_phases import PhaseLog, ThreadWaits, thread_waits

SPIN = "import time\nwhile time.process_time() < 0.4: pass\nprint(flush=True)\ntime.sleep(60)"


def test_units_and_cpu_time_belong_to_their_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process with the command of a worker is busy in the first of two phases; one unit of each phase is late."""
    monkeypatch.setattr("benchmarks.serve.cluster_phases.SAMPLE_S", 0.05)
    with PhaseLog() as log:
        log.begin("busy")
        begun = time.monotonic()
        child = subprocess.Popen([sys.executable, "-c", SPIN, "worker.main"], stdout=subprocess.PIPE)
        try:
            assert child.stdout is not None
            child.stdout.readline()
            log.begin("idle")
            between = time.monotonic()
            time.sleep(0.3)
            log.begin("end")
            assert child.pid in thread_waits(child.pid), "expected the main thread"
        finally:
            child.kill()
            child.communicate()
    client = ChaosClient("ws://none", "one", 0)
    client.units = [
        Unit(0, begun, answered_at=begun + 0.5),
        Unit(1, begun, answered_at=begun + 1.25),
        Unit(2, between + 0.1, answered_at=between + 2),
        Unit(3, between + 0.2),  # sent less than the deadline ago
    ]
    busy, idle = log.rows([client])
    assert (busy["phase"], busy["units"], busy["late"], busy["slowest s"]) == ("busy", 2, 1, 1.25), busy
    assert (idle["phase"], idle["units"], idle["late"]) == ("idle", 2, 1), idle
    used = [row["cores"]["workers"] * row["seconds"] for row in (busy, idle)]  # type: ignore[index]
    assert used[0] > 0.25 and used[1] < 0.1, f"expected CPU time in the first phase only, got {used} s"


def test_time_of_ended_threads_is_kept() -> None:
    waits, totals = ThreadWaits(), []
    for running in ({1: 1.0, 2: 3.0}, {1: 1.5}, {1: 2.0, 2: 0.5}, {2: 0.75}, {}):  # the id 2 is used again
        waits.add(running)
        totals.append(waits.total_s)
    assert totals == [4.0, 4.5, 5.5, 5.75, 5.75], totals
