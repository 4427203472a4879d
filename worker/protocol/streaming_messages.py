"""Messages of `/ws/streaming`, where a client feeds a conversation in steps and has its turns answered. Torch-free.

`stop`, `chunk` and `error` are those of the other protocols.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from worker.protocol.chat_messages import MAX_NEW_TOKENS, TokenStats
from worker.protocol.codec import FromClient, FromServer, OneDecimal, Reader, SoundField
from worker.protocol.content import ChatTurns
from worker.protocol.half_duplex_messages import TurnChunk
from worker.protocol.messages import Error, Stop


class TurnPrefill(FromClient):
    """Messages to append to the conversation. Answered with `prefill_done`."""

    type: Literal["prefill"] = "prefill"
    messages: ChatTurns = Field(
        [], description="new messages, or the whole conversation, which replaces the former one if it begins like it"
    )
    clear_kv_cache: bool = Field(False, description="forget the conversation so far")
    is_last_chunk: bool = Field(True, description="`false` where further messages precede the answer; has no effect")
    ref_audio_base64: SoundField | None = Field(None, description="float32 at 16 kHz: the voice; null: the worker's")
    tts_ref_audio_base64: SoundField | None = Field(None, description="the same; it takes precedence")
    max_slice_nums: int | None = Field(
        None, ge=1, le=16, description="slices of a large picture, from now on; null: unchanged"
    )

    @classmethod
    def adapted(cls, given: dict[str, Any]) -> dict[str, Any]:
        """The object without empty voices."""
        return {key: value for key, value in given.items() if value != "" or not key.endswith("ref_audio_base64")}

    @property
    def voice(self) -> SoundField | None:
        """The voice that the message brings."""
        return self.tts_ref_audio_base64 or self.ref_audio_base64 or None


class TurnGenerate(FromClient):
    """Answer the conversation. Answered with `chunk` messages and `done`."""

    type: Literal["generate"] = "generate"
    generate_audio: bool = Field(True, description="speak the answer")
    max_new_tokens: int = Field(256, ge=1, le=MAX_NEW_TOKENS, description="tokens of the answer at most")
    length_penalty: float = Field(1.1, ge=0.1, le=5, description="above 1: the end of the answer is less likely")


class StreamingClose(FromClient):
    """End the session. Not answered; the connection closes."""

    type: Literal["close"] = "close"


class TurnPrefilled(FromServer):
    """The messages belong to the conversation."""

    left_out = frozenset({"recording_session_id"})

    type: Literal["prefill_done"] = "prefill_done"
    prompt_length: int = Field(description="characters of the prompt, the model's template included")
    message_count: int = Field(description="messages of the conversation")
    cached_tokens: int = Field(
        0, description="prompt tokens that were in the context before: always 0, each answer reads the whole prompt"
    )
    input_tokens: int = Field(description="tokens of the prompt, pictures and sound included")
    recording_session_id: str | None = Field(None, description="id of the recording, if there is one")


class TurnAnswered(FromServer):
    """The answer is complete; the slot is free, and the socket takes the next `prefill`."""

    left_out = frozenset({"recording_session_id"})

    type: Literal["done"] = "done"
    elapsed_ms: OneDecimal = Field(description="since `generate`, ms")
    session_id: str = Field(description="the session's id")
    stopped: bool = Field(False, description="the answer was stopped by a request")
    text: str = Field("", description="the whole text of the answer")
    token_stats: TokenStats = Field(description="numbers of tokens")
    recording_session_id: str | None = Field(None, description="id of the recording, if there is one")


StreamingRequest = Annotated[TurnPrefill | TurnGenerate | Stop | StreamingClose, Field(discriminator="type")]
StreamingAnswer = Annotated[TurnPrefilled | TurnChunk | TurnAnswered | Error, Field(discriminator="type")]
STREAMING_CLIENT: Reader[StreamingRequest] = Reader(StreamingRequest)
STREAMING_SERVER: Reader[StreamingAnswer] = Reader(StreamingAnswer)
