"""The thread that writes the timelines of all recordings.

The event loop only enqueues references to messages. The memory of messages that wait for the disk is bounded: above the
bound, messages are left out, and the timeline says how many. Every batch is flushed to the operating system, and a
second thread writes it to the disk every second.
"""

import logging
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Protocol

from server.recording.files import META, create_folder, read_json, write_json
from server.recording.timeline import FILE_NAME, RecordSource, TimelineFile

LOG = logging.getLogger(__name__)
BATCH_S = 0.05  # pause between two batches, so that the threads rarely compete for the interpreter's lock
SYNC_S = 1.0
MAX_WAITING_BYTES = 256 * 2**20  # of messages that are not written yet, all recordings together
OVERHEAD = 256  # bytes of memory counted for each message on top of its own size
STOP_S = 10.0


class WriterMetrics(Protocol):
    """Counters of the writer; called from its thread and from the event loop."""

    def record_recorded(self, n_bytes: int) -> None: ...

    def record_unrecorded(self) -> None: ...

    def record_recording_failure(self) -> None: ...


@dataclass(eq=False)
class WrittenRecording:
    """One recording as the writer sees it. n_missing: messages left out since the last one that was enqueued."""

    recording_id: str
    folder: Path
    meta: dict[str, object]
    started_at: float = field(default_factory=time.monotonic)
    n_missing: int = 0


@dataclass(frozen=True)
class _Append:
    recording: WrittenRecording
    source: RecordSource
    at_ms: float
    data: str | bytes
    n_bytes: int


@dataclass(frozen=True)
class _Begin:
    recording: WrittenRecording


@dataclass(frozen=True)
class _End:
    recording: WrittenRecording
    finish: Callable[[str], object]  # called with the recording's id


class _OpenFile:
    """A timeline that is being written. lock: held while it is synced or closed."""

    def __init__(self, file: TimelineFile):
        self.file = file
        self.lock = threading.Lock()
        self.is_dirty = self.is_closed = False

    def sync(self) -> None:
        with self.lock:
            if self.is_dirty and not self.is_closed:
                self.is_dirty = False
                self.file.sync()

    def close(self) -> None:
        with self.lock:
            self.is_closed = True
            self.file.close()


class RecordingWriter:
    """Writer of all recordings. `begin`, `append` and `end` are called from one thread and return at once."""

    def __init__(self, metrics: WriterMetrics, on_end: Callable[[str], object], delete: Callable[[str], object]):
        """
        Args:
            metrics: counters.
            on_end: called on the writer's thread with the id of each recording whose timeline is complete.
            delete: called on the writer's thread with the id of each discarded recording.
        """
        self._metrics, self._on_end, self._delete = metrics, on_end, delete
        self._queue: SimpleQueue[_Append | _Begin | _End | None] = SimpleQueue()
        # Each counter has one writing thread; their difference is the number of waiting bytes.
        self._enqueued_bytes = self._written_bytes = 0
        self._open: dict[WrittenRecording, _OpenFile] = {}
        self._stopped = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start the threads."""
        for name, target in (("recording-writer", self._write), ("recording-sync", self._sync)):
            thread = threading.Thread(target=target, name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def stop(self) -> None:
        """Write everything enqueued, close all files and end the threads; blocks up to `STOP_S` seconds."""
        self._queue.put(None)
        for thread in self._threads:
            thread.join(STOP_S)

    @property
    def waiting_bytes(self) -> int:
        """Memory of the messages that are not written yet."""
        return self._enqueued_bytes - self._written_bytes

    def begin(self, recording: WrittenRecording) -> None:
        """Create the recording's files."""
        self._queue.put(_Begin(recording))

    def append(self, recording: WrittenRecording, source: RecordSource, data: str | bytes) -> None:
        """Write a message, or leave it out if too much waits for the disk."""
        n_bytes = sys.getsizeof(data) + OVERHEAD
        if self.waiting_bytes + n_bytes > MAX_WAITING_BYTES:
            recording.n_missing += 1
            self._metrics.record_unrecorded()
            return
        self._append_gap(recording)
        self._enqueued_bytes += n_bytes
        self._queue.put(_Append(recording, source, _ms_since(recording), data, n_bytes))

    def end(self, recording: WrittenRecording) -> None:
        """Close the recording's file after everything enqueued."""
        self._append_gap(recording)
        self._queue.put(_End(recording, self._on_end))

    def discard(self, recording: WrittenRecording) -> None:
        """Close the recording's file and delete its folder."""
        self._queue.put(_End(recording, self._delete))

    def _append_gap(self, recording: WrittenRecording) -> None:
        if recording.n_missing:
            self._queue.put(_Append(recording, RecordSource.GAP, _ms_since(recording), str(recording.n_missing), 0))
            recording.n_missing = 0

    # --- on the writer's thread ------------------------------------------------------------------

    def _write(self) -> None:
        goes_on = True
        while goes_on:
            batch = [self._queue.get()]
            time.sleep(BATCH_S)
            with suppress(Empty):
                while True:
                    batch.append(self._queue.get_nowait())
            goes_on = self._write_batch(batch)
        for recording in list(self._open):
            self._close(recording)
        self._stopped.set()

    def _write_batch(self, batch: list[_Append | _Begin | _End | None]) -> bool:
        """Write a batch and flush it. Returns: False after the mark of the end."""
        touched: dict[WrittenRecording, int] = {}
        for command in batch:
            try:
                match command:
                    case _Begin(recording):
                        self._create(recording)
                    case _Append(recording):
                        self._written_bytes += command.n_bytes
                        touched[recording] = touched.get(recording, 0) + self._append(command)
                    case _End(recording, finish):
                        self._close(recording)
                        finish(recording.recording_id)
            except Exception as error:  # ends only this recording
                assert command is not None, "expected the mark of the end to need no work"
                self._fail(command.recording, error)
        for recording, n_bytes in touched.items():
            if (opened := self._open.get(recording)) is not None:
                self._attempt(recording, opened.file.flush)
                opened.is_dirty = True
            self._metrics.record_recorded(n_bytes)
        return None not in batch

    def _create(self, recording: WrittenRecording) -> None:
        create_folder(recording.folder, recording.meta)
        self._open[recording] = _OpenFile(TimelineFile(recording.folder / FILE_NAME, create=True))

    def _append(self, one: _Append) -> int:
        """Write one message. Returns: its size; 0 if it is not recorded."""
        opened = self._open.get(one.recording)
        if opened is None:  # an earlier write failed
            self._metrics.record_unrecorded()
            return 0
        return opened.file.append(one.source, one.at_ms, one.data)

    def _close(self, recording: WrittenRecording) -> None:
        if (opened := self._open.get(recording)) is not None:
            self._attempt(recording, opened.close)
            self._open.pop(recording, None)

    def _attempt(self, recording: WrittenRecording, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as error:
            self._fail(recording, error)

    def _fail(self, recording: WrittenRecording, error: Exception) -> None:
        """Stop writing a recording. The session is not affected; the recording holds what was written before."""
        LOG.error("recording %s stopped: %s", recording.recording_id, error, exc_info=not isinstance(error, OSError))
        self._metrics.record_recording_failure()
        if (opened := self._open.pop(recording, None)) is not None:
            with suppress(OSError):
                opened.close()
        reason = error.strerror if isinstance(error, OSError) else error
        with suppress(OSError):
            meta = read_json(recording.folder / META) or recording.meta
            write_json(recording.folder / META, {**meta, "notes": [f"the recording stopped early: {reason}"]})

    # --- on the syncing thread -------------------------------------------------------------------

    def _sync(self) -> None:
        while not self._stopped.wait(SYNC_S):
            for recording, opened in list(self._open.items()):
                try:
                    opened.sync()
                except OSError as error:
                    LOG.error("recording %s: %s", recording.recording_id, error)


def _ms_since(recording: WrittenRecording) -> float:
    return 1000 * (time.monotonic() - recording.started_at)
