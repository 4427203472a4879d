"""Transcripts of what the user says in one Realtime session. Contains no model and no rules about turns."""

from dataclasses import replace

from server.access.identity import Identity
from server.doors.core.transcriber import SpokenInput, Transcriber
from server.doors.live.item_transcripts import ItemTranscripts
from server.doors.realtime.events.server_events import EventSender
from server.doors.realtime.items import ConversationItem
from server.doors.realtime.session_config import RealtimeConfig, TranscriptionSettings


class InputTranscriptions(ItemTranscripts):
    """The transcriptions of one session's items; arguments as for `ItemTranscripts`."""

    def __init__(self, send: EventSender, transcriber: Transcriber, identity: Identity, session_id: str):
        super().__init__(send, transcriber, identity, session_id)
        self._settings: TranscriptionSettings | None = None

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
        if settings is not None:
            self.transcribe(item.id, SpokenInput(sound, settings.language, settings.prompt), item.set_transcript)
