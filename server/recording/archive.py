"""A recording's folder as a zip archive that is made while it is sent; no more than a block is in memory."""

import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, cast

from server.recording.store import ASSET_TYPES

BLOCK_BYTES = 2**18
TEXTS = (".json", ".txt")


class _Sent:
    """A stream that cannot be sought: what is written waits to be taken."""

    def __init__(self) -> None:
        self._blocks: list[bytes] = []

    def write(self, data: bytes) -> int:
        self._blocks.append(bytes(data))
        return len(data)

    def flush(self) -> None:
        pass

    def take(self) -> bytes:
        blocks, self._blocks = self._blocks, []
        return b"".join(blocks)


def zip_blocks(folder: Path) -> Iterator[bytes]:
    """The archive, block by block. Its members are `<id>/...`: media, JSON and the comment; not the timeline."""
    sent = _Sent()
    # Media are compressed already, or compress too little for the time.
    with zipfile.ZipFile(cast(IO[bytes], sent), "w", zipfile.ZIP_STORED) as archive:
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder)
            is_private = any(part.startswith(".") for part in name.parts)
            if is_private or path.suffix not in (*ASSET_TYPES, *TEXTS) or path.is_symlink() or not path.is_file():
                continue
            info = zipfile.ZipInfo.from_file(path, f"{folder.name}/{name.as_posix()}")
            with path.open("rb") as source, archive.open(info, "w") as member:
                while block := source.read(BLOCK_BYTES):
                    member.write(block)
                    yield sent.take()
    yield sent.take()
