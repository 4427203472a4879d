"""The public shape of every event that a Realtime server sends: exact fields and types, nothing else."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

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


# --- events ---------------------------------------------------------------------------------------


class Event(Shape):
    event_id: Annotated[str, Field(pattern="^event_.")]


class ErrorFields(Shape):
    type: Id
    code: Id
    message: Id
    param: str | None
    event_id: str | None


class ErrorEvent(Event):
    type: Literal["error"]
    error: ErrorFields


class SessionEvent(Event):
    type: Literal["session.created", "session.updated"]
    session: Session


class ItemEvent(Event):
    type: Literal["conversation.item.added", "conversation.item.done"]
    previous_item_id: str | None
    item: AnyItem


class ItemRetrieved(Event):
    type: Literal["conversation.item.retrieved"]
    item: AnyItem


class ItemDeleted(Event):
    type: Literal["conversation.item.deleted"]
    item_id: Id


class ItemTruncated(Event):
    type: Literal["conversation.item.truncated"]
    item_id: Id
    content_index: Literal[0]
    audio_end_ms: Count


class SpeechStarted(Event):
    type: Literal["input_audio_buffer.speech_started"]
    audio_start_ms: Count
    item_id: Id


class SpeechStopped(Event):
    type: Literal["input_audio_buffer.speech_stopped"]
    audio_end_ms: Count
    item_id: Id


class Committed(Event):
    type: Literal["input_audio_buffer.committed"]
    previous_item_id: str | None
    item_id: Id


class InputCleared(Event):
    type: Literal["input_audio_buffer.cleared"]


class TimeoutTriggered(Event):
    type: Literal["input_audio_buffer.timeout_triggered"]
    audio_start_ms: Count
    audio_end_ms: Count
    item_id: Id


class OutputBufferEvent(Event):
    type: Literal["output_audio_buffer.started", "output_audio_buffer.stopped", "output_audio_buffer.cleared"]
    response_id: str | None


class TranscriptionDelta(Event):
    type: Literal["conversation.item.input_audio_transcription.delta"]
    item_id: Id
    content_index: Count
    delta: str


class DurationUsage(Shape):
    type: Literal["duration"]
    seconds: Annotated[float, Field(ge=0)]


class TranscriptionCompleted(Event):
    type: Literal["conversation.item.input_audio_transcription.completed"]
    item_id: Id
    content_index: Count
    transcript: str
    usage: DurationUsage


class TranscriptionFailed(Event):
    type: Literal["conversation.item.input_audio_transcription.failed"]
    item_id: Id
    content_index: Count
    error: Json


class ResponseEvent(Event):
    type: Literal["response.created", "response.done"]
    response: Response


class OfResponse(Event):
    response_id: Id
    output_index: Count


class OutputItemEvent(OfResponse):
    type: Literal["response.output_item.added", "response.output_item.done"]
    item: AssistantMessage | FunctionCall


class OfPart(OfResponse):
    item_id: Id
    content_index: Count


class AudioPart(Shape):
    type: Literal["audio"]
    transcript: str


class TextPart(Shape):
    type: Literal["text"]
    text: str


class PartEvent(OfPart):
    type: Literal["response.content_part.added", "response.content_part.done"]
    part: AudioPart | TextPart


class Delta(OfPart):
    type: Literal["response.output_audio.delta", "response.output_audio_transcript.delta", "response.output_text.delta"]
    delta: Annotated[str, Field(min_length=1)]


class AudioDone(OfPart):
    type: Literal["response.output_audio.done"]


class TranscriptDone(OfPart):
    type: Literal["response.output_audio_transcript.done"]
    transcript: str


class TextDone(OfPart):
    type: Literal["response.output_text.done"]
    text: str


class ArgumentsDelta(OfResponse):
    type: Literal["response.function_call_arguments.delta"]
    item_id: Id
    call_id: Id
    delta: str


class ArgumentsDone(OfResponse):
    type: Literal["response.function_call_arguments.done"]
    item_id: Id
    call_id: Id
    name: str
    arguments: str


class RateLimit(Shape):
    name: Literal["requests", "tokens"]
    limit: Count
    remaining: Count
    reset_seconds: Annotated[float, Field(ge=0)]


class RateLimits(Event):
    type: Literal["rate_limits.updated"]
    rate_limits: list[RateLimit]


AnyEvent = Annotated[
    ErrorEvent
    | SessionEvent
    | ItemEvent
    | ItemRetrieved
    | ItemDeleted
    | ItemTruncated
    | SpeechStarted
    | SpeechStopped
    | Committed
    | InputCleared
    | TimeoutTriggered
    | OutputBufferEvent
    | TranscriptionDelta
    | TranscriptionCompleted
    | TranscriptionFailed
    | ResponseEvent
    | OutputItemEvent
    | PartEvent
    | Delta
    | AudioDone
    | TranscriptDone
    | TextDone
    | ArgumentsDelta
    | ArgumentsDone
    | RateLimits,
    Field(discriminator="type"),
]
EVENTS: TypeAdapter[AnyEvent] = TypeAdapter(AnyEvent)


def checked_event(event: Json) -> AnyEvent:
    """The event as a typed object. Raises: ValidationError for any other shape."""
    return EVENTS.validate_python(event)
