"""Transcripts of what the user says in one session, as events. Contains no model and no rules about turns."""

from dataclasses import replace

from server.access.identity import Identity
from server.doors.core.transcriber import MAX_S, SpokenInput, Transcriber, Transcription, WholeTranscript
from server.doors.errors import ApiError
from server.doors.live.sound.recent_sound import RecentSound
from server.doors.realtime.events.server_events import EventSender
from server.doors.realtime.items import ConversationItem
from server.doors.realtime.session_config import RealtimeConfig, TranscriptionSettings

IDLE_MS = 10_000  # of sound kept before the detector is certain of speech
KIND = "conversation.item.input_audio_transcription"


class InputTranscriptions:
    """The transcriptions of one session's items.

    Args:
        send: sends events.
        transcriber: of all sessions.
        identity: whose session it is.
        session_id: the session's id.

    heard: sound that the detector hears.
    """

    def __init__(self, send: EventSender, transcriber: Transcriber, identity: Identity, session_id: str):
        self._send, self._transcriber = send, transcriber
        self._identity, self._session_id = identity, session_id
        self.heard = RecentSound(round(1000 * MAX_S), IDLE_MS)
        self._settings: TranscriptionSettings | None = None
        self._running: dict[str, Transcription] = {}

    def configure(self, config: RealtimeConfig) -> RealtimeConfig:
        """Follow the session's settings. Returns: them, without transcription if the server makes none."""
        if not self._transcriber.is_enabled:
            config = replace(config, transcription=None)
        self._settings = config.transcription
        self.heard.keep(is_kept=self._settings is not None)
        return config

    def begin_turn(self, start_ms: float) -> None:
        """The user's turn begins. start_ms: in the sound that the detector hears."""
        self.heard.begin(start_ms)

    def clear(self) -> None:
        """Drop sound that is not committed."""
        self.heard.clear()

    def start(self, item: ConversationItem, end_ms: float | None = None) -> None:
        """Transcribe an item that was committed.

        Args:
            item: its own sound, or what the detector has heard since the turn's begin or the item before.
            end_ms: of the turn; None: now.
        """
        heard = self.heard.cut(end_ms)
        sound, settings = heard if item.sound is None else item.sound, self._settings
        if settings is None:
            return
        fields = {"item_id": item.id, "content_index": 0}

        def on_text(delta: str) -> None:
            self._send(f"{KIND}.delta", **fields, delta=delta)

        def on_end(end: WholeTranscript | ApiError) -> None:
            self._running.pop(item.id, None)
            if isinstance(end, ApiError):
                self._send(f"{KIND}.failed", **fields, error=end.fields())
                return
            item.set_transcript(end.text)
            usage = {"type": "duration", "seconds": round(end.seconds, 3)}
            self._send(f"{KIND}.completed", **fields, transcript=end.text, usage=usage)

        spoken = SpokenInput(sound, settings.language, settings.prompt)
        self._running[item.id] = self._transcriber.start(self._session_id, self._identity, spoken, on_text, on_end)

    def cancel(self, item_id: str) -> None:
        """End the transcription of an item that is deleted, if it is not over."""
        running = self._running.pop(item_id, None)
        if running is not None:
            running.cancel()

    def stop(self) -> None:
        """End all transcriptions without events."""
        for running in self._running.values():
            running.cancel()
        self._running.clear()
