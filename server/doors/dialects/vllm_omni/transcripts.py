"""Transcripts of what the user of a vLLM-Omni session says. Contains no model and no rules about turns."""

from dataclasses import dataclass

from server.access.identity import Identity
from server.doors.core.request_fields import RequestFields
from server.doors.core.transcriber import SpokenInput, Transcriber
from server.doors.dialects.vllm_omni.events import OmniEvents
from server.doors.dialects.vllm_omni.items import OmniItem
from server.doors.errors import invalid
from server.doors.live.item_transcripts import ItemTranscripts

MAX_HINT = 4000  # characters


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


class OmniTranscripts(ItemTranscripts):
    """The transcripts of one session's items; arguments as for `ItemTranscripts`."""

    def __init__(self, send: OmniEvents, transcriber: Transcriber, identity: Identity, session_id: str):
        super().__init__(send, transcriber, identity, session_id)
        self._wanted: OmniTranscription | None = None

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
        if wanted is not None:
            self.transcribe(item.id, SpokenInput(sound, wanted.language or None, wanted.hint or None), item.transcribe)
