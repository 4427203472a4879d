"""What a client may write into `session`: GA and beta spellings, types and ranges. Contains no session's state."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from server.doors.live.event_error import EventError, of_validation
from server.doors.live.sound.wire_sound import WireFormat
from server.doors.live.truncation import Truncation
from worker.protocol.wire import json_text

MAX_INSTRUCTIONS = 32_768  # characters
MAX_TOOLS = 128
# Characters of JSON. A session is sent back in one event, of which stock clients read less than 1 MiB.
MAX_TOOLS_SIZE, MAX_ECHOED = 2**18, 2**14
MAX_PROMPT = 4096  # characters of the hint for transcriptions
BETA_FORMATS = {"pcm16": "audio/pcm", "g711_ulaw": "audio/pcmu", "g711_alaw": "audio/pcma"}
# Beta spellings of `session` -> where the value belongs.
BETA_PLACES = {
    "modalities": ("output_modalities",),
    "max_response_output_tokens": ("max_output_tokens",),
    "voice": ("audio", "output", "voice"),
    "speed": ("audio", "output", "speed"),
    "output_audio_format": ("audio", "output", "format"),
    "input_audio_format": ("audio", "input", "format"),
    "input_audio_transcription": ("audio", "input", "transcription"),
    "input_audio_noise_reduction": ("audio", "input", "noise_reduction"),
    "turn_detection": ("audio", "input", "turn_detection"),
}
Eagerness = Literal["low", "medium", "high", "auto"]


class _Patch(BaseModel):
    """Fields that are named change; unknown ones are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)


def _format(value: object) -> object:
    if isinstance(value, Mapping) and value.get("type") is None:
        return None if value.get("rate") is None else {**value, "type": "audio/pcm"}
    return {"type": BETA_FORMATS.get(value, value)} if isinstance(value, str) else value


def _off(value: object) -> object:
    return None if value is False else value


def _truncation(value: object) -> object:
    return {"type": value} if isinstance(value, str) else value


def _voice(value: object) -> object:
    return value.get("id") if isinstance(value, Mapping) else value


def _modalities(value: object) -> object:
    """The beta asks for text together with sound, which has a transcript anyway."""
    return ["audio"] if isinstance(value, list) and "audio" in value else value


class FormatPatch(_Patch):
    """An encoding of sound. rate: Hz; the only one of its type, or not given."""

    type: WireFormat
    rate: int | None = None

    @model_validator(mode="after")
    def _has_the_only_rate(self) -> "FormatPatch":
        rate = 24_000 if self.type == "audio/pcm" else 8000
        if self.rate not in (None, rate):
            raise ValueError(f"rate: expected {rate} for {self.type}, got {self.rate}")
        return self


class TranscriptionPatch(_Patch):
    """Settings of transcripts of the user. language: code. prompt: text that they may need."""

    model: str | None = Field(None, min_length=1, max_length=200)
    language: str | None = Field(None, max_length=64)
    prompt: str | None = Field(None, max_length=MAX_PROMPT)


class NoiseReductionPatch(_Patch):
    type: Literal["near_field", "far_field"]


class TurnDetectionPatch(_Patch):
    """Fields of `TurnDetection`."""

    type: Literal["server_vad", "semantic_vad"] | None = None
    threshold: float | None = Field(None, ge=0, le=1)
    prefix_padding_ms: int | None = Field(None, ge=0, le=5000)
    silence_duration_ms: int | None = Field(None, ge=0, le=10_000)
    idle_timeout_ms: int | None = Field(None, ge=1000, le=600_000)
    eagerness: Eagerness | None = None
    create_response: bool | None = None
    interrupt_response: bool | None = None


class InputPatch(_Patch):
    """Settings of the client's sound. turn_detection: null or false turns it off."""

    format: Annotated[FormatPatch | None, BeforeValidator(_format)] = None
    transcription: TranscriptionPatch | None = None
    noise_reduction: NoiseReductionPatch | None = None
    turn_detection: Annotated[TurnDetectionPatch | None, BeforeValidator(_off)] = None


class OutputPatch(_Patch):
    """Settings of the model's sound. voice: name, or an object with its `id`."""

    format: Annotated[FormatPatch | None, BeforeValidator(_format)] = None
    voice: Annotated[str | None, BeforeValidator(_voice)] = Field(None, max_length=200)
    speed: float | None = Field(None, ge=0.25, le=1.5)


class AudioPatch(_Patch):
    input: InputPatch | None = None
    output: OutputPatch | None = None


class TokenLimits(_Patch):
    """post_instructions: context tokens from which on units leave."""

    post_instructions: int | None = Field(None, ge=0)


class TruncationPatch(_Patch):
    """A word is read as its type alone."""

    type: Literal["auto", "disabled", "retention_ratio"]
    retention_ratio: float | None = Field(None, ge=0, le=1)
    token_limits: TokenLimits | None = None

    @model_validator(mode="after")
    def _has_its_ratio(self) -> "TruncationPatch":
        if (self.type == "retention_ratio") != (self.retention_ratio is not None):
            raise ValueError("retention_ratio: expected a number from 0 to 1 with the type retention_ratio only")
        return self

    def chosen(self) -> Truncation:
        limit = None if self.token_limits is None else self.token_limits.post_instructions
        mode: Literal["auto", "disabled"] = "disabled" if self.type == "disabled" else "auto"
        return Truncation(mode, self.retention_ratio, limit)


MaxTokens = Annotated[int, Field(ge=1, le=4096)] | Literal["inf"] | None
Modalities = Annotated[list[Literal["audio", "text"]] | None, BeforeValidator(_modalities)]


class SessionPatch(_Patch):
    """The content of `session` in `session.update` and of a client secret."""

    type: Literal["realtime"] | None = None
    model: str | None = None
    output_modalities: Modalities = Field(None, min_length=1, max_length=1)
    instructions: str | None = Field(None, max_length=MAX_INSTRUCTIONS)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    max_output_tokens: MaxTokens = None
    truncation: Annotated[TruncationPatch | None, BeforeValidator(_truncation)] = None
    tracing: Literal["auto"] | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    include: list[str] | None = None
    reasoning: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    audio: AudioPatch | None = None

    @model_validator(mode="before")
    @classmethod
    def _from_beta(cls, given: object) -> object:
        return in_newer_spelling(given)


def in_newer_spelling(given: object) -> object:
    """Settings of a session or of a response, without spellings of the beta."""
    if not isinstance(given, Mapping) or given.keys().isdisjoint(BETA_PLACES):
        return given
    found = dict(given)
    for name, place in BETA_PLACES.items():
        if name in found:
            _put(found, place, found.pop(name))
    return found


def _put(found: dict[str, Any], place: tuple[str, ...], value: object) -> None:
    """Write a value into nested objects, unless the GA spelling has given one."""
    for name in place[:-1]:
        inner = found.get(name)
        found[name] = dict(inner) if isinstance(inner, Mapping) else {}
        found = found[name]
    found.setdefault(place[-1], value)


def read_patch(given: object) -> SessionPatch:
    """The content of `session`. Raises: EventError."""
    if not isinstance(given, Mapping):
        raise EventError("invalid_value", "session: expected an object", "session")
    try:
        patch = SessionPatch.model_validate(given)
    except ValidationError as error:
        raise of_validation(error, "session") from None
    check_tools(patch.tools or (), "session.tools")
    for name in ("tracing", "prompt", "include", "reasoning"):
        check_size(getattr(patch, name), f"session.{name}", MAX_ECHOED)
    return patch


def check_tools(tools: Sequence[Mapping[str, object]], param: str) -> None:
    """Raises: EventError for a tool that is no function, and for too many or too long ones."""
    if len(tools) > MAX_TOOLS:
        raise EventError("invalid_value", f"{param}: expected at most {MAX_TOOLS} functions, got {len(tools)}", param)
    for tool in tools:
        if tool.get("type", "function") != "function":
            kind = str(tool.get("type"))[:40]
            raise EventError("unsupported_tool", f"{param}: expected functions, got the type {kind}", param)
        if not isinstance(tool.get("name"), str):
            raise EventError("invalid_value", f"{param}: expected a name of each function, got none", param)
    check_size(tools, param, MAX_TOOLS_SIZE)


def check_size(value: object, param: str, most: int) -> None:
    """Raises: EventError for a value that is too long to be sent back in an event."""
    size = len(json_text(value))
    if size > most:
        raise EventError("invalid_value", f"{param}: expected at most {most} characters of JSON, got {size}", param)
