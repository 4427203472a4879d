"""The public shape of every event that a Realtime server sends: exact fields and types, nothing else."""

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from tests.server.doors.realtime.object_schema import (
    AnyItem,
    AssistantMessage,
    Count,
    FunctionCall,
    Id,
    Json,
    Response,
    Session,
    Shape,
)


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
    response_id: str


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
