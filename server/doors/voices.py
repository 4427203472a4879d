"""The voices that clients of the OpenAI API name, and the registered voices that speak for them."""

from collections.abc import Mapping

from server.doors.errors import ApiError
from server.registry.voices import VoiceRegistry
from worker.protocol.speech_messages import DEFAULT_VOICE, SPEECH_VOICES

DEFAULT = DEFAULT_VOICE

LIVE_VOICES = frozenset(  # of GPT-Live alone
    ("beacon", "bossa", "cinder", "delta", "gleam", "meridian", "quartz", "ripple", "shida", "stone")
) | {"tempo", "vesper", "willow"}
API_VOICES = SPEECH_VOICES | LIVE_VOICES


class VoiceNames:
    """The voices of this server under the API's names.

    Args:
        registry: registered voices.
        mapped: voice of the API -> registered voice that speaks for it; the others speak with the default voice.
    """

    def __init__(self, registry: VoiceRegistry, mapped: Mapping[str, str]):
        self._registry, self._mapped = registry, dict(mapped)

    def all(self) -> list[str]:
        """Names of the API that every model takes, then registered voices. Reads files: call it on a thread."""
        return [*sorted(SPEECH_VOICES), *(voice.name for voice in self._registry.all())]

    def mapped(self, name: str) -> str:
        """The voice that the settings name for one of the API's; any other name as it is."""
        return self._mapped.get(name, name)

    def resolve(self, name: str) -> str | None:
        """The registered voice for a name; None for the server's default voice. Reads files: call it on a thread.

        Raises: ApiError for an unknown voice.
        """
        if name in self._mapped:
            return self._mapped[name]
        if name == DEFAULT or name in API_VOICES:
            return None
        for voice in self._registry.all():
            if voice.answers_to(name):
                return voice.id
        expected = f"a registered voice or one of {', '.join(sorted(API_VOICES))}"
        raise ApiError(400, f"voice: expected {expected}, got {name[:60]}", param="voice", code="invalid_value")
