"""Speech of a given text and voice conversion: the requests of `/ws/speech` and `/ws/conversion`. Torch-free.

Their answers have the messages of a chat.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from worker.describe import TypeWords
from worker.protocol.chat_messages import SPEECH, SpeechFields
from worker.protocol.codec import Message, Reader, SoundField, known_fields
from worker.protocol.content import ChatTurns

MAX_SPEECH_CHARS = 16_384
MAX_SOURCE_S = 300  # of a sound
MAX_SPEECH_TOKENS = 25 * MAX_SOURCE_S


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


class ConversionRequest(Message):
    """A sound, or speech tokens, to speak in a voice; the only message. Sent without `type`."""

    sends_nulls = False

    type: Literal["conversion"] = "conversion"
    source_data: SoundField | None = Field(
        None, description=f"float32 at 16 kHz: what is said and when, 0.5 to {MAX_SOURCE_S} s; null: `speech_tokens`"
    )
    speech_tokens: Annotated[list[int] | None, TypeWords("a list of whole numbers")] = Field(
        None, min_length=1, max_length=MAX_SPEECH_TOKENS, description="25 a second; null: those of `source_data`"
    )
    ref_audio_data: SoundField | None = Field(
        None, description="float32 at 16 kHz: the voice, 0.5 to 30 s; null: that of `ref_audio_path`, or the worker's"
    )
    ref_audio_path: str | None = Field(None, description="name of a voice on the server")
    seed: int = Field(0, ge=0, le=2**63 - 1, description="of the noise")


CONVERSION_REQUESTS: Reader[ConversionRequest] = Reader(ConversionRequest)


def read_conversion(given: dict[str, Any]) -> ConversionRequest:
    """The request in a JSON object, which may lack `type`. Raises: WireError bad_message."""
    return CONVERSION_REQUESTS.read({**given, "type": ConversionRequest.kind()})
