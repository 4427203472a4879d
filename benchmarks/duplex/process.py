"""Runs each job of the unit benchmark in a separate process with its own kernel cache and a time limit.

Contains processes and result files. Does not contain measurements.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

POLL_S = 0.5
STDERR = 2  # the file descriptor; sys.stderr may be replaced
ROOT = Path(__file__).resolve().parents[2]

JsonDict = dict[str, Any]


class JobRunner:
    """Runs the processes of a benchmark one after the other. folder: contains job and result files during a run."""

    def __init__(self, folder: Path):
        self._folder, self._n = folder, 0

    def run(self, job: JsonDict, cache: Path, limit_s: float, on_result: Callable[[JsonDict], None]) -> JsonDict:
        """Run a job until it ends or reaches its limit.

        Args:
            cache: folder of compiled kernels.
            limit_s: seconds after which the process is killed.
            on_result: called with the process's result file whenever it has changed.
        Returns: the last result file, with `process` added: {seconds, status, killed}; killed: the reason, or empty.
        """
        self._n += 1
        out, launched = self._folder / f"{self._n}.out.json", time.time()
        out.unlink(missing_ok=True)  # may remain from an earlier command in this folder
        file = self._folder / f"{self._n}.job.json"
        file.write_text(
            json.dumps({**job, "out": str(out), "cache": str(cache), "launched": launched, "limit_s": limit_s})
        )
        cache.mkdir(parents=True, exist_ok=True)
        environment = {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": str(cache),
            "TRITON_CACHE_DIR": str(cache / "triton" / "0"),  # as in a worker
            "PYTHONUNBUFFERED": "1",
        }
        command = [sys.executable, "-m", "benchmarks.duplex.child", str(file)]
        # Only tables go to standard output, so the child writes to standard error. It has its own process group.
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=STDERR, start_new_session=True)
        last_mtime, reason = 0, ""
        try:
            while process.poll() is None:
                last_mtime = _poll(out, last_mtime, on_result)
                if time.time() - launched > limit_s:
                    reason = f"killed at its limit of {limit_s:.0f} s"
                    break
                time.sleep(POLL_S)
        finally:
            _kill_group(process)
        found = _read_result(out)
        found["process"] = {"seconds": time.time() - launched, "status": process.returncode, "killed": reason}
        on_result(found)
        return found


def _poll(out: Path, last_mtime: int, on_result: Callable[[JsonDict], None]) -> int:
    try:
        mtime = out.stat().st_mtime_ns
    except FileNotFoundError:
        return last_mtime
    if mtime != last_mtime:
        on_result(_read_result(out))
    return mtime


def _read_result(out: Path) -> JsonDict:
    return json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}


def _kill_group(process: "subprocess.Popen[bytes]") -> None:
    """Kill the process and its children, for example compilers."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
