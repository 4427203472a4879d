"""What the launcher knows about its workers, in a file that the gateway reads for its `/health`."""

import json
import logging
import time
from pathlib import Path

from launcher.restart_policy import RestartBackoff
from models.atomic_file import write_atomically
from worker.worker_report import FILE_NAME, WorkerReport, WorkerReports, WorkerState

LOG = logging.getLogger(__name__)


class WorkerStates:
    """The reports of all workers of a run. folder: of the logs."""

    def __init__(self, folder: Path, names: list[str]):
        self._file = folder / FILE_NAME
        self._reports = {name: WorkerReport(state="starting") for name in names}

    def record(
        self, name: str, state: WorkerState, backoff: RestartBackoff, *, reason: str = "", wait_s: float = 0.0
    ) -> None:
        """Record a change and write the file.

        Args:
            name: of the worker's files.
            state: `starting`, `ready`, `waiting` for its next start or `given up`.
            backoff: history of its starts.
            reason: why its last process ended; empty: none has, or it became ready since.
            wait_s: until the next start.
        """
        if name not in self._reports:
            return  # the gateway
        next_start = time.time() + wait_s if wait_s else None
        self._reports[name] = WorkerReport(
            state=state, reason=reason, restarts=backoff.n_restarts, next_start=next_start
        )
        content = WorkerReports(workers=self._reports).model_dump(mode="json")
        try:
            write_atomically(self._file, json.dumps(content).encode())
        except OSError as error:
            LOG.warning("states of workers: expected to write %s, got %s", self._file, error)

    def remove(self) -> None:
        """Remove the file at the end of the run."""
        self._file.unlink(missing_ok=True)
