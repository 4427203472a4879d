"""What a Realtime session's configuration means for the engine, and the messages that apply it."""

from dataclasses import dataclass, field
from typing import Any

from server.doors.realtime.session_config import RealtimeConfig
from server.doors.realtime.turns.turn_policy import LISTEN_SCALE
from worker.protocol.adjust_messages import Adjust
from worker.protocol.messages import Prepare


@dataclass(frozen=True)
class EngineSettings:
    """Prompt, voice and settings of the engine. voice: name of a registered voice; None: the server's default."""

    instructions: str
    voice: str | None
    settings: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, config: RealtimeConfig, voice: str | None) -> "EngineSettings":
        """The engine's settings for a configuration. voice: the registered voice for `config.voice`."""
        detection = config.turn_detection
        eagerness = "auto" if detection is None else detection.eagerness
        settings = {
            "generate_audio": config.modality == "audio",
            "listen_prob_scale": LISTEN_SCALE[eagerness],
            "max_turn_tokens": config.max_output_tokens or 0,
        }
        return cls(config.instructions, voice, settings)

    def prepare(self) -> Prepare:
        """The message that begins a context with these settings."""
        # The start guard of the engine would delay a greeting by three seconds.
        config = {**self.settings, "force_listen_count": 0}
        return Prepare(system_prompt=self.instructions, ref_audio_path=self.voice, config=config)

    def adjust_from(self, before: "EngineSettings") -> Adjust | None:
        """The message that changes a context from other settings to these; None if they are the same."""
        changed = {name: value for name, value in self.settings.items() if before.settings.get(name) != value}
        prompt = None if self.instructions == before.instructions else self.instructions
        voice = None if self.voice == before.voice else self.voice
        if not changed and prompt is None and voice is None:
            return None
        return Adjust(config=changed, system_prompt=prompt, ref_audio_path=voice)
