"""The configuration of a Realtime session: defaults, the merge of updates, and the object that the client sees."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from server.doors.live.event_error import EventError
from server.doors.live.sound.detector import DetectorSettings
from server.doors.live.sound.wire_sound import WireFormat
from server.doors.live.truncation import AUTO, Truncation
from server.doors.realtime.events.session_patch import (
    AudioPatch,
    Eagerness,
    InputPatch,
    OutputPatch,
    SessionPatch,
    TranscriptionPatch,
    TurnDetectionPatch,
)
from worker.protocol.messages import SYSTEM_PROMPT
from worker.protocol.wire import json_text

FUNCTIONS = "You may call these functions:"
FUNCTION_FIELDS = ("name", "description", "parameters")
DEFAULT_VOICE = "default"
# Accepted and shown without effect.
ECHOED = ("tracing", "prompt", "include")
ECHOED_IF_GIVEN = ("reasoning", "parallel_tool_calls")  # stock clients do not expect them otherwise
Json = dict[str, Any]


@dataclass(frozen=True)
class TurnDetection:
    """How turns begin and end; `semantic_vad` leaves the decision to speak to the model.

    Attributes:
        threshold: probability of speech that begins a turn of the user.
        prefix_padding_ms: sound before it that counts as the turn's.
        silence_duration_ms: silence that ends it.
        idle_timeout_ms: silence after playback until the model is asked to speak; None: never.
        eagerness: how soon the model speaks.
        create_response: the model may speak without `response.create`.
        interrupt_response: the user's voice ends a response.
    """

    type: Literal["server_vad", "semantic_vad"] = "semantic_vad"
    threshold: float = 0.5
    prefix_padding_ms: int = 300
    silence_duration_ms: int = 500
    idle_timeout_ms: int | None = None
    eagerness: Eagerness = "auto"
    create_response: bool = True
    interrupt_response: bool = True

    def merged(self, patch: TurnDetectionPatch) -> "TurnDetection":
        """These settings with the given ones; another type begins with its defaults."""
        base = self if patch.type is None or patch.type == self.type else TurnDetection(type=patch.type)
        given = {name: getattr(patch, name) for name in patch.model_fields_set}
        if given.get("idle_timeout_ms", 0) is None:
            base = replace(base, idle_timeout_ms=None)
        merged = replace(base, **{name: value for name, value in given.items() if value is not None})
        return merged if merged.type == "server_vad" else replace(merged, idle_timeout_ms=None)

    def detector_settings(self) -> DetectorSettings:
        """The settings of the detector of speech."""
        return DetectorSettings(self.threshold, self.prefix_padding_ms, self.silence_duration_ms)

    def described(self) -> Json:
        """The object `turn_detection` of a session."""
        shared = {"create_response": self.create_response, "interrupt_response": self.interrupt_response}
        if self.type == "semantic_vad":
            return {"type": self.type, "eagerness": self.eagerness, **shared}
        return {
            "type": self.type,
            "threshold": self.threshold,
            "prefix_padding_ms": self.prefix_padding_ms,
            "silence_duration_ms": self.silence_duration_ms,
            "idle_timeout_ms": self.idle_timeout_ms,
            **shared,
        }


@dataclass(frozen=True)
class TranscriptionSettings:
    """How the user's speech is transcribed.

    Attributes:
        model: name as the client gave it; the served model transcribes.
        language: code of the speech's language; None: unknown.
        prompt: text that the transcripts may need, such as names.
    """

    model: str
    language: str | None = None
    prompt: str | None = None

    def merged(self, patch: TranscriptionPatch) -> "TranscriptionSettings":
        """These settings with the given ones."""
        changes = {name: getattr(patch, name) for name in patch.model_fields_set}
        return replace(self, **{**changes, "model": patch.model or self.model})

    def described(self) -> Json:
        """The object `transcription` of a session."""
        given = {"model": self.model, "language": self.language, "prompt": self.prompt}
        return {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True)
class RealtimeConfig:
    """All settings in force.

    Attributes:
        forced_function: name of the function that `tool_choice` demands, which then is `required`; None: any.
        max_output_tokens: None for no limit.
        echoed: fields that are shown and have no effect.
    """

    model: str
    instructions: str = SYSTEM_PROMPT
    modality: Literal["audio", "text"] = "audio"
    tools: tuple[Json, ...] = ()
    tool_choice: str = "auto"
    forced_function: str | None = None
    max_output_tokens: int | None = None
    truncation: Truncation = AUTO
    input_format: WireFormat = "audio/pcm"
    output_format: WireFormat = "audio/pcm"
    turn_detection: TurnDetection | None = TurnDetection()
    transcription: TranscriptionSettings | None = None
    voice: str = DEFAULT_VOICE
    speed: float = 1.0
    echoed: Mapping[str, object] = field(default_factory=dict)

    @cached_property
    def instructions_with_functions(self) -> str:
        """The prompt of a model with a side lane: the instructions, and a line of JSON for each function."""
        lines = [json_text({name: tool[name] for name in FUNCTION_FIELDS if name in tool}) for tool in self.tools]
        return "\n".join([*([self.instructions, ""] if self.instructions else []), FUNCTIONS, *lines])

    def merged(self, patch: SessionPatch, *, has_spoken: bool = False) -> "RealtimeConfig":
        """These settings with the given ones.

        Args:
            patch: only its named fields change.
            has_spoken: the session has produced sound, so that its voice stays.
        Raises: EventError; nothing has changed then.
        """
        named = patch.model_fields_set
        changes: Json = {}
        if patch.output_modalities:
            changes["modality"] = patch.output_modalities[0]
        if "instructions" in named:
            changes["instructions"] = patch.instructions or ""
        if "tools" in named:
            changes["tools"] = tuple(patch.tools or ())
        if "tool_choice" in named:
            changes |= choice_of(patch.tool_choice, "session.tool_choice")
        if "max_output_tokens" in named:
            changes["max_output_tokens"] = limit_of(patch.max_output_tokens)
        if patch.truncation is not None:
            changes["truncation"] = patch.truncation.chosen()
        echoed: Json = {name: getattr(patch, name) for name in (*ECHOED, *ECHOED_IF_GIVEN) if name in named}
        after = replace(self, **changes)
        if patch.audio is not None:
            after, shown = after._with_audio(patch.audio, has_spoken=has_spoken)
            echoed |= shown
        return replace(after, echoed={**self.echoed, **echoed})

    def _with_audio(self, audio: AudioPatch, *, has_spoken: bool) -> tuple["RealtimeConfig", Json]:
        after = self if audio.output is None else self._with_output(audio.output, has_spoken=has_spoken)
        return (after, {}) if audio.input is None else after._with_input(audio.input)

    def _with_output(self, output: OutputPatch, *, has_spoken: bool) -> "RealtimeConfig":
        voice = output.voice or self.voice
        if has_spoken and voice != self.voice:
            message = f"voice: expected {self.voice}, which the session has spoken with, got {voice}"
            raise EventError("cannot_update_voice", message, "session.audio.output.voice")
        form = self.output_format if output.format is None else output.format.type
        return replace(self, voice=voice, output_format=form, speed=output.speed or self.speed)

    def _with_input(self, given: InputPatch) -> tuple["RealtimeConfig", Json]:
        after, shown = self, {}
        if given.format is not None:
            after = replace(after, input_format=given.format.type)
        if "turn_detection" in given.model_fields_set:
            patch = given.turn_detection
            merged = None if patch is None else (self.turn_detection or TurnDetection()).merged(patch)
            after = replace(after, turn_detection=merged)
        if "transcription" in given.model_fields_set:
            before = self.transcription or TranscriptionSettings(self.model)
            wanted = given.transcription
            after = replace(after, transcription=None if wanted is None else before.merged(wanted))
        if "noise_reduction" in given.model_fields_set:
            shown["noise_reduction"] = given.noise_reduction and {"type": given.noise_reduction.type}
        return after, shown

    def described(self) -> Json:
        """The session object without its id and expiry."""
        detection = self.turn_detection
        return {
            "object": "realtime.session",
            "type": "realtime",
            "model": self.model,
            "output_modalities": [self.modality],
            "instructions": self.instructions,
            "tools": list(self.tools),
            "tool_choice": self.tool_choice,
            "max_output_tokens": self.max_output_tokens or "inf",
            "truncation": self.truncation.described(),
            **{name: self.echoed.get(name) for name in ECHOED},
            **{name: self.echoed[name] for name in ECHOED_IF_GIVEN if self.echoed.get(name) is not None},
            "audio": {
                "input": {
                    "format": format_object(self.input_format),
                    "transcription": self.transcription and self.transcription.described(),
                    "noise_reduction": self.echoed.get("noise_reduction"),
                    "turn_detection": detection and detection.described(),
                },
                "output": {"format": format_object(self.output_format), "voice": self.voice, "speed": self.speed},
            },
        }


def format_object(name: WireFormat) -> Json:
    """The object `format` of a session's sound."""
    return {"type": name, "rate": 24_000} if name == "audio/pcm" else {"type": name}


def choice_of(given: str | Json | None, param: str) -> Json:
    """Fields of `RealtimeConfig` for a tool choice. param: its name. Raises: EventError.

    A forced function shows as `required`, since stock clients accept words only.
    """
    if isinstance(given, Mapping):
        kind, name = given.get("type", "function"), given.get("name")
        if kind != "function":
            raise EventError("unsupported_tool", f"{param}: expected a function, got the type {str(kind)[:40]}", param)
        if not isinstance(name, str):
            raise EventError("missing_required_parameter", f"{param}.name: expected a name, got none", f"{param}.name")
        return {"tool_choice": "required", "forced_function": name}
    if given not in (None, "auto", "none", "required"):
        message = f"{param}: expected auto, none, required or a function, got {given[:40]}"
        raise EventError("invalid_value", message, param)
    return {"tool_choice": given or "auto", "forced_function": None}


def limit_of(given: int | str | None) -> int | None:
    """The limit of tokens; None for `inf` and for none."""
    return given if isinstance(given, int) else None
