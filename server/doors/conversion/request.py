"""The request of `POST /v1/audio/conversions`: the parts of a form. Contains no voices' files and no turn."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, cast

import numpy as np

from models.errors import AudioError
from server.doors.core.request_fields import RequestFields
from server.doors.core.sound_formats import FORMAT_NAMES, MAX_SPEED, MIN_SPEED, FormatName
from server.doors.core.sound_response import STREAM_FORMATS
from server.doors.errors import ApiError, invalid, missing
from server.doors.voices import DEFAULT
from server.registry.sound_upload import SoundTooLargeError, samples_of_file
from worker.describe import shown
from worker.protocol.content import RATE_IN
from worker.protocol.speech_messages import MAX_SOURCE_S, MAX_SPEECH_TOKENS, VOICE_RATE

MAX_SEED = 2**63 - 1
NUMBERS = ("speed", "seed", "speech_tokens")  # parts whose text is JSON
FILES = ("file", "voice_file")


@dataclass(frozen=True)
class ConversionOrder:
    """What to speak in which voice, and how.

    Attributes:
        model: as the client names it.
        source: [n] float32 at 16 kHz; None: `speech_tokens`.
        speech_tokens: 25 a second; None: those of the source.
        voice: as the client names it.
        voice_sound: [n] float32 at 24 kHz whose voice speaks; None: that of `voice`.
        format: of the file.
        speed: of the sound.
        stream: the file itself, or a stream of events with slices of it.
        seed: of the noise.
    """

    model: str
    source: np.ndarray | None
    speech_tokens: list[int] | None
    voice: str
    voice_sound: np.ndarray | None
    format: FormatName
    speed: float
    stream: Literal["audio", "sse"]
    seed: int


def conversion_order(parts: Mapping[str, str | bytes]) -> ConversionOrder:
    """The order in the parts of a form. Decodes sound files: call on a thread. Raises: ApiError."""
    for name in FILES:
        if isinstance(parts.get(name), str):
            raise invalid(name, expected="a file", got="text")
    texts = {name: part for name, part in parts.items() if isinstance(part, str)}
    fields = RequestFields({**texts, **{name: _json(name, texts[name]) for name in NUMBERS if name in texts}})
    model, voice = fields.text("model"), fields.text("voice", DEFAULT)
    speed, seed = fields.number("speed", MIN_SPEED, MAX_SPEED), fields.whole("seed", 0, MAX_SEED)
    name = fields.choice("response_format", FORMAT_NAMES, "mp3")
    stream = fields.choice("stream_format", STREAM_FORMATS, "audio")
    speech_tokens = _speech_tokens(fields)
    if "file" in parts and speech_tokens is not None:
        raise invalid("speech_tokens", expected="either a file or speech_tokens", got="both")
    if "file" not in parts and speech_tokens is None:
        raise missing("file")
    return ConversionOrder(
        model=model,
        source=_samples(parts, "file", MAX_SOURCE_S, RATE_IN),
        speech_tokens=speech_tokens,
        voice=voice,
        voice_sound=_samples(parts, "voice_file", 30, VOICE_RATE),
        format=cast(FormatName, name),
        speed=1.0 if speed is None else speed,
        stream=cast(Literal["audio", "sse"], stream),
        seed=seed or 0,
    )


def _json(name: str, text: str) -> object:
    """The value of a part. Raises: ApiError."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise invalid(name, expected="JSON", got=shown(text)) from None


def _speech_tokens(fields: RequestFields) -> list[int] | None:
    if not fields.has("speech_tokens"):
        return None
    given = fields.items("speech_tokens")
    wrong = next((one for one in given if isinstance(one, bool) or not isinstance(one, int) or one < 0), None)
    if wrong is not None:
        raise invalid("speech_tokens", expected="whole numbers from 0", got=shown(wrong))
    if not 1 <= len(given) <= MAX_SPEECH_TOKENS:
        raise invalid("speech_tokens", expected=f"1 to {MAX_SPEECH_TOKENS} of them", got=str(len(given)))
    return cast(list[int], given)


def _samples(parts: Mapping[str, str | bytes], name: str, max_s: float, rate: int) -> np.ndarray | None:
    data = parts.get(name)
    if not isinstance(data, bytes):
        return None
    try:
        return samples_of_file(data, name, max_s, rate=rate)
    except SoundTooLargeError as error:
        raise ApiError(413, str(error), param=name) from None
    except AudioError as error:
        raise ApiError(400, str(error), param=name, code="invalid_value") from None
