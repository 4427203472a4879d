"""Speech of a given text: the request of `/ws/speech`. The answer has the messages of a chat. Torch-free."""

from typing import Annotated, Any, Literal

from pydantic import Field

from worker.protocol.chat_messages import SPEECH, SpeechFields
from worker.protocol.codec import Message, Reader, known_fields
from worker.protocol.content import ChatTurns

MAX_SPEECH_CHARS = 16_384


class SpeechRequest(Message):
    """A text to speak exactly as it is; the only message. Sent without `type`."""

    sends_nulls = False

    type: Literal["speech"] = "speech"
    text: str = Field(
        min_length=1, max_length=MAX_SPEECH_CHARS, description="the text; names of special tokens are text"
    )
    messages: ChatTurns = Field(
        [], description="the conversation that the text answers; empty: a request to read the text in the given voice"
    )
    tts: Annotated[SpeechFields, known_fields(SpeechFields)] = Field(
        SPEECH, description="voice and sampling; `enabled` and `mode` have no effect"
    )
    seed: int | None = Field(None, ge=0, le=2**64 - 1, description="of all random draws; null: a new one each time")


SPEECH_REQUESTS: Reader[SpeechRequest] = Reader(SpeechRequest)


def read_speech(given: dict[str, Any]) -> SpeechRequest:
    """The request in a JSON object, which may lack `type`. Raises: WireError bad_message."""
    return SPEECH_REQUESTS.read({**given, "type": SpeechRequest.kind()})
