"""Completes recordings whose timeline has ended: one process at a time, with the lowest priority.

The process is `python -m server.recording.render`. It does not share this process's interpreter, so live relays are not
delayed.
"""

import logging
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue

from server.recording.store import RecordingStore

LOG = logging.getLogger(__name__)
ROOT = Path(__file__).resolve().parents[2]
MAX_AT_ONCE = 64  # recordings that one process completes, one after the other
STOP_S = 5.0
MAX_LOGGED_CHARS = 2000


class Renderer:
    """Completes recordings on a thread, in the order in which they end."""

    def __init__(self, store: RecordingStore):
        self._store = store
        self._queue: SimpleQueue[str | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[str] | None = None
        self._is_stopping = False
        self._lock = threading.Lock()  # held while a process is started or killed

    def start(self) -> None:
        """Start the thread, which begins with the recordings that still have a timeline."""
        self._thread = threading.Thread(target=self._run, name="recording-renderer", daemon=True)
        self._thread.start()

    def submit(self, recording_id: str) -> None:
        """Complete a recording when its turn comes."""
        self._queue.put(recording_id)

    def stop(self) -> None:
        """Kill the running process and end the thread. A later `start` completes what is left."""
        with self._lock:
            self._is_stopping = True
            if self._process is not None:
                self._process.kill()
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join(STOP_S)

    def _run(self) -> None:
        self._store.remove_deleted()
        waiting: list[str | None] = [*self._store.unfinished()]
        while None not in waiting and not self._is_stopping:
            for start in range(0, len(waiting), MAX_AT_ONCE):
                try:
                    self._render([one for one in waiting[start : start + MAX_AT_ONCE] if one is not None])
                except OSError as error:  # no process can be started; the next start completes these
                    LOG.error("completing recordings failed: %s", error)
            waiting = [self._queue.get()]
            with suppress(Empty):
                while len(waiting) < MAX_AT_ONCE:
                    waiting.append(self._queue.get_nowait())

    def _render(self, recording_ids: list[str]) -> None:
        folders = [str(self._store.folder_of(one)) for one in recording_ids]
        with self._lock:
            if self._is_stopping:
                return
            self._process = subprocess.Popen(
                [sys.executable, "-m", "server.recording.render", *folders],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
            )
        _, errors = self._process.communicate()
        if self._process.returncode and not self._is_stopping:
            LOG.error("completing recordings failed: %s", errors[-MAX_LOGGED_CHARS:].strip())
