"""Texts to speak and sounds to convert: the requests of `/ws/speech`, `/ws/conversion` and `/ws/speak`.

Their answers have the messages of a chat. Torch-free.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from worker.describe import TypeWords
from worker.protocol.chat_messages import SPEECH, SpeechFields
from worker.protocol.codec import FieldGroup, FromClient, Message, Reader, SoundField, known_fields
from worker.protocol.content import ChatTurns

MAX_SPEECH_CHARS = 16_384
DEFAULT_VOICE = "default"
VoiceRate = Literal[16_000, 24_000]
VOICE_RATE: VoiceRate = 24_000  # Hz; networks that read voices need no more
# Every client of the OpenAI API may name one of these.
SPEECH_VOICES = frozenset(
    ("alloy", "ash", "ballad", "coral", "echo", "fable", "nova", "onyx", "sage", "shimmer", "verse", "marin", "cedar")
)
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


SpeechTask = Literal["Base", "CustomVoice", "VoiceDesign"]
MAX_LIVE_CHARS = 65_536  # of all texts of one connection
MAX_WIDTH = 8192  # numbers of a speaker vector
MAX_EMBEDDED = 10_000  # size of a number of a speaker vector


class SpeakSampling(FieldGroup):
    """How the first code of a frame is drawn; null: as the checkpoint says."""

    temperature: float | None = Field(None, ge=0.01, le=10, description="of the codes")
    top_k: int | None = Field(None, ge=0, le=100_000, description="number of most likely codes to draw from; 0: all")
    top_p: float | None = Field(None, gt=0, le=1, description="probability mass to draw from")
    repetition_penalty: float | None = Field(None, ge=0.1, le=10, description="above 1: earlier codes are less likely")


SPEAK_SAMPLING = SpeakSampling()


Embedded = Annotated[float, Field(ge=-MAX_EMBEDDED, le=MAX_EMBEDDED)]


class SpeakRequest(FromClient):
    """A text for the speech model, the first message of `/ws/speak`; its sound comes in `chunk` messages."""

    type: Literal["speak"] = "speak"
    text: str = Field("", max_length=MAX_SPEECH_CHARS, description="the text; names of special tokens are text")
    is_open: bool = Field(False, description="more text follows in `text` messages, up to `end`")
    voice: str | None = Field(
        None, description="a speaker of the checkpoint, a voice on the server, or one of the API; null: the default"
    )
    language: str = Field("auto", description="`auto`, or a language of the checkpoint")
    instructions: str = Field(
        "", max_length=4096, description="how to speak, or the voice itself for a VoiceDesign model"
    )
    ref_audio_data: SoundField | None = Field(None, description="float32: a voice to clone")
    ref_audio_rate: VoiceRate = Field(16_000, description="of `ref_audio_data`, Hz")
    ref_text: str = Field("", max_length=4096, description="what is said in the sound of the voice")
    x_vector_only: bool | None = Field(
        None,
        description="`true`: clone by the speaker vector alone; `false`: in context, which needs a transcript; null: "
        "in context if there is a transcript",
    )
    speaker_embedding: list[Embedded] | None = Field(
        None,
        max_length=MAX_WIDTH,
        description=f"the speaker vector itself, of numbers from -{MAX_EMBEDDED} to {MAX_EMBEDDED}",
    )
    task: SpeechTask | None = Field(None, description="kind of checkpoint that the request needs; null: any")
    max_frames: int | None = Field(None, ge=1, le=100_000, description="frames of 80 ms at most; null: by the text")
    first_chunk_frames: int | None = Field(None, ge=1, le=8, description="frames of the first chunk; null: 1")
    sampling: Annotated[SpeakSampling, known_fields(SpeakSampling)] = Field(
        SPEAK_SAMPLING, description="how codes are drawn"
    )
    seed: int | None = Field(None, ge=0, le=2**64 - 1, description="of all random draws; null: a new one each time")


class SpeakText(FromClient):
    """Further text of a request with `is_open`."""

    type: Literal["text"] = "text"
    text: str = Field(max_length=MAX_SPEECH_CHARS, description="the next characters")


class SpeakEnd(FromClient):
    """The text of a request with `is_open` is complete."""

    type: Literal["end"] = "end"


SpeakMessage = Annotated[SpeakRequest | SpeakText | SpeakEnd, Field(discriminator="type")]
SPEAK_CLIENT: Reader[SpeakRequest | SpeakText | SpeakEnd] = Reader(SpeakMessage)


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
        None, description="float32: the voice, 0.5 to 30 s; null: that of `ref_audio_path`, or the worker's"
    )
    ref_audio_rate: VoiceRate = Field(16_000, description="of `ref_audio_data`, Hz")
    ref_audio_path: str | None = Field(None, description="name of a voice on the server")
    seed: int = Field(0, ge=0, le=2**63 - 1, description="of the noise")


CONVERSION_REQUESTS: Reader[ConversionRequest] = Reader(ConversionRequest)


def read_conversion(given: dict[str, Any]) -> ConversionRequest:
    """The request in a JSON object, which may lack `type`. Raises: WireError bad_message."""
    return CONVERSION_REQUESTS.read({**given, "type": ConversionRequest.kind()})
