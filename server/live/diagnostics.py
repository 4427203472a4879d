"""What clients report of themselves: one JSON line each in `diag_<session>.jsonl`. Bounded, in size and in number.

Knows files. Does not know what is in a report.
"""

import asyncio
import logging
import time
from pathlib import Path

from server.live.inbox import Data
from worker.protocol.messages import ClientDiagnostic
from worker.protocol.wire import WireError, json_text, read_object

LOG = logging.getLogger(__name__)
MAX_CHARS = 65_536  # of one report
MAX_READ = 2**18  # characters; what is longer is no report
MAX_WRITING = 64  # reports on their way to the disk
MAX_BYTES = 2**20  # of one session's
MAX_FILES = 200
NAME = ClientDiagnostic.kind()


class Diagnostics:
    """folder: where the files are put, made when it is needed."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._writing: set[asyncio.Task[None]] = set()

    def keep(self, data: Data, session_id: str) -> bool:
        """Returns: whether the message is a report, which nobody else is to get."""
        # Looking for the word comes first: it takes microseconds, and hardly any message has it. Reading a huge one
        # would hold everybody up.
        if not isinstance(data, str) or len(data) > MAX_READ or NAME not in data:
            return False
        try:
            report = read_object(data)
        except WireError:
            return False  # the worker says what is wrong
        if report.get("type") != NAME:
            return False
        if len(data) <= MAX_CHARS and len(self._writing) < MAX_WRITING:
            line = json_text({**report, "_server_recv_ts": time.time()})
            task = asyncio.create_task(asyncio.to_thread(self._write, session_id, line))
            self._writing.add(task)
            task.add_done_callback(self._writing.discard)
        return True

    def _write(self, session_id: str, line: str) -> None:
        path = self._folder / f"diag_{session_id}.jsonl"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                self._make_room()
            elif path.stat().st_size > MAX_BYTES:
                return
            with path.open("a", encoding="utf-8") as file:
                file.write(f"{line}\n")
        except OSError as error:
            LOG.warning("diagnostics of session %s: %s", session_id, error)

    def _make_room(self) -> None:
        files = sorted(self._folder.glob("diag_*.jsonl"), key=lambda path: path.stat().st_mtime)
        for path in files[: max(0, len(files) - MAX_FILES + 1)]:
            path.unlink(missing_ok=True)
