"""Transcripts of what the user says in one session, as events. Contains no model and no rules about turns."""

from collections.abc import Callable
from typing import Protocol

from server.access.identity import Identity
from server.doors.core.transcriber import MAX_S, SpokenInput, Transcriber, TranscriptEnd, Transcription
from server.doors.errors import ApiError
from server.doors.live.sound.recent_sound import RecentSound

IDLE_MS = 10_000  # of sound kept before the detector is certain of speech
KIND = "conversation.item.input_audio_transcription"


class SendEvent(Protocol):
    """Sends an event of a session."""

    def __call__(self, kind: str, **fields: object) -> None: ...


class ItemTranscripts:
    """The transcripts of one session's items; a subclass knows the session's settings.

    Args:
        send: sends events.
        transcriber: of all sessions.
        identity: whose session it is.
        session_id: the session's id.

    heard: sound that the detector hears.
    """

    def __init__(self, send: SendEvent, transcriber: Transcriber, identity: Identity, session_id: str):
        self._send, self._transcriber = send, transcriber
        self._identity, self._session_id = identity, session_id
        self.heard = RecentSound(round(1000 * MAX_S), IDLE_MS)
        self._running: dict[str, Transcription] = {}

    def transcribe(self, item_id: str, spoken: SpokenInput, keep: Callable[[str], None]) -> None:
        """Begin the transcript of an item. keep: gets the whole text."""
        fields = {"item_id": item_id, "content_index": 0}

        def on_text(delta: str) -> None:
            self._send(f"{KIND}.delta", **fields, delta=delta)

        def on_end(end: TranscriptEnd) -> None:
            self._running.pop(item_id, None)
            if isinstance(end, ApiError):
                self._send(f"{KIND}.failed", **fields, error=end.fields())
                return
            keep(end.text)
            usage = {"type": "duration", "seconds": round(end.seconds, 3)}
            self._send(f"{KIND}.completed", **fields, transcript=end.text, usage=usage)

        self._running[item_id] = self._transcriber.start(self._session_id, self._identity, spoken, on_text, on_end)

    def cancel(self, item_id: str) -> None:
        """End the transcript of an item that is deleted, if it is not over."""
        running = self._running.pop(item_id, None)
        if running is not None:
            running.cancel()

    def stop(self) -> None:
        """End all transcripts without events."""
        for running in self._running.values():
            running.cancel()
        self._running.clear()
