"""Writes traces to a folder on a thread of its own, one file a session."""

import atexit
import logging
import os
import queue
import re
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TextIO

from models.errors import SettingsError
from worker.trace.recorder import TraceRecorder
from worker.trace.records import Record, Sink, to_line

LOG = logging.getLogger(__name__)
MAX_FILE_CHARS = 1 << 28  # an hour of sound takes about half of it
MAX_WAITING = 1024  # records of all sessions that are not written yet; more are not kept if the disk is slow
SUFFIX = ".trace.jsonl"
_Make = Callable[[], Record]


class TraceFolder:
    """Files of sessions. A session whose file cannot be written in time goes on without it; the log says so once."""

    def __init__(self, folder: Path):
        """Raises: OSError if the folder cannot be made."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._n_files = folder, 0
        self._queue: queue.SimpleQueue[tuple[Path, _Make | None] | None] = queue.SimpleQueue()
        self._files: dict[Path, TextIO] = {}
        self._sizes: dict[Path, int] = {}
        self._thread = threading.Thread(target=self._write_all, name="trace-writer", daemon=True)
        self._thread.start()

    def open(self, session: str) -> Sink:
        """The receiver of a session's records; the file is made with the first one."""
        self._n_files += 1
        name = re.sub(r"[^A-Za-z0-9_-]", "_", session)[:64]
        path = self._folder / f"{name}-{os.getpid()}-{self._n_files}{SUFFIX}"
        has_ended = False

        def put(make: _Make | None) -> None:
            nonlocal has_ended
            if make is not None and not has_ended and self._queue.qsize() >= MAX_WAITING:
                LOG.warning("trace %s ends: expected at most %d records that wait for the disk", path, MAX_WAITING)
                has_ended = True
            if make is None or not has_ended:
                self._queue.put((path, make))

        return put

    def close(self) -> None:
        """Write what is left and end the thread."""
        self._queue.put(None)
        self._thread.join()

    def _write_all(self) -> None:
        while (given := self._queue.get()) is not None:
            path, make = given
            try:
                self._write(path, make)
            except Exception as error:
                LOG.warning("trace %s ends: %s", path, error)
                self._sizes[path] = MAX_FILE_CHARS
                self._close(path)
        for path in list(self._files):
            self._close(path)

    def _write(self, path: Path, make: _Make | None) -> None:
        if make is None:
            self._close(path)
            self._sizes.pop(path, None)
            return
        size = self._sizes.get(path, 0)
        if size >= MAX_FILE_CHARS:
            return
        if path not in self._files:
            self._files[path] = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w")
        line = to_line(make())
        if size + len(line) > MAX_FILE_CHARS:
            raise ValueError(f"expected at most {MAX_FILE_CHARS} characters, got more")
        self._files[path].write(line)
        self._files[path].flush()  # a trace of a worker that dies ends with its last unit
        self._sizes[path] = size + len(line)

    def _close(self, path: Path) -> None:
        if (file := self._files.pop(path, None)) is not None:
            file.close()


def recorder_for(path: Path | None, asked: Path | None = None) -> TraceRecorder | None:
    """A recorder that writes to a folder; None without one.

    Args:
        path: for all sessions.
        asked: used without `path`, for sessions with `spec.trace`.
    Raises:
        SettingsError: if the folder cannot be made.
    """
    chosen = path or asked
    if chosen is None:
        return None
    name, who = ("trace_dir", "all sessions") if path else ("record_traces", "sessions with spec.trace")
    try:
        folder = _folder(chosen)
    except OSError as error:
        got = f"{chosen}: {error.strerror}"
        raise SettingsError(f"service.{name}", expected="a folder that can be made", got=got) from None
    LOG.warning("sound, pictures and texts of %s are written to %s (service.%s)", who, chosen, name)
    return TraceRecorder(folder.open, asked_only=path is None)


@cache
def _folder(path: Path) -> TraceFolder:
    """The folder's only writer in this process, which ends with it."""
    folder = TraceFolder(path)
    atexit.register(folder.close)
    return folder
