"""The events that a client sends, as typed objects, and their reading. Contains no reaction to them."""

from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import from_json

from server.doors.live.event_error import EventError, EventRefusedError, of_validation
from server.doors.realtime.events.session_patch import (
    MAX_INSTRUCTIONS,
    MaxTokens,
    Modalities,
    OutputPatch,
    in_newer_spelling,
)
from worker.protocol.base64_text import strict_base64

MAX_SOUND = 15 * 2**20  # bytes of one append, decoded
MAX_TEXT = 65_536  # characters of an item
MAX_ID = 200
Id = Annotated[str, Field(min_length=1, max_length=MAX_ID)]


class _Fields(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class ClientEvent(_Fields):
    """An event. event_id: repeated in the error that it causes."""

    event_id: str | None = None


class SessionUpdate(ClientEvent):
    """session: read by `session_patch.read_patch`."""

    session: dict[str, Any]


class AppendAudio(NamedTuple):
    """Sound of the client, fifty times a second, hence no model. sound: decoded bytes in the session's input format."""

    event_id: str | None
    sound: bytes


class CommitAudio(ClientEvent):
    pass


class ClearAudio(ClientEvent):
    pass


class ClearOutput(ClientEvent):
    pass


class ContentPart(_Fields):
    """One part of an item, of any kind."""

    type: Literal["input_text", "text", "output_text", "input_audio", "audio", "output_audio", "input_image"]
    text: str | None = Field(None, max_length=MAX_TEXT)
    audio: str | None = None
    transcript: str | None = Field(None, max_length=MAX_TEXT)
    image_url: str | None = None
    detail: Literal["auto", "low", "high"] | None = None


def _no_null(value: object) -> object:
    """Clients that write all fields of an item give null for the content of a function call."""
    return [] if value is None else value


class GivenItem(_Fields):
    """An item as a client creates it."""

    id: Id | None = None
    type: Literal["message", "function_call", "function_call_output"]
    role: Literal["system", "user", "assistant"] | None = None
    content: Annotated[list[ContentPart], BeforeValidator(_no_null)] = []
    call_id: Id | None = None
    name: str | None = Field(None, max_length=MAX_ID)
    arguments: str | None = Field(None, max_length=MAX_TEXT)
    output: str | None = Field(None, max_length=MAX_TEXT)


class CreateItem(ClientEvent):
    item: GivenItem
    previous_item_id: str | None = None


class RetrieveItem(ClientEvent):
    item_id: str


class DeleteItem(ClientEvent):
    item_id: str


class TruncateItem(ClientEvent):
    item_id: str
    content_index: int = 0
    audio_end_ms: int = Field(ge=0)


class ResponseAudio(_Fields):
    output: OutputPatch | None = None


def _metadata(value: object) -> object:
    """Pairs that every object of the response repeats."""
    if isinstance(value, dict) and len(value) > 16:
        raise ValueError(f"expected at most 16 pairs, got {len(value)}")
    return value


MetadataKey = Annotated[str, Field(max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]


class ResponseOptions(_Fields):
    """The content of `response` in `response.create`; None: as in the session."""

    output_modalities: Modalities = Field(None, min_length=1, max_length=1)
    instructions: str | None = Field(None, max_length=MAX_INSTRUCTIONS)
    audio: ResponseAudio | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    max_output_tokens: MaxTokens = None
    metadata: Annotated[dict[MetadataKey, MetadataValue] | None, BeforeValidator(_metadata)] = None
    conversation: Literal["auto", "none"] | None = None
    input: list[dict[str, Any]] | None = None

    @model_validator(mode="before")
    @classmethod
    def _from_beta(cls, given: object) -> object:
        return in_newer_spelling(given)


class CreateResponse(ClientEvent):
    response: ResponseOptions | None = None


class CancelResponse(ClientEvent):
    response_id: str | None = None


APPEND = "input_audio_buffer.append"
KINDS: dict[str, type[ClientEvent]] = {
    "session.update": SessionUpdate,
    "input_audio_buffer.commit": CommitAudio,
    "input_audio_buffer.clear": ClearAudio,
    "output_audio_buffer.clear": ClearOutput,
    "conversation.item.create": CreateItem,
    "conversation.item.retrieve": RetrieveItem,
    "conversation.item.delete": DeleteItem,
    "conversation.item.truncate": TruncateItem,
    "response.create": CreateResponse,
    "response.cancel": CancelResponse,
}


def read_event(text: str) -> ClientEvent | AppendAudio:
    """The event in a text frame. Raises: EventRefusedError."""
    try:
        given = from_json(text, allow_inf_nan=False)
    except (ValueError, TypeError):
        raise EventRefusedError(None, EventError("invalid_json", "event: expected JSON, got other text")) from None
    if not isinstance(given, dict):
        raise EventRefusedError(None, EventError("invalid_json", "event: expected a JSON object, got another value"))
    event_id = given.get("event_id")
    event_id = event_id if isinstance(event_id, str) else None
    try:
        return _read(given, event_id)
    except EventError as error:
        raise EventRefusedError(event_id, error) from None
    except ValidationError as error:
        raise EventRefusedError(event_id, of_validation(error)) from None


def _read(given: dict[str, Any], event_id: str | None) -> ClientEvent | AppendAudio:
    kind = given.get("type")
    if kind == APPEND:
        return AppendAudio(event_id, decoded_sound(given.get("audio"), "audio"))
    found = KINDS.get(kind) if isinstance(kind, str) else None
    if found is None:
        raise EventError("unknown_event", f"type: expected the type of an event, got {str(kind)[:60]}", "type")
    return found.model_validate({**given, "event_id": event_id})


def decoded_sound(given: object, param: str) -> bytes:
    """Base64 text as bytes. Raises: EventError."""
    if not isinstance(given, str):
        code = "missing_required_parameter" if given is None else "invalid_value"
        raise EventError(code, f"{param}: expected base64 text, got {type(given).__name__}", param)
    if len(given) > MAX_SOUND * 4 // 3 + 4:
        raise EventError("invalid_value", f"{param}: expected at most {MAX_SOUND} bytes, got more", param)
    try:
        return strict_base64(given)
    except ValueError as error:
        raise EventError("invalid_value", f"{param}: expected base64, got {str(error)[:60]}", param) from None
