"""Recordings of live sessions: what the gateway calls while it relays. Nothing here waits for a disk.

recordings.open()
recording = recordings.start("omni_duplex", "omni_x", worker_id=0)  # None if recording is off
recording.from_client(data)
recording.from_worker(data)
recording.end()
recordings.close()
"""

from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, Protocol, TypeVar

from server.recording.ids import new_recording_id
from server.recording.renderer import Renderer
from server.recording.store import OWNER, RecordingStore
from server.recording.timeline import RecordSource
from server.recording.writer import RecordingWriter, WriterMetrics, WrittenRecording
from worker.protocol.wire import json_text

RecordingKind = Literal["omni_duplex", "audio_duplex", "half_duplex_audio", "chat", "streaming"]
AnyData = TypeVar("AnyData", str, bytes, str | bytes)
STAMP = "recording_session_id"
MAX_TITLE_CHARS = 100


class RecordingMetrics(WriterMetrics, Protocol):
    """Counters of recordings."""

    def record_recording_start(self, kind: str) -> None: ...


class NoMetrics:
    """Metrics that count nothing, for use without a gateway."""

    def record_recording_start(self, kind: str) -> None:
        pass

    def record_recorded(self, n_bytes: int) -> None:
        pass

    def record_unrecorded(self) -> None:
        pass

    def record_recording_failure(self) -> None:
        pass


class Recording:
    """One recording in progress. recording_id: the value of `recording_session_id`."""

    def __init__(self, recordings: "Recordings", written: WrittenRecording):
        self.recording_id = written.recording_id
        self._recordings, self._written = recordings, written

    def from_client(self, data: str | bytes) -> None:
        """Record a message of the client: text or a binary frame as relayed, or the body of an HTTP request as text."""
        self._recordings.append(self._written, RecordSource.CLIENT, data)

    def from_worker(self, data: str | bytes) -> None:
        """Record a message to the client, such as a worker's message as relayed, or an HTTP response as text."""
        self._recordings.append(self._written, RecordSource.WORKER, data)

    def stamped(self, data: AnyData) -> AnyData:
        """A JSON object as text with `recording_session_id` added; anything else unchanged.

        The text is not parsed. A field of that name that the object has already is overridden: the last one counts.
        """
        if not isinstance(data, str):
            return data
        inner = data.rstrip()
        if not inner.endswith("}"):
            return data
        comma = "" if inner[:-1].rstrip().endswith("{") else ","
        return f"{inner[:-1]}{comma}{json_text(STAMP)}:{json_text(self.recording_id)}}}"

    def end(self) -> None:
        """End the recording; its files are made in the background. Later calls and messages have no effect."""
        self._recordings.end(self._written)


class Recordings:
    """All recordings of a gateway. is_enabled: whether sessions are recorded."""

    def __init__(self, store: RecordingStore, metrics: RecordingMetrics, *, is_enabled: bool):
        self.store, self.is_enabled = store, is_enabled
        self._metrics = metrics
        self._renderer = Renderer(store)
        self._writer = RecordingWriter(metrics, self._renderer.submit, store.delete)
        self._active: dict[str, WrittenRecording] = {}

    def open(self) -> None:
        """Start the threads, and complete the recordings that a crash left without an end."""
        self._renderer.start()
        if self.is_enabled:
            self._writer.start()

    def close(self) -> None:
        """End all recordings, write what is enqueued, and stop; blocks for seconds. The rest is completed by `open`."""
        for written in list(self._active.values()):
            self.end(written)
        if self.is_enabled:
            self._writer.stop()
        self._renderer.stop()

    @property
    def n_active(self) -> int:
        """Number of recordings in progress."""
        return len(self._active)

    @property
    def waiting_bytes(self) -> int:
        """Memory of messages that are not written yet."""
        return self._writer.waiting_bytes

    def is_active(self, recording_id: str) -> bool:
        """Whether the recording is in progress."""
        return recording_id in self._active

    def start(
        self, kind: RecordingKind, session_id: str, *, worker_id: int = 0, owner: str | None = None
    ) -> Recording | None:
        """Begin a recording; None if recording is off.

        Args:
            kind: how the messages are read later.
            session_id: the client's; it stays readable in the recording's id.
            worker_id: number of the worker or of its GPU.
            owner: whose session it is; None: not known.
        """
        if not self.is_enabled:
            return None
        now = datetime.now(UTC)
        recording_id = new_recording_id(session_id, now)
        meta: dict[str, object] = {
            "session_id": recording_id,
            "app_type": kind,
            "created_at": now.isoformat(timespec="milliseconds"),
            "ended_at": None,
            "duration_s": None,
            "worker_id": worker_id,
            "title": session_id[:MAX_TITLE_CHARS],
            "config": {},
        }
        if owner is not None:
            meta[OWNER] = owner
        written = WrittenRecording(recording_id, self.store.folder_of(recording_id), meta)
        self._active[recording_id] = written
        self._metrics.record_recording_start(kind)
        self._writer.begin(written)
        return Recording(self, written)

    def append(self, written: WrittenRecording, source: RecordSource, data: str | bytes) -> None:
        """Record a message unless the recording has ended."""
        if written.recording_id in self._active:
            self._writer.append(written, source, data)

    def end(self, written: WrittenRecording) -> None:
        """End a recording once."""
        if self._active.pop(written.recording_id, None) is not None:
            self._writer.end(written)

    def discard(self, recording_id: str) -> bool:
        """End a recording in progress and delete it. Returns: whether it was in progress."""
        written = self._active.pop(recording_id, None)
        if written is not None:
            self._writer.discard(written)
        return written is not None


def recordings_of(data_dir: Path, metrics: RecordingMetrics, *, is_enabled: bool) -> Recordings:
    """The recordings below `<data_dir>/sessions`."""
    return Recordings(RecordingStore(data_dir / "sessions"), metrics, is_enabled=is_enabled)
