"""The file in which the launcher tells the gateway about its workers. Torch-free."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError

FILE_NAME = "workers.json"
MAX_BYTES = 2**20
WorkerState = Literal["starting", "ready", "waiting", "given up"]


class WorkerReport(BaseModel):
    """One worker, as its launcher sees it.

    restarts: further starts so far. reason: why its last process ended; empty: none has, or it became ready since.
    next_start: Unix s of the next start while it waits for it.
    """

    model_config = ConfigDict(strict=True)

    state: WorkerState
    restarts: NonNegativeInt = 0
    reason: str = ""
    next_start: float | None = None


class WorkerReports(BaseModel):
    """All workers by name, such as `worker_0`."""

    workers: dict[str, WorkerReport] = {}


def read_reports(folder: Path) -> WorkerReports:
    """The reports of the launcher that uses this log folder; none without one, or if its file is damaged."""
    try:
        with (folder / FILE_NAME).open("rb") as file:
            return WorkerReports.model_validate_json(file.read(MAX_BYTES))
    except (OSError, ValidationError):
        return WorkerReports()
