"""The request of `POST /v1/audio/speech`. Contains no voices' files and no turn."""

from dataclasses import dataclass
from typing import Literal, cast

from server.doors.core.request_fields import RequestFields
from server.doors.core.sound_formats import FORMAT_NAMES, MAX_SPEED, MIN_SPEED, FormatName
from server.doors.core.sound_response import STREAM_FORMATS
from server.doors.errors import invalid
from server.doors.voices import DEFAULT
from worker.describe import shown

MAX_INPUT = 4096  # characters


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
    """

    model: str
    text: str
    voice: str
    format: FormatName
    speed: float
    stream: Literal["audio", "sse"]
    ref_audio: str | None = None
    seed: int | None = None


def speech_order(body: bytes) -> SpeechOrder:
    """The order in a body. Slow for a long voice: call on a thread. Raises: ApiError."""
    fields = RequestFields.of_body(body)
    model, text = fields.text("model"), fields.text("input")
    if not 1 <= len(text) <= MAX_INPUT or not text.strip():
        got = f"{len(text)} characters" if text.strip() or not text else "white space alone"
        raise invalid("input", expected=f"1 to {MAX_INPUT} characters with text", got=got)
    speed = fields.number("speed", MIN_SPEED, MAX_SPEED)
    fields.text("instructions", "")
    fields.text("ref_text", "")
    return SpeechOrder(
        model=model,
        text=text,
        voice=voice_name(fields, "voice"),
        format=cast(FormatName, fields.choice("response_format", FORMAT_NAMES, "mp3")),
        speed=1.0 if speed is None else speed,
        stream=cast(Literal["audio", "sse"], fields.choice("stream_format", STREAM_FORMATS, "audio")),
        ref_audio=fields.text("ref_audio", "") or None,
        seed=fields.seed(),
    )


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
