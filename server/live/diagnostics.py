"""Diagnostics that clients send about their playback, as JSON lines in `diag_<session>.jsonl`.

The size of each file and the number of files are bounded. The contents of a report are not interpreted.
"""

import asyncio
import logging
import time
from pathlib import Path

from worker.protocol.messages import ClientDiagnostic
from worker.protocol.takeover.message_bytes import Data
from worker.protocol.wire import WireError, json_text, read_object

LOG = logging.getLogger(__name__)
MAX_CHARS = 65_536  # of one report
MAX_PARSED_CHARS = 2**18  # a longer message is not parsed, and counts as no report
MAX_WRITES = 64  # concurrent writes; further reports are dropped
MAX_BYTES = 2**20  # of one session's file
MAX_FILES = 200
KIND = ClientDiagnostic.kind()


class Diagnostics:
    """Writer of the reports. folder: for the files; created when the first report arrives."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._writes: set[asyncio.Task[None]] = set()

    @property
    def n_writing(self) -> int:
        """Number of reports that are being written."""
        return len(self._writes)

    def intercept(self, data: Data, session_id: str) -> bool:
        """Store the message if it is a report. Returns: whether it is one, and must not be forwarded."""
        # The substring test takes microseconds and excludes almost every message. Parsing a huge message would block
        # the event loop.
        if not isinstance(data, str) or len(data) > MAX_PARSED_CHARS or KIND not in data:
            return False
        try:
            report = read_object(data)
        except WireError:
            return False  # the worker answers it with an error
        if report.get("type") != KIND:
            return False
        if len(data) <= MAX_CHARS and len(self._writes) < MAX_WRITES:
            line = json_text({**report, "_server_recv_ts": time.time()})
            task = asyncio.create_task(asyncio.to_thread(self._write, session_id, line))
            self._writes.add(task)
            task.add_done_callback(self._writes.discard)
        return True

    def _write(self, session_id: str, line: str) -> None:
        path = self._folder / f"diag_{session_id}.jsonl"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                self._remove_oldest()
            elif path.stat().st_size > MAX_BYTES:
                return
            with path.open("a", encoding="utf-8") as file:
                file.write(f"{line}\n")
        except OSError as error:
            LOG.warning("diagnostics of session %s: %s", session_id, error)

    def _remove_oldest(self) -> None:
        """Remove the oldest files, so that one more does not exceed the limit."""
        files = sorted(self._folder.glob("diag_*.jsonl"), key=lambda path: path.stat().st_mtime)
        for path in files[: max(0, len(files) - MAX_FILES + 1)]:
            path.unlink(missing_ok=True)
