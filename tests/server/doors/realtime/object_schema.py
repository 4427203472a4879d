"""The public shapes of items, sessions and responses in the events of a Realtime server: exact fields and types."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Json = dict[str, Any]
Id = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=0)]


class Shape(BaseModel):
    """An object that has all fields without a default, and no others."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


# --- items ----------------------------------------------------------------------------------------


class InputText(Shape):
    type: Literal["input_text"]
    text: str


class InputAudio(Shape):
    type: Literal["input_audio"]
    transcript: str | None


class InputImage(Shape):
    type: Literal["input_image"]
    detail: Literal["auto", "low", "high"]
    image_url: str = ""


class OutputText(Shape):
    type: Literal["output_text"]
    text: str


class OutputAudio(Shape):
    type: Literal["output_audio"]
    transcript: str


class Item(Shape):
    id: Id
    object: Literal["realtime.item"]
    status: Literal["completed", "incomplete", "in_progress"]


class SystemMessage(Item):
    type: Literal["message"]
    role: Literal["system"]
    content: list[InputText]


class UserMessage(Item):
    type: Literal["message"]
    role: Literal["user"]
    content: list[InputText | InputAudio | InputImage]


class AssistantMessage(Item):
    type: Literal["message"]
    role: Literal["assistant"]
    content: list[OutputText | OutputAudio]


class FunctionCall(Item):
    type: Literal["function_call"]
    call_id: Id
    name: str
    arguments: str


class FunctionCallOutput(Item):
    type: Literal["function_call_output"]
    call_id: Id
    output: str


AnyItem = SystemMessage | UserMessage | AssistantMessage | FunctionCall | FunctionCallOutput


# --- the session ----------------------------------------------------------------------------------


class Pcm(Shape):
    type: Literal["audio/pcm"]
    rate: Literal[24_000]


class G711(Shape):
    type: Literal["audio/pcmu", "audio/pcma"]


class Transcription(Shape):
    model: str
    language: str | None = None
    prompt: str | None = None


class NoiseReduction(Shape):
    type: Literal["near_field", "far_field"]


class SemanticVad(Shape):
    type: Literal["semantic_vad"]
    eagerness: Literal["low", "medium", "high", "auto"]
    create_response: bool
    interrupt_response: bool


class ServerVad(Shape):
    type: Literal["server_vad"]
    threshold: float
    prefix_padding_ms: Count
    silence_duration_ms: Count
    idle_timeout_ms: Count | None
    create_response: bool
    interrupt_response: bool


class SessionInput(Shape):
    format: Pcm | G711
    transcription: Transcription | None
    noise_reduction: NoiseReduction | None
    turn_detection: SemanticVad | ServerVad | None


class SessionOutput(Shape):
    format: Pcm | G711
    voice: Id
    speed: Annotated[float, Field(ge=0.25, le=1.5)]


class SessionAudio(Shape):
    input: SessionInput
    output: SessionOutput


class RetentionRatio(Shape):
    type: Literal["retention_ratio"]
    retention_ratio: Annotated[float, Field(ge=0, le=1)]
    token_limits: dict[Literal["post_instructions"], Count] = {}


class Session(Shape):
    id: Annotated[str, Field(pattern="^sess_")]
    object: Literal["realtime.session"]
    type: Literal["realtime"]
    model: Id
    output_modalities: Annotated[list[Literal["audio", "text"]], Field(min_length=1, max_length=1)]
    instructions: str
    tools: list[Json]
    tool_choice: Literal["auto", "none", "required"]
    max_output_tokens: Annotated[int, Field(ge=1, le=4096)] | Literal["inf"]
    truncation: Literal["auto", "disabled"] | RetentionRatio
    tracing: Literal["auto"] | Json | None
    prompt: Json | None
    include: list[str] | None
    expires_at: Annotated[int, Field(ge=1_000_000_000)]
    audio: SessionAudio
    reasoning: Json = {}
    parallel_tool_calls: bool = True


# --- responses ------------------------------------------------------------------------------------


class CachedDetails(Shape):
    text_tokens: Count
    audio_tokens: Count
    image_tokens: Count


class InputDetails(CachedDetails):
    cached_tokens: Count
    cached_tokens_details: CachedDetails


class OutputDetails(Shape):
    text_tokens: Count
    audio_tokens: Count


class Usage(Shape):
    total_tokens: Count
    input_tokens: Count
    output_tokens: Count
    input_token_details: InputDetails
    output_token_details: OutputDetails


class Completed(Shape):
    type: Literal["completed"]


class Cancelled(Shape):
    type: Literal["cancelled"]
    reason: Literal["turn_detected", "client_cancelled"]


class Incomplete(Shape):
    type: Literal["incomplete"]
    reason: Literal["max_output_tokens", "content_filter"]


class FailedError(Shape):
    type: Id
    code: Id
    message: Id


class Failed(Shape):
    type: Literal["failed"]
    error: FailedError


class ResponseOutput(Shape):
    format: Pcm | G711
    voice: Id


class ResponseAudio(Shape):
    output: ResponseOutput


class Response(Shape):
    id: Annotated[str, Field(pattern="^resp_")]
    object: Literal["realtime.response"]
    status: Literal["in_progress", "completed", "cancelled", "incomplete", "failed"]
    status_details: Completed | Cancelled | Incomplete | Failed | None
    output: list[AssistantMessage | FunctionCall]
    output_modalities: Annotated[list[Literal["audio", "text"]], Field(min_length=1, max_length=1)]
    audio: ResponseAudio
    conversation_id: str | None
    max_output_tokens: int | Literal["inf"]
    metadata: dict[str, str] | None
    usage: Usage | None
