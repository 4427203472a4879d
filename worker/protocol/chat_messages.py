"""Turn-based chat: the request of `/ws/chat` and `POST /chat`, and the messages of the answer. Torch-free."""

from typing import Annotated, Any, Literal

from pydantic import Field

from worker.protocol.codec import FieldGroup, FromServer, Message, Reader, SoundField, known_fields
from worker.protocol.content import ChatTurns

RATE_OUT = 24_000
MAX_NEW_TOKENS = 4096
MAX_TOOLS = 128
MAX_STOPS, MAX_STOP_CHARS = 16, 1000
SOCKET_NEW_TOKENS, HTTP_NEW_TOKENS = 256, 512


class GenerationFields(FieldGroup):
    """How the answer's text is generated."""

    max_new_tokens: int | None = Field(
        None,
        ge=1,
        le=MAX_NEW_TOKENS,
        description=f"tokens at most; null: {SOCKET_NEW_TOKENS} on a WebSocket, {HTTP_NEW_TOKENS} over HTTP",
    )
    do_sample: bool = Field(True, description="draw tokens at random; `false`: search for the most likely text")
    num_beams: int | None = Field(
        None,
        ge=1,
        le=8,
        description="without `do_sample`: hypotheses of the beam search, whose text is sent when it is complete; `1`: "
        "no search, the most likely token each time; null: 3. With `do_sample`: 1 or null",
    )
    temperature: float = Field(0.7, ge=0, le=2, description="of text tokens")
    top_p: float = Field(0.8, ge=0, le=1, description="probability mass to draw from; 0 and 1: all")
    top_k: int = Field(100, ge=0, le=2**31 - 1, description="number of most likely tokens to draw from; 0: all")
    length_penalty: float = Field(
        1.1,
        ge=0.1,
        le=5,
        description="above 1: the end of the answer is less likely; in a beam search: the power of the number of "
        "tokens that divides a log-probability",
    )
    stop: list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]] = Field(
        [], max_length=MAX_STOPS, description="texts that end the answer"
    )
    seed: int | None = Field(None, ge=0, le=2**64 - 1, description="of all random draws; null: a new one each time")


class SpeechSamplingFields(FieldGroup):
    """How the answer's speech tokens are drawn."""

    temperature: float | None = Field(
        None, ge=0.001, le=2, description="of speech tokens; null: `tts_temperature` of the worker's duplex sessions"
    )
    repetition_penalty: float | None = Field(
        None,
        ge=0.1,
        le=10,
        description="above 1: recent tokens are less likely; null: `tts_repetition_penalty` of the worker's duplex "
        "sessions",
    )


SPEECH_SAMPLING = SpeechSamplingFields()
PromptLanguage = Literal["en", "zh"]
Priority = Literal["normal", "low"]
VoiceMode = Literal["default", "audio_assistant", "omni", "audio_roleplay", "voice_cloning"]


class SpeechFields(FieldGroup):
    """The answer's speech."""

    enabled: bool = Field(False, description="speak the answer")
    mode: str = Field(
        "audio_assistant",
        description="over HTTP: the system message that is inserted where there is none; `default`: none",
    )
    ref_audio_data: SoundField | None = Field(
        None, description="float32 at 16 kHz: the voice; null: that of `ref_audio_path`, or the worker's"
    )
    ref_audio_path: str | None = Field(None, description="name of a voice on the server")
    ref_audio_max_ms: int | None = Field(None, ge=1000, description="length that is used of the voice's sound")
    output_path: str | None = Field(None, description="refused: the server writes no files for clients")
    language: PromptLanguage = Field("en", description="of the inserted system message")
    sampling: Annotated[SpeechSamplingFields, known_fields(SpeechSamplingFields)] = Field(
        SPEECH_SAMPLING, description="how speech tokens are drawn"
    )


class ImageFields(FieldGroup):
    """How pictures are cut."""

    max_slice_nums: int | None = Field(
        None, ge=1, le=16, description="slices of a large picture; null: the checkpoint's value"
    )
    use_image_id: bool | None = Field(None, description="number the pictures; null: the checkpoint's value")


GENERATION, SPEECH, IMAGE = GenerationFields(), SpeechFields(), ImageFields()


class ChatRequest(Message):
    """A whole conversation to answer; its only message. Sent without `type`."""

    sends_nulls = False

    type: Literal["chat"] = "chat"
    messages: ChatTurns = Field([], description="the conversation")
    streaming: bool = Field(True, description="send the answer in parts; on a WebSocket only")
    generation: Annotated[GenerationFields, known_fields(GenerationFields)] = Field(
        GENERATION, description="how the text is generated"
    )
    tts: Annotated[SpeechFields, known_fields(SpeechFields)] = Field(SPEECH, description="the answer's speech")
    image: Annotated[ImageFields, known_fields(ImageFields)] = Field(IMAGE, description="how pictures are cut")
    use_tts_template: bool = Field(False, description="prompt for spoken text even without speech")
    omni_mode: bool = Field(False, description="no line break between the items of a message")
    enable_thinking: bool = Field(False, description="the model writes its reasoning before the answer")
    return_prompt: bool = Field(False, description="over HTTP: return the prompt's text")
    tools: list[dict[str, Any]] = Field(
        [],
        max_length=MAX_TOOLS,
        description="functions that the model may call, as in the OpenAI API; they need a "
        "checkpoint with a chat template",
    )
    answer_start: str = Field("", description="text that the answer begins with, in the prompt and not in `text`")
    introduces_voice: bool = Field(
        False, description="on a WebSocket: insert the system message of `tts.mode` where there is none, as over HTTP"
    )
    report_usage: bool = Field(False, description="on a WebSocket: count tokens by kind in `done`")
    priority: Priority = Field(
        "normal",
        description="`low`: the answer yields to units and to other answers; only without speech and without a search",
    )

    @classmethod
    def adapted(cls, given: dict[str, Any]) -> dict[str, Any]:
        """The object without an empty voice."""
        tts = given.get("tts")
        if isinstance(tts, dict) and tts.get("ref_audio_data") == "":
            given = {**given, "tts": {key: value for key, value in tts.items() if key != "ref_audio_data"}}
        return given


class PrefillDone(FromServer):
    """The conversation is in the context; the answer begins."""

    type: Literal["prefill_done"] = "prefill_done"
    input_tokens: int = Field(description="tokens of the prompt, pictures and sound included")


class ReplyChunk(FromServer):
    """A part of the answer; only with `streaming`."""

    sound_field = "audio_data"
    left_out = frozenset({"text_delta", "audio_data"})

    type: Literal["chunk"] = "chunk"
    text_delta: str | None = Field(None, description="further text; left out if there is none")
    audio_data: SoundField | None = Field(None, description="float32 at 24 kHz; left out if there is none")


class ReplyUsage(FieldGroup):
    """Tokens of an answer by kind."""

    input_tokens: int = Field(description="tokens of the prompt, pictures and sound included")
    input_image_tokens: int = Field(description="of which of pictures")
    input_audio_tokens: int = Field(description="of which of sound")
    text_tokens: int = Field(description="tokens of the answer's text")
    speech_tokens: int = Field(description="tokens of the answer's speech")


class ReplyDone(FromServer):
    """The answer is complete; the connection closes next with code 1000."""

    left_out = frozenset({"recording_session_id", "usage"})

    type: Literal["done"] = "done"
    text: str = Field(description="the whole text")
    generated_tokens: int = Field(description="tokens of the text")
    input_tokens: int = Field(description="tokens of the prompt")
    stopped: str = Field("stop", description="`stop` at its end, `length` at the limit, `interrupted` by a request")
    usage: ReplyUsage | None = Field(None, description="tokens by kind, if requested")
    recording_session_id: str | None = Field(None, description="id of the recording, if there is one")


class SpokenReplyDone(ReplyDone):
    """`done` without `streaming`: it has the whole sound too."""

    sound_field = "audio_data"

    audio_data: SoundField | None = Field(None, description="float32 at 24 kHz; null without speech")


class TokenStats(FieldGroup):
    """Tokens of an answer."""

    cached_tokens: int = Field(0, description="prompt tokens that were in the context before")
    input_tokens: int = Field(description="prompt tokens")
    generated_tokens: int = Field(description="tokens of the answer's text")
    total_tokens: int = Field(description="sum of both")


class ChatResponse(FieldGroup):
    """The body of the answer to `POST /chat`."""

    text: str = Field("", description="the whole text")
    audio_path: None = Field(None, description="always null: the server writes no files for clients")
    audio_data: str | None = Field(None, description="base64 of a WAV file, 16 bit; null without speech")
    audio_sample_rate: int = Field(RATE_OUT, description="Hz")
    tokens_generated: int = Field(0, description="tokens of the text")
    duration_ms: float = Field(0.0, description="from the request to its end")
    prompt: str | None = Field(None, description="the prompt's text, if requested")
    token_stats: TokenStats | None = Field(None, description="numbers of tokens; null after a failure")
    recording_session_id: str | None = Field(None, description="id of the recording, if there is one")
    error: str | None = Field(None, description="why the answer failed")
    success: bool = Field(True, description="whether there is an answer")


CHAT_REQUESTS: Reader[ChatRequest] = Reader(ChatRequest)


def read_chat(given: dict[str, Any]) -> ChatRequest:
    """The request in a JSON object, which may lack `type`. Raises: WireError bad_message."""
    return CHAT_REQUESTS.read({**given, "type": ChatRequest.kind()})
