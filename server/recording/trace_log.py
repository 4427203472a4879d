"""Traces that pages send about a recording that they made themselves, as JSON lines. Bounded: the file rolls over."""

import threading
import time
from pathlib import Path

from worker.protocol.wire import json_text

FILE_NAME = "mobile-record-trace.jsonl"
MAX_BYTES = 5 * 2**20  # of a file; there are at most two


class TraceLog:
    """Writer of the traces. folder: for the files; created with the first trace."""

    def __init__(self, folder: Path):
        self._file = folder / FILE_NAME
        self._lock = threading.Lock()

    def write(self, trace: dict[str, object]) -> None:
        """Append a trace; blocks for the disk. Raises: OSError; ValueError for infinite numbers."""
        line = json_text({**trace, "_server_recv_ts": time.time()})
        with self._lock:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            if self._file.exists() and self._file.stat().st_size + len(line) > MAX_BYTES:
                self._file.replace(self._file.with_suffix(".1.jsonl"))
            with self._file.open("a", encoding="utf-8", errors="replace") as file:
                file.write(f"{line}\n")
