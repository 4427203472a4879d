"""The events of GPT-Live clients, as typed objects, and their reading. Unknown fields are errors."""

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import from_json

from server.doors.live.event_error import EventError, EventRefusedError, invalid_value, of_validation
from server.doors.live.sound.wire_sound import WireFormat
from worker.protocol.base64_text import strict_base64

MAX_SOUND = 15 * 2**20  # bytes of one append, decoded
MAX_CONTENT = 4000  # characters of an appended text; the public API allows 500 tokens
MAX_INSTRUCTIONS = 65_536  # characters
MAX_HISTORY = 128  # messages
MAX_ID = 200


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class GivenFormat(_Strict):
    """The sound in both directions. rate: Hz."""

    type: WireFormat = "audio/pcm"
    rate: Literal[8000, 16000, 24000] | None = None


class VoiceId(_Strict):
    id: str = Field(min_length=1, max_length=MAX_ID)


class GivenOutput(_Strict):
    voice: Annotated[str, Field(min_length=1, max_length=MAX_ID)] | VoiceId | None = None


class GivenAudio(_Strict):
    format: GivenFormat | None = None
    output: GivenOutput | None = None


class HistoryPart(_Strict):
    type: Literal["input_text", "output_text", "text"] | None = None
    text: str = Field(max_length=MAX_INSTRUCTIONS)


class HistoryMessage(_Strict):
    """A message of the conversation before the session."""

    type: Literal["message"] | None = None
    id: str | None = None
    status: Literal["incomplete", "completed"] | None = None
    role: Literal["developer", "user", "assistant"]
    content: list[HistoryPart] = Field(min_length=1, max_length=1)


class Delegation(_Strict):
    """Who does tasks that the model hands over. All of it is kept and shown: this model hands no task over."""

    type: Literal["client", "responses"] = "client"
    responses: dict[str, Any] | None = None
    acknowledgement_delay_ms: int | None = Field(None, ge=0)


class GivenSession(_Strict):
    """The configuration of a session."""

    model: str = Field(min_length=1, max_length=MAX_ID)
    instructions: str | None = Field(None, max_length=MAX_INSTRUCTIONS)
    input: list[HistoryMessage] | None = Field(None, max_length=MAX_HISTORY)
    audio: GivenAudio | None = None
    delegation: Delegation | None = None
    safety_identifier: str | None = Field(None, max_length=MAX_ID)
    store: Literal[False] | None = None


class GivenUpdate(_Strict):
    delegation: Delegation | None = None


class GptLiveEvent(_Strict):
    """An event. event_id: repeated in the answer to it."""

    event_id: str | None = Field(None, max_length=MAX_ID)


class SessionStart(GptLiveEvent):
    type: Literal["session.start"]
    session: GivenSession


class GptLiveSessionUpdate(GptLiveEvent):
    type: Literal["session.update"]
    session: GivenUpdate


class GptLiveAppendAudio(GptLiveEvent):
    type: Literal["session.input_audio.append"]
    audio: str = Field(max_length=MAX_SOUND * 4 // 3 + 4)

    def sound(self) -> bytes:
        """The decoded bytes. Raises: EventError."""
        try:
            return strict_base64(self.audio)
        except ValueError as error:  # text beyond ASCII is no `binascii.Error`
            raise invalid_value("audio", expected="base64", got=error) from None


class Mute(GptLiveEvent):
    type: Literal["session.input_audio.mute"]


class Unmute(GptLiveEvent):
    type: Literal["session.input_audio.unmute"]


class AppendText(GptLiveEvent):
    """Text for the model. delegation_id: must be given; null: for no task."""

    type: Literal["session.instructions.append", "session.thinking.append", "session.commentary.append"]
    content: str = Field(min_length=1, max_length=MAX_CONTENT)
    delegation_id: str | None


class GptLiveCreateItem(GptLiveEvent):
    type: Literal["response.item.create"]
    item: dict[str, Any]


class GptLiveCreateResponse(GptLiveEvent):
    type: Literal["response.create"]


class CloseSession(GptLiveEvent):
    type: Literal["session.close"]


AnyEvent: TypeAlias = (
    SessionStart
    | GptLiveSessionUpdate
    | GptLiveAppendAudio
    | Mute
    | Unmute
    | AppendText
    | GptLiveCreateItem
    | GptLiveCreateResponse
    | CloseSession
)
_EVENTS: TypeAdapter[AnyEvent] = TypeAdapter(Annotated[AnyEvent, Field(discriminator="type")])


def read_event(text: str) -> AnyEvent:
    """The event in a frame. Raises: EventRefusedError."""
    try:
        given = from_json(text)
    except ValueError as error:
        raise EventRefusedError(None, EventError("invalid_json", f"event: expected JSON, got {error}")) from None
    if not isinstance(given, dict):
        message = f"event: expected an object, got {type(given).__name__}"
        raise EventRefusedError(None, EventError("invalid_json", message))
    event_id = given.get("event_id")
    event_id = event_id[:MAX_ID] if isinstance(event_id, str) else None
    try:
        return _EVENTS.validate_python(given)
    except ValidationError as error:
        raise EventRefusedError(event_id, refusal_of(error, given)) from None


def refusal_of(error: ValidationError, given: dict[str, Any]) -> EventError:
    """The error of an event that is not valid. given: the event."""
    first = error.errors(include_url=False, include_input=False)[0]
    if first["type"] in ("union_tag_invalid", "union_tag_not_found"):
        return EventError("unknown_event", f"type: expected an event of a client, got {str(given.get('type'))[:60]}")
    found = of_validation(error)
    param = (found.param or "").removeprefix(f"{given['type']}.")
    if first["type"] == "extra_forbidden":
        return EventError("unknown_parameter", f"{param}: expected no such field, got a value", param)
    return EventError(found.code, f"{param}: {first['msg']}", param)
