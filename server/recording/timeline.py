"""The append-only file of a recording in progress: every message in order, with its time and direction.

A record is a header of fixed size and the message as it was relayed. Each record has a checksum, so that after a crash
the reader stops at the first incomplete record. Does not interpret the messages.
"""

import fcntl
import os
import struct
import zlib
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path
from typing import BinaryIO, NamedTuple, Self

FILE_NAME = "timeline.bin"
MAX_RECORD_BYTES = 2**28  # larger than any message that the gateway accepts
ENCODED_CHARS = 2**20  # characters of a text that are encoded at once, which holds the interpreter's lock
# The source, whether the message is text, two bytes of padding, ms since the start, number of bytes. The checksum of
# these fields and the bytes follows.
_FIELDS, _CHECKSUM = struct.Struct("<BBxxdI"), struct.Struct("<I")
_HEADER_BYTES = _FIELDS.size + _CHECKSUM.size


class RecordSource(IntEnum):
    """Where a record comes from. GAP: the number of messages that are missing here, as decimal text."""

    CLIENT = 1
    WORKER = 2
    GAP = 3


class TimelineRecord(NamedTuple):
    """One message. at_ms: since the start of the recording."""

    source: RecordSource
    at_ms: float
    data: str | bytes


class RecordingBusyError(Exception):
    """Another process writes or finalizes the recording."""


class TimelineFile:
    """The file of a recording, locked for this process: for writing, or for finalizing.

    Raises: RecordingBusyError; OSError.
    """

    def __init__(self, path: Path, *, create: bool):
        self._file: BinaryIO = path.open("xb" if create else "r+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise RecordingBusyError(path.parent.name) from None

    def append(self, source: RecordSource, at_ms: float, data: str | bytes) -> int:
        """Write a record into the buffer. Returns: its size in bytes. Raises: OSError."""
        parts = _encoded(data)
        n_bytes = sum(len(part) for part in parts)
        fields = _FIELDS.pack(source, isinstance(data, str), at_ms, n_bytes)
        checksum = zlib.crc32(fields)
        for part in parts:
            checksum = zlib.crc32(part, checksum)
        self._file.write(fields + _CHECKSUM.pack(checksum))
        for part in parts:
            self._file.write(part)
        return _HEADER_BYTES + n_bytes

    def flush(self) -> None:
        """Give the buffer to the operating system: the records survive the end of this process. Raises: OSError."""
        self._file.flush()

    def sync(self) -> None:
        """Write everything flushed to the disk: it survives a loss of power. Raises: OSError."""
        os.fdatasync(self._file.fileno())

    def records(self) -> Iterator[TimelineRecord]:
        """The records up to the end or to the first damaged one."""
        self._file.seek(0)
        while len(header := self._file.read(_HEADER_BYTES)) == _HEADER_BYTES:
            source, is_text, at_ms, n_bytes = _FIELDS.unpack_from(header)
            [checksum] = _CHECKSUM.unpack_from(header, _FIELDS.size)
            if n_bytes > MAX_RECORD_BYTES:
                return
            data = self._file.read(n_bytes)
            if len(data) < n_bytes or zlib.crc32(data, zlib.crc32(header[: _FIELDS.size])) != checksum:
                return
            yield TimelineRecord(RecordSource(source), at_ms, data.decode("utf-8", "replace") if is_text else data)

    def close(self) -> None:
        """Close the file and release its lock. Raises: OSError if buffered records cannot be written."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _encoded(data: str | bytes) -> list[bytes]:
    if isinstance(data, bytes):
        return [data]
    n = ENCODED_CHARS
    return [data[start : start + n].encode("utf-8", "surrogatepass") for start in range(0, len(data), n)]
