"""Runs one job of the unit benchmark in a process of its own, with kernel caches of its own and a time limit.

Knows processes and files. Does not know what is measured.
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
STDERR = 2  # the file, whatever has taken the place of sys.stderr
ROOT = Path(__file__).resolve().parents[2]

Found = dict[str, Any]


class Processes:
    """All processes of a run, one after the other. folder: where jobs and results lie while they run."""

    def __init__(self, folder: Path):
        self._folder, self._n = folder, 0

    def run(self, job: Found, cache: Path, limit_s: float, tell: Callable[[Found], None]) -> Found:
        """Run a job to its end or its limit.

        Args: cache: folder of kernels. tell: given what the process has written, each time it has.
        Returns: what it wrote last, `process` added: {seconds, status} and why it ended if not by itself.
        """
        self._n += 1
        out, launched = self._folder / f"{self._n}.out.json", time.time()
        out.unlink(missing_ok=True)  # of an earlier command in this folder
        file = self._folder / f"{self._n}.job.json"
        file.write_text(
            json.dumps({**job, "out": str(out), "cache": str(cache), "launched": launched, "limit_s": limit_s})
        )
        cache.mkdir(parents=True, exist_ok=True)
        environment = {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": str(cache),
            "TRITON_CACHE_DIR": str(cache / "triton" / "0"),  # where a worker has them
            "PYTHONUNBUFFERED": "1",
        }
        command = [sys.executable, "-m", "benchmarks.duplex.child", str(file)]
        # Tables go to our standard output, all a process says to standard error; its group ends with it.
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=STDERR, start_new_session=True)
        seen, why = 0, ""
        try:
            while process.poll() is None:
                seen = _look(out, seen, tell)
                if time.time() - launched > limit_s:
                    why = f"killed at its limit of {limit_s:.0f} s"
                    break
                time.sleep(POLL_S)
        finally:
            _kill(process)
        found = _read(out)
        found["process"] = {"seconds": time.time() - launched, "status": process.returncode, "killed": why}
        tell(found)
        return found


def _look(out: Path, seen: int, tell: Callable[[Found], None]) -> int:
    try:
        now = out.stat().st_mtime_ns
    except FileNotFoundError:
        return seen
    if now != seen:
        tell(_read(out))
    return now


def _read(out: Path) -> Found:
    return json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}


def _kill(process: "subprocess.Popen[bytes]") -> None:
    """The process and whatever it has started, compilers for one."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
