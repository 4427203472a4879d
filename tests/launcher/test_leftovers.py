"""Processes that a killed launcher left behind, and the next start."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from launcher.leftovers import end_leftovers

DRAINING = "import signal, time; signal.signal(signal.SIGTERM, lambda *_: {end}); print(flush=True); time.sleep(600)"


def started(folder: Path, stem: str, end: str, written_at: float | None = None) -> "subprocess.Popen[bytes]":
    """A process that runs `end` at SIGTERM, and its pid file."""
    command = [sys.executable, "-c", DRAINING.format(end=end)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    process.stdout.readline()
    file = folder / f"{stem}.pid"
    file.write_text(f"{process.pid}\n")
    if written_at is not None:
        os.utime(file, (written_at, written_at))
    return process


def test_a_start_waits_for_what_a_killed_launcher_left_behind(tmp_path: Path) -> None:
    lines: list[str] = []
    draining = started(tmp_path, "gateway", "exit(3)")
    stuck = started(tmp_path, "worker_0", "None")
    other = started(tmp_path, "worker_1", "exit(4)", written_at=1e9)  # has taken over the number
    (tmp_path / "worker_2.pid").write_text("no number")
    try:
        end_leftovers(tmp_path, 2.0, lines.append)
        assert (draining.wait(30), stuck.wait(30), other.poll()) == (3, -signal.SIGKILL, None)
        names = f"gateway (pid {draining.pid}), worker 0 (pid {stuck.pid})"
        assert lines == [
            f"note: waiting up to 2 s for {names} of an earlier start_all.sh, which was killed",
            f"note: worker 0 (pid {stuck.pid}) killed: it did not end within 2 s",
        ]
        end_leftovers(tmp_path, 2.0, lines.append)
        assert len(lines) == 2, "expected no wait without processes"
    finally:
        for process in (draining, stuck, other):
            process.kill()
            process.wait(30)
            assert process.stdout is not None
            process.stdout.close()
