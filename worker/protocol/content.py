"""Content items of chat messages: text, image, audio, video. Torch-free.

Contains their fields, limits and the recognition of media containers. Does not contain decoders.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BeforeValidator, Field

from worker.describe import TypeWords, shown
from worker.protocol.codec import FieldGroup
from worker.protocol.codes import ErrorCode
from worker.protocol.wire import MAX_PICTURE_BYTES, WireError, base64_bytes

RATE_IN = 16_000
MB = 2**20
MAX_AUDIO_BYTES = 32 * MB
MAX_VIDEO_BYTES = 94 * MB  # base64 of more does not fit into a message
MAX_STACKED = 10  # frames of one second of video
# Samples of real sound hardly exceed 1. The bytes of a compressed file, read as float32, exceed any bound.
MAX_AMPLITUDE = 64.0
PIECE_CHARS = 2**20  # a multiple of 4
EBML, ID3, RIFF = b"\x1a\x45\xdf\xa3", b"ID3", b"RIFF"

Container = Literal["mov", "matroska", "wav", "ogg", "flac", "mp3", "aac", "avi", "mpegts"]


class TextContent(FieldGroup):
    """Text."""

    type: Literal["text"] = "text"
    text: str = Field("", description="the text; special tokens of the model act as such")


class ImageContent(FieldGroup):
    """A picture."""

    type: Literal["image"] = "image"
    data: Annotated[str, TypeWords("base64 text")] = Field(
        "", description=f"JPEG, PNG, WebP, GIF or BMP, at most {MAX_PICTURE_BYTES // MB} MiB"
    )

    def payload(self, what: str) -> bytes:
        """The encoded picture. what: the item's name, for errors. Raises: WireError bad_base64, too_large."""
        return _payload(self.data, f"{what}.data", MAX_PICTURE_BYTES)


class AudioContent(FieldGroup):
    """Mono sound, or a whole sound file."""

    type: Literal["audio"] = "audio"
    data: Annotated[str, TypeWords("base64 text")] = Field(
        "",
        description=f"float32 at 16 kHz, or a file such as WAV, MP3, M4A, WebM or Ogg; at most "
        f"{MAX_AUDIO_BYTES // MB} MiB",
    )
    sample_rate: int = Field(RATE_IN, description="of float32 samples, Hz; no other value is accepted for them")

    def payload(self, what: str) -> bytes:
        """The samples or the file. what: the item's name, for errors. Raises: WireError bad_base64, too_large."""
        return _payload(self.data, f"{what}.data", MAX_AUDIO_BYTES)


class VideoContent(FieldGroup):
    """A video file: of each second the first frame and the sound, in turn."""

    type: Literal["video"] = "video"
    data: Annotated[str, TypeWords("base64 text")] = Field(
        "", description=f"a file such as MP4, MOV or WebM, at most {MAX_VIDEO_BYTES // MB} MiB"
    )
    stack_frames: int = Field(
        1,
        ge=1,
        le=MAX_STACKED,
        description="frames of each second; those after the first are stacked into one picture after the sound",
    )

    def payload(self, what: str) -> bytes:
        """The video file. what: the item's name, for errors. Raises: WireError bad_base64, too_large."""
        return _payload(self.data, f"{what}.data", MAX_VIDEO_BYTES)


AnyContent = TextContent | ImageContent | AudioContent | VideoContent
CONTENT_CLASSES: dict[str, type[FieldGroup]] = {
    "text": TextContent,
    "image": ImageContent,
    "audio": AudioContent,
    "video": VideoContent,
}


def _known_items(content: Any) -> Any:
    """A list of items without unknown and empty ones, and each without unknown keys and nulls."""
    if not isinstance(content, list):
        return content
    items = []
    for item in content:
        if not isinstance(item, Mapping):
            items.append(item)  # refused by the validation that follows
            continue
        cls = CONTENT_CLASSES.get(item["type"]) if isinstance(item.get("type"), str) else None
        if cls is not None and item.get("text" if cls is TextContent else "data") not in (None, ""):
            items.append({key: item[key] for key in cls.model_fields if item.get(key) is not None})
    return items


ContentField = Annotated[AnyContent, Field(discriminator="type")]


class ToolCallFields(FieldGroup):
    """A call of a function."""

    name: str = Field(description="of the function")
    arguments: dict[str, Any] = Field(description="by name")


class ChatTurn(FieldGroup):
    """One message of a conversation."""

    role: Literal["system", "user", "assistant", "tool"] = Field(
        description="a system message comes first; `tool`: the result of a call"
    )
    content: Annotated[
        str | list[ContentField], BeforeValidator(_known_items), TypeWords("text or a list of items")
    ] = Field(description="text, or items; empty items and items of another type are skipped")
    tool_calls: list[ToolCallFields] = Field([], description="functions that the assistant called")

    @property
    def text(self) -> str:
        """The message's text without its media."""
        if isinstance(self.content, str):
            return self.content
        return "".join(item.text for item in self.content if isinstance(item, TextContent))


def _known_turns(messages: Any) -> Any:
    """Messages without unknown keys, and without those that have no content."""
    if not isinstance(messages, list):
        return messages
    turns: list[Any] = []
    for message in messages:
        if not isinstance(message, Mapping):
            turns.append(message)  # refused by the validation that follows
            continue
        content, calls = _known_items(message.get("content")), message.get("tool_calls")
        if message.get("role") == "tool" or calls:
            turns.append({"role": message.get("role"), "content": content or "", "tool_calls": calls or []})
        elif content not in (None, "", []):
            turns.append({"role": message.get("role"), "content": content})
    return turns


ChatTurns = Annotated[list[ChatTurn], BeforeValidator(_known_turns)]


def container_of(data: bytes) -> Container | None:
    """The container format of a media file, from its first bytes; None for unknown bytes."""
    head = data[:16]
    if head[4:8] in (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip"):
        return "mov"
    if head.startswith(EBML):
        return "matroska"
    if head.startswith((RIFF, b"RF64")):
        return "avi" if head[8:11] == b"AVI" else "wav"
    for magic, name in ((b"OggS", "ogg"), (b"fLaC", "flac"), (ID3, "mp3")):
        if head.startswith(magic):
            return name  # type: ignore[return-value]  # mypy widens the names of the table
    if len(head) > 1 and head[0] == 0xFF and head[1] & 0xE0 == 0xE0:  # frames of MPEG audio without a header before
        return "aac" if head[1] & 0x06 == 0 else "mp3"
    return "mpegts" if head[:1] == b"G" and data[188:189] == b"G" else None


def raw_samples(data: bytes) -> np.ndarray | None:
    """[n] float32, if the bytes are plausible samples of little-endian float32; None otherwise."""
    if not data or len(data) % 4:
        return None
    samples = np.frombuffer(data, "<f4")
    # NaN fails the comparison.
    is_sound = bool(np.abs(samples).max() <= MAX_AMPLITUDE)
    return samples.astype(np.float32) if is_sound else None


def _decoded(data: str, what: str) -> bytes:
    """As `base64_bytes`, in pieces: one call for a whole video would block all other threads meanwhile."""
    try:
        pieces = (data[start : start + PIECE_CHARS] for start in range(0, len(data), PIECE_CHARS))
        return b"".join(base64_bytes(piece, what) for piece in pieces)
    except WireError:  # line breaks in the text: the pieces do not end at whole bytes
        return base64_bytes(data, what)


def _payload(data: str, what: str, max_bytes: int) -> bytes:
    """Decoded base64, with or without a `data:...,` prefix. Raises: WireError bad_base64, too_large."""
    if data[:5].lower() == "data:":
        data = data[data.find(",", 0, 200) + 1 :]
    if len(data) * 3 // 4 > max_bytes + 3:
        got = f"{len(data) * 3 / 4 / MB:.0f} MiB"
        raise WireError(ErrorCode.TOO_LARGE, what, expected=f"at most {max_bytes // MB} MiB", got=got)
    payload = _decoded(data, what)
    if not payload:
        raise WireError(ErrorCode.BAD_MESSAGE, what, expected="base64 of a file", got=shown(data))
    return payload
