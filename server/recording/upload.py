"""A recording that the browser made, received as a multipart upload and written to disk while it arrives."""

import asyncio
import os
import secrets
from collections.abc import AsyncIterator
from pathlib import Path

from python_multipart import MultipartParser
from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import parse_options_header

from models.errors import ModelError
from server.recording.files import FRONTEND_REPLAY

MAX_UPLOAD_BYTES = 200 * 2**20
FIELD = "file"
# Type of the upload -> suffix of the file.
UPLOAD_TYPES = {"video/webm": ".webm", "video/mp4": ".mp4", "audio/wav": ".wav", "audio/webm": ".webm"}
WRITE_BYTES = 2**20
MAX_HEADER_BYTES = 8192
MAX_PARTS = 100


class UploadError(ModelError, ValueError):
    """The body is no multipart upload, or its file has no accepted type."""


class UploadTooLargeError(ModelError, ValueError):
    """The file is larger than `MAX_UPLOAD_BYTES`."""


class _FilePart:
    """Callbacks of the parser: collects the bytes of the field `file`."""

    def __init__(self) -> None:
        self.suffix: str | None = None
        self.pending = bytearray()
        self.n_bytes = 0
        self.is_complete = False
        self._name, self._value, self._n_header = bytearray(), bytearray(), 0
        self._headers: dict[bytes, bytes] = {}
        self._is_file, self._n_parts = False, 0

    def on_part_begin(self) -> None:
        self._headers, self._is_file = {}, False
        self._n_parts += 1
        if self._n_parts > MAX_PARTS:
            raise UploadError("body", expected=f"at most {MAX_PARTS} parts", got="more")

    def on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._name += self._header_part(data, start, end)

    def on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += self._header_part(data, start, end)

    def _header_part(self, data: bytes, start: int, end: int) -> bytes:
        self._n_header += end - start
        if self._n_header > MAX_HEADER_BYTES:
            raise UploadError("multipart headers", expected=f"at most {MAX_HEADER_BYTES} bytes", got="more")
        return data[start:end]

    def on_header_end(self) -> None:
        self._headers[bytes(self._name).lower()] = bytes(self._value)
        self._name, self._value = bytearray(), bytearray()

    def on_headers_finished(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition"))
        if options.get(b"name") != FIELD.encode() or self.is_complete:
            return
        given, _ = parse_options_header(self._headers.get(b"content-type"))
        kind = given.decode("latin-1").lower()
        if kind not in UPLOAD_TYPES:
            raise UploadError("type of the file", expected=" or ".join(UPLOAD_TYPES), got=kind[:100] or "none")
        self.suffix, self._is_file = UPLOAD_TYPES[kind], True

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self.n_bytes += end - start
            if self.n_bytes > MAX_UPLOAD_BYTES:
                raise UploadTooLargeError("file", expected=f"at most {MAX_UPLOAD_BYTES} bytes", got="more")
            self.pending += data[start:end]

    def on_part_end(self) -> None:
        self.is_complete = self.is_complete or self._is_file

    def take(self) -> bytes:
        taken, self.pending = bytes(self.pending), bytearray()
        return taken


def _parser(content_type: str, part: _FilePart) -> MultipartParser:
    kind, options = parse_options_header(content_type)
    boundary = options.get(b"boundary")
    if kind != b"multipart/form-data" or not boundary or len(boundary) > 200:
        raise UploadError("Content-Type", expected="multipart/form-data with a boundary", got=content_type[:100])
    return MultipartParser(
        boundary,
        {
            "on_part_begin": part.on_part_begin,
            "on_header_field": part.on_header_field,
            "on_header_value": part.on_header_value,
            "on_header_end": part.on_header_end,
            "on_headers_finished": part.on_headers_finished,
            "on_part_data": part.on_part_data,
            "on_part_end": part.on_part_end,
        },
    )


async def receive_upload(folder: Path, content_type: str, body: AsyncIterator[bytes]) -> tuple[str, int]:
    """Write the uploaded file into a recording's folder, in place of an earlier one of the same type.

    Args:
        folder: of the recording.
        content_type: of the request.
        body: the request's body, as it arrives.
    Returns: the file's name and its size in bytes.
    Raises: UploadError; UploadTooLargeError; OSError. Nothing is left on disk then.
    """
    part = _FilePart()
    parser = _parser(content_type, part)
    pending = folder / f".upload-{secrets.token_hex(8)}"
    descriptor = await asyncio.to_thread(os.open, pending, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with os.fdopen(descriptor, "wb") as file:
            async for block in body:
                parser.write(block)
                if len(part.pending) >= WRITE_BYTES:
                    await asyncio.to_thread(file.write, part.take())
            await asyncio.to_thread(file.flush)
            await asyncio.to_thread(file.write, part.take())
            await asyncio.to_thread(file.flush)
        if not part.is_complete:
            raise UploadError("body", expected=f"a complete field {FIELD}", got="none")
        name = f"{FRONTEND_REPLAY}{part.suffix}"
        await asyncio.to_thread(pending.replace, folder / name)
        return name, part.n_bytes
    except MultipartParseError as error:
        raise UploadError("body", expected="a multipart body", got=str(error)[:200]) from None
    finally:
        pending.unlink(missing_ok=True)
