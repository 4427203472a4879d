"""The request of `POST /v1/audio/speech`. Contains no voices' files and no turn."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, cast, get_args

from server.doors.core.request_fields import RequestFields
from server.doors.core.sound_formats import FORMAT_NAMES, MAX_SPEED, MIN_SPEED, FormatName
from server.doors.core.sound_response import STREAM_FORMATS
from server.doors.errors import invalid
from server.doors.voices import DEFAULT
from worker.describe import shown
from worker.protocol.speech_messages import MAX_EMBEDDED, MAX_WIDTH, SpeechTask

MAX_INPUT = 4096  # characters
SPLITS = ("none", "sentence", "clause")
TASKS: tuple[SpeechTask, ...] = get_args(SpeechTask)


@dataclass(frozen=True)
class SpeechOrder:
    """What to speak and how.

    Attributes:
        model: as the client names it.
        text: to speak.
        voice: as the client names it.
        format: of the file.
        speed: of the sound.
        stream: the file itself, or a stream of events with slices of it.
        ref_audio: a sound file in base64 whose voice speaks, with or without `data:...,`; None: that of `voice`.
        seed: of all random draws; None: a new one.
        speak: fields of the worker's `SpeakRequest` that only the speech model reads.
        in_parts: of live text: the sound leaves as it is made, not as one message.
    """

    model: str
    text: str
    voice: str
    format: FormatName
    speed: float
    stream: Literal["audio", "sse"]
    ref_audio: str | None = None
    seed: int | None = None
    speak: Mapping[str, object] = field(default_factory=dict)
    in_parts: bool = True


def speech_order(body: bytes) -> SpeechOrder:
    """The order in a body. Slow for a long voice: call on a thread. Raises: ApiError."""
    fields = RequestFields.of_body(body)
    text = fields.text("input")
    if not 1 <= len(text) <= MAX_INPUT or not text.strip():
        got = f"{len(text)} characters" if text.strip() or not text else "white space alone"
        raise invalid("input", expected=f"1 to {MAX_INPUT} characters with text", got=got)
    return order_of(fields, text)


def live_order(fields: RequestFields, default_model: str) -> SpeechOrder:
    """The order in a `session.config` of live text, with the names of vLLM-Omni. Raises: ApiError.

    default_model: of a config that names none.
    """
    if fields.flag("word_timestamps"):
        raise invalid("word_timestamps", expected="false: words are not aligned", got="true")
    if fields.has("split_granularity"):  # the text is one utterance, spoken while it arrives
        fields.choice("split_granularity", SPLITS)
    order = order_of(fields, default_model=default_model, default_format="wav")
    return replace(order, in_parts=fields.flag("stream_audio", default=True))


def order_of(
    fields: RequestFields, text: str = "", *, default_model: str | None = None, default_format: FormatName = "mp3"
) -> SpeechOrder:
    """The order in fields. Raises: ApiError.

    Args:
        text: to speak; "" if it comes later.
        default_model: of a request that names none; None: it must name one.
        default_format: of a request that names none.
    """
    speed = fields.number("speed", MIN_SPEED, MAX_SPEED)
    return SpeechOrder(
        model=fields.text("model", default_model),
        text=text,
        voice=voice_name(fields, "voice" if fields.has("voice") or not fields.has("speaker") else "speaker"),
        format=cast(FormatName, fields.choice("response_format", FORMAT_NAMES, default_format)),
        speed=1.0 if speed is None else speed,
        stream=cast(Literal["audio", "sse"], fields.choice("stream_format", STREAM_FORMATS, "audio")),
        ref_audio=fields.text("ref_audio", "") or None,
        seed=fields.seed(),
        speak=speak_fields(fields),
    )


def speak_fields(fields: RequestFields) -> dict[str, object]:
    """The fields of a request that the speech model alone reads, under the names of the worker. Raises: ApiError."""
    vector = [_number(value) for value in fields.items("speaker_embedding")]
    if len(vector) > MAX_WIDTH:
        raise invalid("speaker_embedding", expected=f"at most {MAX_WIDTH} numbers", got=len(vector))
    sampling = {
        "temperature": fields.number("temperature", 0.01, 10),
        "top_k": fields.whole("top_k", 0, 100_000),
        "top_p": fields.number("top_p", 0.001, 1),
        "repetition_penalty": fields.number("repetition_penalty", 0.1, 10),
    }
    found = {
        "instructions": _short(fields, "instructions"),
        "language": fields.text("language", ""),
        "ref_text": _short(fields, "ref_text"),
        "x_vector_only": fields.flag("x_vector_only_mode") if fields.has("x_vector_only_mode") else None,
        "speaker_embedding": vector,
        "task": fields.choice("task_type", TASKS) if fields.has("task_type") else None,
        "max_frames": fields.whole("max_new_tokens", 1, 100_000),
        "first_chunk_frames": fields.whole("initial_codec_chunk_frames", 0, 8),
        "sampling": {name: value for name, value in sampling.items() if value is not None},
    }
    return {name: value for name, value in found.items() if value is False or value}


def _short(fields: RequestFields, key: str) -> str:
    text = fields.text(key, "")
    if len(text) > MAX_INPUT:
        raise invalid(key, expected=f"at most {MAX_INPUT} characters", got=f"{len(text)} characters")
    return text


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MAX_EMBEDDED:
        expected = f"a list of numbers from -{MAX_EMBEDDED} to {MAX_EMBEDDED}"
        raise invalid("speaker_embedding", expected=expected, got=shown(value))
    return float(value)


def voice_name(fields: RequestFields, key: str) -> str:
    """A voice given as text or as an object with `id`; the default voice if none is given."""
    value = fields.given.get(key)
    if isinstance(value, dict):
        value = value.get("id")
    if value is None:
        return DEFAULT
    if not isinstance(value, str) or not value:
        raise invalid(fields.name(key), expected="the name of a voice, or an object with its id", got=shown(value))
    return value
