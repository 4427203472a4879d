"""What goes over a socket, below messages: strict JSON, sound and pictures as text or bytes, binary frames. Torch-free.

Knows bytes and how to say what is wrong with them. Does not know which messages there are.
"""

import binascii
import json
import reprlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal, Self

import numpy as np
from pydantic_core import from_json

from models.errors import ModelError

Form = Literal["base64", "pcm16", "float32"]  # how sound is sent
PCM16_SCALE = 32768  # a pcm16 step is 1/32768; full scale upwards is 32767/32768
MAX_HEADER_BYTES = 65_536  # of a binary frame's JSON
MAX_SHOWN = 60  # characters of a name or text in an error

_LENGTH = struct.Struct("<I")
_ENCODE = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


class ErrorCode(StrEnum):
    """What programs go by; the text beside it is for people."""

    BAD_JSON = "bad_json"
    BAD_MESSAGE = "bad_message"
    UNKNOWN_TYPE = "unknown_type"
    MISSING_AUDIO = "missing_audio"
    BAD_BASE64 = "bad_base64"
    BAD_AUDIO = "bad_audio"
    BAD_IMAGE = "bad_image"
    BAD_CONFIG = "bad_config"
    NOT_PREPARED = "not_prepared"
    PAUSED = "paused"
    TOO_LARGE = "too_large"
    BINARY_NOT_AGREED = "binary_not_agreed"
    BACKLOG_FULL = "backlog_full"
    BUSY = "busy"
    DRAINING = "draining"
    CONTEXT_FULL = "context_full"
    ENGINE = "engine"
    INTERNAL = "internal"
    WORKER_LOST = "worker_lost"
    QUEUE_FULL = "queue_full"
    CANCELLED = "cancelled"


class CloseReason(StrEnum):
    """Why a worker closes a connection, in its close frame."""

    STOPPED = "stopped"
    PAUSE = "Pause timeout"
    IDLE = "Idle timeout"
    ENGINE = "engine"
    DRAINING = "draining"


class WireError(ModelError, ValueError):
    """Something that came over a socket is not as agreed.

    code: for programs. Its text is for the client: `WHAT: expected X, got Y`, or `text` where clients look for that.
    """

    def __init__(self, code: ErrorCode, what: str, *, expected: object, got: object, text: str | None = None):
        super().__init__(what, expected=expected, got=got)
        self.code = code
        if text is not None:
            self.args = (text,)


class _Shown(reprlib.Repr):
    """Looks at the first few items only, so that a huge value costs nothing; words are JSON's."""

    def repr1(self, value: Any, level: int) -> str:
        if value is None or isinstance(value, bool):
            return {None: "null", True: "true", False: "false"}[value]
        return super().repr1(value, level)

    def repr_int(self, value: int, level: int) -> str:
        return super().repr_int(value, level) if value.bit_length() < 1000 else "a number too large to show"


_SHOWN = _Shown()
_SHOWN.maxstring = _SHOWN.maxother = _SHOWN.maxlong = MAX_SHOWN
_SHOWN.maxlevel = 2


def shown(value: object) -> str:
    """A bad value for an error's text, at most a few hundred characters."""
    return _SHOWN.repr(value)


def cut(text: str) -> str:
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def clean(text: str) -> str:
    """`text` as UTF-8 can carry it: halves of surrogate pairs become question marks."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


# --- JSON -----------------------------------------------------------------------------------------


def read_object(text: str | bytes, what: str = "message") -> dict[str, Any]:
    """Raises: WireError bad_json for text that is no JSON, nested deeper than about 200, with NaN, numbers of thousands
    of digits or halves of surrogate pairs; bad_message if it is no object. A number too large for a float is infinite.
    """
    try:
        value = from_json(text, allow_inf_nan=False)
    except (ValueError, TypeError) as error:
        got = f"{error}" if isinstance(error, ValueError) else "characters that UTF-8 does not have"
        raise WireError(ErrorCode.BAD_JSON, what, expected="JSON", got=got) from None
    if not isinstance(value, dict):
        raise WireError(ErrorCode.BAD_MESSAGE, what, expected="a JSON object", got=shown(value))
    return value


def json_text(value: object) -> str:
    """Strict JSON in one line. Raises: ValueError for NaN and infinity."""
    return _ENCODE(value)


# --- sound and pictures ---------------------------------------------------------------------------


def base64_bytes(text: str, what: str) -> bytes:
    """Line breaks and spaces are passed over, as many encoders put them in. Raises: WireError bad_base64."""
    try:
        try:
            return binascii.a2b_base64(text, strict_mode=True)
        except ValueError:
            return binascii.a2b_base64("".join(text.split()), strict_mode=True)
    except ValueError as error:
        raise WireError(ErrorCode.BAD_BASE64, what, expected="base64", got=cut(str(error))) from None


def picture_text(data: str | bytes) -> str:
    """An encoded picture as base64; text as it came."""
    return data if isinstance(data, str) else _base64(data)


def picture_bytes(data: str | bytes, what: str) -> bytes:
    """An encoded picture from base64, with or without `data:...,` in front, or as it came in a binary frame.

    Raises: WireError bad_base64, or bad_image if there is nothing.
    """
    if isinstance(data, str):
        if data[:5].lower() == "data:":
            data = data[data.find(",", 0, 200) + 1 :]
        data = base64_bytes(data, what)
    if not data:
        raise WireError(ErrorCode.BAD_IMAGE, what, expected="a picture", got="no bytes")
    return data


def _base64(data: bytes) -> str:
    return binascii.b2a_base64(data, newline=False).decode("ascii")


@dataclass(frozen=True, eq=False, repr=False)
class Sound:
    """Mono sound in the form it came in; another form is made when it is asked for.

    data: [n] float32 samples, or base64 text of little-endian float32, or bytes as `form` says.
    """

    data: np.ndarray | str | bytes
    form: Form = "float32"

    @classmethod
    def of(cls, value: object) -> Self:
        """Float samples, [n], or base64 text as sound. Raises: ValueError for anything else."""
        if isinstance(value, cls):
            return value
        is_mono = isinstance(value, np.ndarray) and value.ndim == 1 and np.issubdtype(value.dtype, np.floating)
        if is_mono or isinstance(value, str):
            return cls(value)
        raise ValueError("expected float samples, [n], or base64 text")

    def samples(self, what: str) -> np.ndarray:
        """[n] float32, the caller's own. Raises: WireError bad_base64; bad_audio for broken samples or none."""
        if isinstance(self.data, np.ndarray):
            return self.data.astype(np.float32)
        data = base64_bytes(self.data, what) if isinstance(self.data, str) else self.data
        size = 2 if self.form == "pcm16" else 4
        if not data or len(data) % size:
            expected = f"{size} bytes a sample" if data else "at least one sample"
            raise WireError(ErrorCode.BAD_AUDIO, what, expected=expected, got=f"{len(data)} bytes")
        if self.form == "pcm16":
            return np.frombuffer(data, "<i2").astype(np.float32) / np.float32(PCM16_SCALE)
        return np.frombuffer(data, "<f4").astype(np.float32)

    def packed(self, form: Form) -> bytes:
        """As bytes. pcm16 is rounded, cut off beyond full scale, and silent for NaN. Raises: as `samples`."""
        assert form != "base64", "packed: expected pcm16 or float32, got base64"
        if isinstance(self.data, bytes) and self.form == form:
            return self.data
        samples = self.data if isinstance(self.data, np.ndarray) else self.samples("sound")
        if form == "float32":
            return samples.astype("<f4", copy=False).tobytes()
        steps = np.rint(np.nan_to_num(samples).clip(-1, 1) * np.float32(PCM16_SCALE))
        return steps.clip(max=PCM16_SCALE - 1).astype("<i2").tobytes()  # there is no 32768

    def base64(self) -> str:
        """Base64 of little-endian float32; text as it came, which may be anything. Raises: as `samples`."""
        return self.data if isinstance(self.data, str) else _base64(self.packed("float32"))

    def json_text(self) -> str:
        """`base64` as a JSON value. Raises: as `samples`."""
        return json_text(self.data) if isinstance(self.data, str) else f'"{self.base64()}"'  # nothing to escape

    def __bool__(self) -> bool:
        return len(self.data) > 0

    def __repr__(self) -> str:
        kind = {np.ndarray: "samples", str: "characters"}.get(type(self.data), f"bytes of {self.form}")
        return f"Sound({len(self.data)} {kind})"


# --- binary frames --------------------------------------------------------------------------------


def pack_frame(header: dict[str, Any], sound: bytes, pictures: Sequence[bytes] = ()) -> bytes:
    """Length of the header as little-endian uint32, the header, the sound, the pictures."""
    header = {**header, "audio_bytes": len(sound)}
    if pictures:
        header["frame_bytes"] = [len(picture) for picture in pictures]
    text = json_text(header).encode("utf-8")
    return b"".join((_LENGTH.pack(len(text)), text, sound, *pictures))


def unpack_frame(data: bytes) -> tuple[dict[str, Any], bytes, list[bytes]]:
    """Header, without its two counts, and sound and pictures.

    Raises: WireError as `read_object`, and bad_message where a length does not fit what is there.
    """
    header, start = _header(data)
    audio_bytes, frame_bytes = (header.pop(key, None) for key in ("audio_bytes", "frame_bytes"))
    if not isinstance(frame_bytes, list | None):
        raise _bad_frame("frame_bytes", "a list of numbers of bytes", shown(frame_bytes))
    counts = [0 if audio_bytes is None else audio_bytes, *(frame_bytes or [])]
    for count in counts:
        if type(count) is not int or count < 0:
            raise _bad_frame("audio_bytes, frame_bytes", "whole numbers, 0 or more", shown(count))
    if sum(counts) != len(data) - start:
        expected = f"{shown(sum(counts))} bytes behind the header as audio_bytes and frame_bytes say"
        raise _bad_frame("binary frame", expected, f"{len(data) - start} bytes")
    parts = []
    for count in counts:
        parts.append(data[start : start + count])
        start += count
    return header, parts[0], parts[1:]


def read_header(data: bytes) -> dict[str, Any]:
    """The header alone, its two counts included. Raises: WireError as `unpack_frame`."""
    return _header(data)[0]


def _header(data: bytes) -> tuple[dict[str, Any], int]:
    """Returns: the header, and where the sound begins."""
    if len(data) < _LENGTH.size:
        raise _bad_frame("binary frame", f"at least {_LENGTH.size} bytes", f"{len(data)} bytes")
    [n_header] = _LENGTH.unpack_from(data)
    start = _LENGTH.size + n_header
    if n_header > MAX_HEADER_BYTES or start > len(data):
        longest = min(MAX_HEADER_BYTES, len(data) - _LENGTH.size)
        raise _bad_frame("binary frame's header", f"at most {longest} bytes", f"{n_header} bytes")
    return read_object(data[_LENGTH.size : start], "binary frame's header"), start


def _bad_frame(what: str, expected: str, got: str) -> WireError:
    return WireError(ErrorCode.BAD_MESSAGE, what, expected=expected, got=got)
