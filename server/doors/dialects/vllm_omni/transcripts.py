"""Transcripts of what the user of a vLLM-Omni session says, as events. Contains no model and no rules about turns."""

from dataclasses import dataclass

from server.access.identity import Identity
from server.doors.core.request_fields import RequestFields
from server.doors.core.transcriber import MAX_S, SpokenInput, Transcriber, TranscriptEnd, Transcription
from server.doors.dialects.vllm_omni.events import OmniEvents
from server.doors.dialects.vllm_omni.items import OmniItem
from server.doors.errors import ApiError, invalid
from server.doors.live.sound.recent_sound import RecentSound

IDLE_MS = 10_000  # of sound kept before the detector is certain of speech
MAX_HINT = 4000  # characters
KIND = "conversation.item.input_audio_transcription"


@dataclass(frozen=True)
class OmniTranscription:
    """Settings of transcripts. language: code; "": unknown. hint: text that they may need."""

    language: str = ""
    hint: str = ""

    @classmethod
    def of(cls, given: RequestFields) -> "OmniTranscription":
        """Raises: ApiError."""
        language, hint = given.text("language", ""), given.text("prompt", "")
        if len(language) > 20 or len(hint) > MAX_HINT:
            got = f"{len(language)} and {len(hint)}"
            raise invalid(
                given.name("prompt"), expected=f"at most 20 characters of language, {MAX_HINT} of prompt", got=got
            )
        return cls(language, hint)

    def shown(self) -> dict[str, object]:
        return {"language": self.language or None, "prompt": self.hint or None}


class OmniTranscripts:
    """The transcripts of one session.

    Args:
        send: sends events.
        transcriber: of all sessions.
        identity: whose session it is.
        session_id: the session's id.

    heard: sound that the detector hears.
    """

    def __init__(self, send: OmniEvents, transcriber: Transcriber, identity: Identity, session_id: str):
        self._send, self._transcriber = send, transcriber
        self._identity, self._session_id = identity, session_id
        self.heard = RecentSound(round(1000 * MAX_S), IDLE_MS)
        self._wanted: OmniTranscription | None = None
        self._running: dict[str, Transcription] = {}

    @property
    def is_wanted(self) -> bool:
        return self._wanted is not None

    def configure(self, wanted: OmniTranscription | None) -> OmniTranscription | None:
        """Change the settings. Returns: them; None if the server makes no transcripts."""
        self._wanted = wanted if self._transcriber.is_enabled else None
        self.heard.keep(is_kept=self.is_wanted)
        return self._wanted

    def start(self, item: OmniItem, end_ms: float | None) -> None:
        """Transcribe an item that was committed. end_ms: of its sound; None: now."""
        sound, wanted = self.heard.cut(end_ms), self._wanted
        if wanted is None:
            return
        place = {"item_id": item.id, "content_index": 0}

        def on_end(end: TranscriptEnd) -> None:
            self._running.pop(item.id, None)
            if isinstance(end, ApiError):
                self._send(f"{KIND}.failed", **place, error=end.fields())
                return
            item.transcribe(end.text)
            usage = {"type": "duration", "seconds": round(end.seconds, 3)}
            self._send(f"{KIND}.completed", **place, transcript=end.text, usage=usage)

        def on_text(delta: str) -> None:
            self._send(f"{KIND}.delta", **place, delta=delta)

        spoken = SpokenInput(sound, wanted.language or None, wanted.hint or None)
        self._running[item.id] = self._transcriber.start(self._session_id, self._identity, spoken, on_text, on_end)

    def stop(self) -> None:
        """End all transcriptions without events."""
        for running in self._running.values():
            running.cancel()
        self._running.clear()
