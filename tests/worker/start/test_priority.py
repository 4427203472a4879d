"""The CPU priority of a worker that starts beside others, in a process of its own."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from launcher.cluster.options import LOW_PRIORITY
from worker.config.service import ROOT
from worker.main import parser
from worker.start.priority import LOW, PROC, StartPriority

LONG_S = 1e6
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="niceness of threads and autogroups is Linux's")


def state() -> dict[str, object]:
    """Nice values of all threads of this process, and of its autogroup.

    The file of the autogroup may be missing, or empty where a CPU cgroup takes its place.
    """
    file = PROC / "autogroup"
    group = file.read_text().split() if file.exists() else []
    threads = {os.getpriority(os.PRIO_PROCESS, int(name)) for name in os.listdir(PROC / "task")}
    return {"threads": sorted(threads), "group": group[-1] if group else None}


def report(limit_s: float) -> None:
    before, priority, ended = state(), StartPriority(limit_s=limit_s), threading.Event()
    threads = [threading.Thread(target=ended.wait) for _ in range(4)]
    for thread in threads:
        thread.start()
    used, low = str(priority), state()
    if limit_s < LONG_S:
        while state() != before:  # the caller's time limit ends a wait in vain
            time.sleep(0.01)
    priority.restore()
    priority.restore()
    print(json.dumps([before, used, low, state()]))
    ended.set()


@pytest.mark.parametrize("limit_s", [LONG_S, 0.5])
def test_priority_is_low_until_it_is_restored_or_for_a_limited_time(limit_s: float) -> None:
    code = f"from {__name__} import report; report({limit_s})"
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, capture_output=True, env=environ, start_new_session=True, timeout=120)
    assert run.returncode == 0, f"expected exit status 0, got {run.stderr.decode()}"
    before, used, low, after = json.loads(run.stdout)
    assert after == before, f"expected the priority from before, {before}, got {after}"
    if limit_s < LONG_S:
        return  # its time may have passed before the state was read
    expected = {
        "threads": [LOW] if "threads" in used else before["threads"],
        "group": str(LOW) if "autogroup" in used else before["group"],
    }
    assert low == expected, f"expected {expected} with {used}, got {low}"


def test_process_that_could_not_return_keeps_its_priority(tmp_path: Path, monkeypatch) -> None:
    def refuse(which: int, who: int, nice: int) -> None:
        """As the kernel for a process without CAP_SYS_NICE, also if a user namespace reports it."""
        if nice < os.getpriority(which, who):
            raise PermissionError(13, "Permission denied")
        set_priority(which, who, nice)

    (tmp_path / "status").write_text("CapEff:\t000001ffffffffff\n")
    set_priority, before = os.setpriority, state()
    monkeypatch.setattr(os, "setpriority", refuse)
    priority = StartPriority(tmp_path)
    assert (str(priority), state()) == ("not possible on this system", before), f"expected {before}, got {state()}"


def test_launchers_name_the_flag_of_the_worker() -> None:
    assert parser().parse_args([LOW_PRIORITY]).low_priority_start is True
