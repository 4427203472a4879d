"""Records one session: from its first message to its end, if recordings are on."""

from server.access.identity import Identity
from server.dispatch.workers import WorkerLease
from server.live.kinds import Kind, request_type_of
from server.recording.recordings import AnyData, Recording, RecordingKind, Recordings

STAMPED = frozenset({"prepared", "prefill_done", "done"})  # messages that tell the client the recording's id


class Recorder:
    """The recording of one session."""

    def __init__(self, recordings: Recordings, kind: Kind, session_id: str, identity: Identity):
        self._recordings, self._session_id = recordings, session_id
        self._owner = identity.owner if identity.has_key else None
        request_type = request_type_of(kind, session_id)
        self._kind: RecordingKind = "streaming" if kind is Kind.STREAMING else request_type
        self._recording: Recording | None = None

    @property
    def is_enabled(self) -> bool:
        return self._recordings.is_enabled

    def from_client(self, data: str | bytes, lease: WorkerLease) -> None:
        """Record a message to the worker. The first one begins the recording, so that none is empty."""
        if self._recording is None:
            self._recording = self._recordings.start(
                self._kind, self._session_id, worker_id=lease.worker.gpu_id, owner=self._owner
            )
        if self._recording is not None:
            self._recording.from_client(data)

    def from_worker(self, data: str | bytes) -> None:
        """Record a message to the client."""
        if self._recording is not None:
            self._recording.from_worker(data)

    def stamped(self, data: AnyData) -> AnyData:
        """A JSON object as text with the recording's id; anything else, and all without a recording, unchanged."""
        return data if self._recording is None else self._recording.stamped(data)

    def end(self) -> None:
        """End the recording, if there is one."""
        if self._recording is not None:
            self._recording.end()
