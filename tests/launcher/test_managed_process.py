"""Logs of a child process."""

import os
import signal
import sys
from pathlib import Path

import pytest

from launcher import managed_process
from launcher.managed_process import ChildProcess, Program
from tests.launcher.processes import wait_until

CODE = """
import signal, time
signal.signal(signal.SIGUSR1, lambda *_: print("after"))
print("x" * 5000)
time.sleep(60)
"""


def test_long_log_is_rotated_while_the_process_writes(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = Program("worker 0", "worker_0", (sys.executable, "-c", CODE), "http://127.0.0.1:1")
    child = ChildProcess(program, tmp_path, root)
    child.start()
    try:
        wait_until(lambda: child.log.stat().st_size > 5000, "the first line")
        child.rotate_log()
        assert child.log.stat().st_size > 5000, "expected a short log to stay"
        monkeypatch.setattr(managed_process, "MAX_LOG_BYTES", 1000)
        child.rotate_log()
        assert (tmp_path / "worker_0.log.1").stat().st_size == 5001 and not child.log.read_bytes()
        os.kill(child.pid, signal.SIGUSR1)
        wait_until(lambda: child.log.read_text() == "after\n", "the next line at the start of the log")
        assert child.last_message() == "after"
    finally:
        child.kill()
        wait_until(lambda: not child.is_running, "the end of the process")
