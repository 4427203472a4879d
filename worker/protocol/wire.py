"""Encoding below the messages: strict JSON, sound and pictures as text or bytes, binary frames. Torch-free.

Does not define messages.
"""

import binascii
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from pydantic_core import from_json

from models.errors import ModelError
from worker.describe import cut, shown
from worker.protocol.base64_text import strict_base64
from worker.protocol.codes import ErrorCode

Form = Literal["base64", "pcm16", "float32"]  # encodings of sound
SOUND_RATE = 24_000  # Hz, of sound from the server
PCM16_SCALE = 32768  # a pcm16 step is 1/32768; the largest positive sample is 32767/32768
MAX_PICTURE_BYTES = 20 * 2**20
MAX_HEADER_BYTES = 65_536  # of a binary frame's JSON

_LENGTH = struct.Struct("<I")
_ENCODE = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


class WireError(ModelError, ValueError):
    """A message or frame that does not follow the protocol.

    The error's text is sent to the client: `WHAT: expected X, got Y`, or `text` where clients match a fixed text.

    Attributes:
        code: the code of the `error` message.
    """

    def __init__(self, code: ErrorCode, what: str, *, expected: object, got: object, text: str | None = None):
        super().__init__(what, expected=expected, got=got)
        self.code = code
        if text is not None:
            self.args = (text,)


def clean(text: str) -> str:
    """`text` without lone surrogates, which UTF-8 cannot encode: each becomes a question mark."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


# --- JSON -----------------------------------------------------------------------------------------


def read_object(text: str | bytes, what: str = "message") -> dict[str, Any]:
    """The JSON object in `text`. A number too large for a float becomes infinity.

    Raises:
        WireError: bad_json for invalid JSON, nesting deeper than about 200, NaN, numbers of thousands of digits and
            lone surrogates; bad_message for a value that is not an object.
    """
    try:
        value = from_json(text, allow_inf_nan=False)
    except (ValueError, TypeError) as error:
        got = str(error) if isinstance(error, ValueError) else "a lone surrogate"
        raise WireError(ErrorCode.BAD_JSON, what, expected="JSON", got=got) from None
    if not isinstance(value, dict):
        raise WireError(ErrorCode.BAD_MESSAGE, what, expected="a JSON object", got=shown(value))
    return value


def json_text(value: object) -> str:
    """Strict JSON on one line. Raises: ValueError for NaN and infinity."""
    return _ENCODE(value)


# --- sound and pictures ---------------------------------------------------------------------------


def base64_bytes(text: str, what: str) -> bytes:
    """Decoded base64. Whitespace is ignored, since many encoders insert line breaks. Raises: WireError bad_base64."""
    try:
        try:
            return strict_base64(text)
        except ValueError:
            return strict_base64("".join(text.split()))
    except ValueError as error:
        raise WireError(ErrorCode.BAD_BASE64, what, expected="base64", got=cut(str(error))) from None


def picture_text(data: str | bytes) -> str:
    """An encoded picture as base64; text is returned unchanged."""
    return data if isinstance(data, str) else _base64(data)


def picture_bytes(data: str | bytes, what: str) -> bytes:
    """An encoded picture as bytes.

    Args:
        data: base64, with or without a `data:...,` prefix, or the bytes from a binary frame.
        what: the field's name, for errors.
    Raises:
        WireError: bad_base64; too_large; bad_image for empty data.
    """
    n_bytes = 3 * len(data) // 4 if isinstance(data, str) else len(data)
    if n_bytes > MAX_PICTURE_BYTES:
        expected, got = f"at most {MAX_PICTURE_BYTES // 2**20} MiB", f"{n_bytes / 2**20:.0f} MiB"
        raise WireError(ErrorCode.TOO_LARGE, what, expected=expected, got=got)
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
    """Mono sound in the encoding it was received in. Other encodings are produced on request.

    Attributes:
        data: [n] float32 samples, or base64 text of little-endian float32, or bytes encoded as `form`.
        form: the encoding of `data` if it is bytes.
    """

    data: np.ndarray | str | bytes
    form: Form = "float32"

    @classmethod
    def of(cls, value: object) -> "Sound":
        """Sound from [n] float samples or base64 text. Raises: ValueError for any other value."""
        if isinstance(value, cls):
            return value
        if isinstance(value, str):
            return cls(value)
        if isinstance(value, np.ndarray) and value.ndim == 1 and np.issubdtype(value.dtype, np.floating):
            return cls(value)
        raise ValueError("expected float samples, [n], or base64 text")

    def samples(self, what: str) -> np.ndarray:
        """The samples as a new array, [n] float32.

        Args:
            what: the field's name, for errors.
        Raises:
            WireError: bad_base64; bad_audio for an incomplete sample or no samples.
        """
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
        """The sound as bytes in pcm16 or float32.

        pcm16 is rounded to the nearest step and clipped at full scale; NaN becomes silence. Raises: as `samples`.
        """
        assert form != "base64", "packed: expected pcm16 or float32, got base64"
        if isinstance(self.data, bytes) and self.form == form:
            return self.data
        samples = self.data if isinstance(self.data, np.ndarray) else self.samples("sound")
        if form == "float32":
            return samples.astype("<f4", copy=False).tobytes()
        steps = np.rint(np.nan_to_num(samples).clip(-1, 1) * np.float32(PCM16_SCALE))
        packed: bytes = steps.clip(max=PCM16_SCALE - 1).astype("<i2").tobytes()  # int16 ends at 32767
        return packed

    def base64(self) -> str:
        """Base64 of little-endian float32. Text is returned unchanged and unchecked. Raises: as `samples`."""
        return self.data if isinstance(self.data, str) else _base64(self.packed("float32"))

    def json_text(self) -> str:
        """`base64` as a JSON string. Raises: as `samples`."""
        # Base64 made here holds nothing to escape; a client's text may.
        return json_text(self.data) if isinstance(self.data, str) else f'"{self.base64()}"'

    def __bool__(self) -> bool:
        return len(self.data) > 0

    def __repr__(self) -> str:
        kind = {np.ndarray: "samples", str: "characters"}.get(type(self.data), f"bytes of {self.form}")
        return f"Sound({len(self.data)} {kind})"


# --- binary frames --------------------------------------------------------------------------------


def pack_frame(header: dict[str, Any], sound: bytes, pictures: Sequence[bytes] = ()) -> bytes:
    """A binary frame: the header's length as little-endian uint32, the header, the sound, the pictures."""
    header = {**header, "audio_bytes": len(sound)}
    if pictures:
        header["frame_bytes"] = [len(picture) for picture in pictures]
    text = json_text(header).encode("utf-8")
    return b"".join((_LENGTH.pack(len(text)), text, sound, *pictures))


def unpack_frame(data: bytes) -> tuple[dict[str, Any], bytes, list[bytes]]:
    """The parts of a binary frame: the header without its two byte counts, the sound, the pictures.

    Raises:
        WireError: as `read_object`; bad_message for byte counts that do not match the frame's length.
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
        expected = f"{shown(sum(counts))} bytes after the header, the sum of audio_bytes and frame_bytes"
        raise _bad_frame("binary frame", expected, f"{len(data) - start} bytes")
    parts = []
    for count in counts:
        parts.append(data[start : start + count])
        start += count
    return header, parts[0], parts[1:]


def read_header(data: bytes) -> dict[str, Any]:
    """The header of a binary frame, including its two byte counts. Raises: WireError as `unpack_frame`."""
    return _header(data)[0]


def _header(data: bytes) -> tuple[dict[str, Any], int]:
    """The header, and the offset of the sound in bytes."""
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
