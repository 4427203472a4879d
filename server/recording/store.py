"""The recordings on disk: which there are, their files, comments and deletion. Every method blocks for the disk.

Ids and paths from clients are checked here: no other part builds a path from them.
"""

import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from models.atomic_file import write_atomically
from models.errors import ModelError
from server.recording.files import COMMENT, META, RECORDING, REPLAYS, REPLAYS_OF_BROWSERS, read_json
from server.recording.ids import is_recording_id
from server.recording.timeline import FILE_NAME

# Types of the files that clients can read. Everything else in a folder, such as the timeline, stays private.
ASSET_TYPES = {
    ".wav": "audio/wav",
    ".mp3": "audio/mpeg",
    ".jpg": "image/jpeg",
    ".png": "image/png",
    ".webm": "video/webm",
    ".mp4": "video/mp4",
}
MAX_COMMENT_CHARS = 2000
MAX_PATH_CHARS = 200
OWNER = "owner"  # key in `meta.json`: whose session it was, if it came with a key
_DELETED = ".deleted-"  # prefix of folders that are being removed


class NoRecordingError(ModelError, LookupError):
    """There is no recording of this id, or no such file in it."""


class AssetPathError(ModelError, ValueError):
    """A path that does not stay inside the recording's folder."""


class RecordingPage(NamedTuple):
    """A part of the list of recordings. total: number of all recordings."""

    total: int
    metas: list[dict[str, Any]]


class RecordingStore:
    """Access to the recordings. root: the folder that holds one folder per recording; it need not exist."""

    def __init__(self, root: Path):
        self.root = root

    def folder_of(self, recording_id: str) -> Path:
        """The folder of a recording, which need not exist. Raises: NoRecordingError for an invalid id."""
        if not is_recording_id(recording_id):
            raise NoRecordingError("session id", expected="the id of a recording", got=recording_id[:200])
        return self.root / recording_id

    def existing(self, recording_id: str) -> Path:
        """The folder of a recording. Raises: NoRecordingError."""
        folder = self.folder_of(recording_id)
        if not (folder / META).is_file():
            raise NoRecordingError("session id", expected="a recording that exists", got=recording_id)
        return folder

    def ids(self) -> list[str]:
        """Ids of all recordings, newest first. Those without `meta.json` are left out."""
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(self.root) as entries:
            names = [entry.name for entry in entries if is_recording_id(entry.name)]
            return sorted((name for name in names if (self.root / name / META).is_file()), reverse=True)
        return []

    def unfinished(self) -> list[str]:
        """Ids of the recordings that still have a timeline, oldest first."""
        return [one for one in reversed(self.ids()) if (self.root / one / FILE_NAME).is_file()]

    def page(self, offset: int, limit: int, owner: str | None = None) -> RecordingPage:
        """`meta.json` of up to `limit` recordings, newest first, starting at number `offset`.

        owner: whose recordings; None: all.
        """
        ids = self.ids() if owner is None else [one for one in self.ids() if self.owner(one) == owner]
        metas = [read_json(self.root / one / META) for one in ids[offset : offset + limit]]
        return RecordingPage(len(ids), [meta for meta in metas if meta is not None])

    def owner(self, recording_id: str) -> str | None:
        """Whose recording it is; None if that is not known. Raises: NoRecordingError for an invalid id."""
        found = (read_json(self.folder_of(recording_id) / META) or {}).get(OWNER)
        return found if isinstance(found, str) else None

    def meta(self, recording_id: str) -> dict[str, Any]:
        """The content of `meta.json`. Raises: NoRecordingError."""
        return self._json(recording_id, META)

    def recording(self, recording_id: str) -> dict[str, Any]:
        """The content of `recording.json`. Raises: NoRecordingError, also before it is complete."""
        return self._json(recording_id, RECORDING)

    def _json(self, recording_id: str, name: str) -> dict[str, Any]:
        content = read_json(self.existing(recording_id) / name)
        if content is None:
            raise NoRecordingError(f"{recording_id}/{name}", expected="a file", got="none")
        return content

    def asset(self, recording_id: str, path: str) -> tuple[Path, str]:
        """A media file and its type. Raises: AssetPathError for a path that leaves the folder; NoRecordingError."""
        parts = path.split("/")
        is_odd = any(part in ("", ".", "..") or "\\" in part or "\0" in part for part in parts)
        if is_odd or len(path) > MAX_PATH_CHARS:
            raise AssetPathError("path", expected="a path inside the recording", got=path[:MAX_PATH_CHARS])
        folder = self.existing(recording_id)
        file = folder.joinpath(*parts)
        kind = ASSET_TYPES.get(file.suffix)
        if kind is None or not file.is_file():
            raise NoRecordingError("path", expected="a media file of the recording", got=path)
        if not file.resolve().is_relative_to(folder.resolve()):
            raise AssetPathError("path", expected="a path inside the recording", got=path)
        return file, kind

    def replays(self, recording_id: str) -> list[str]:
        """Names of the replays that exist, without those of an incomplete recording. Raises: NoRecordingError."""
        folder = self.existing(recording_id)
        names = REPLAYS if self.is_complete(recording_id) else REPLAYS_OF_BROWSERS
        return [name for name in names if (folder / name).is_file()]

    def is_complete(self, recording_id: str) -> bool:
        """Whether all files are made. Raises: NoRecordingError."""
        folder = self.existing(recording_id)
        return (folder / RECORDING).is_file() and not (folder / FILE_NAME).is_file()

    def comment(self, recording_id: str) -> str:
        """The comment; empty text without one. Raises: NoRecordingError."""
        try:
            return (self.existing(recording_id) / COMMENT).read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return ""

    def set_comment(self, recording_id: str, comment: str) -> None:
        """Replace the comment; empty text deletes it. Raises: NoRecordingError; OSError."""
        file = self.existing(recording_id) / COMMENT
        if comment:
            write_atomically(file, comment.encode("utf-8", "replace"))
        else:
            file.unlink(missing_ok=True)

    def delete(self, recording_id: str) -> bool:
        """Remove a recording with all its files. Returns: whether it existed. Raises: OSError."""
        folder = self.folder_of(recording_id)
        # The new name takes the recording away at once, also from a process that is completing it.
        doomed = folder.with_name(f"{_DELETED}{secrets.token_hex(8)}")
        try:
            folder.rename(doomed)
        except FileNotFoundError:
            return False
        shutil.rmtree(doomed, ignore_errors=True)
        return True

    def remove_deleted(self) -> None:
        """Remove what an interrupted `delete` left behind."""
        for doomed in self.root.glob(f"{_DELETED}*"):
            shutil.rmtree(doomed, ignore_errors=True)
