"""What a Realtime session's configuration means for the engine, and the messages that apply it."""

from dataclasses import dataclass, field
from typing import Any

from server.doors.live.truncation import SlotWindow
from server.doors.realtime.session_config import RealtimeConfig
from worker.protocol.adjust_messages import Adjust
from worker.protocol.messages import Prepare

SIDE_TOKENS = 32  # of a call in one unit: about as many decode steps as a unit that speaks has


@dataclass(frozen=True)
class EngineSettings:
    """Prompt, voice and settings of the engine.

    voice: name of a registered voice; None: the server's default. max_rows: length of the context from which on no
    unit is sent; None: the oldest units leave it.
    """

    instructions: str
    voice: str | None
    settings: dict[str, Any] = field(default_factory=dict)
    max_rows: int | None = None

    @classmethod
    def of(
        cls,
        config: RealtimeConfig,
        voice: str | None,
        *,
        listen_scale: float = 1.0,
        slot: SlotWindow | None = None,
        has_side_lane: bool = False,
    ) -> "EngineSettings":
        """The engine's settings for a configuration.

        Args:
            voice: the registered voice for `config.voice`.
            listen_scale: factor on the odds of listening.
            slot: context of the deployment's slots.
            has_side_lane: the model may call functions beside its speech; otherwise the prompt leaves them out.
        """
        slot = slot or SlotWindow()
        may_call = has_side_lane and bool(config.tools) and config.tool_choice != "none"
        n_side = SIDE_TOKENS if may_call else 0
        if may_call:
            slot = slot.with_side_lane(n_side)
        settings = {
            "generate_audio": config.modality == "audio",
            "listen_prob_scale": listen_scale,
            "max_turn_tokens": config.max_output_tokens or 0,
            "window": slot.window_for(config.truncation),
        }
        if has_side_lane:
            settings["max_side_tokens_per_chunk"] = n_side
        instructions = config.instructions_with_functions if may_call else config.instructions
        return cls(instructions, voice, settings, slot.max_rows_for(config.truncation))

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
