"""The folder of one recording: its files, and `meta.json`."""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from models.atomic_file import write_atomically
from worker.protocol.wire import WireError, read_object

META, RECORDING, COMMENT = "meta.json", "recording.json", "comment.txt"
REPLAY_SOUND, REPLAY_VIDEO = "merged_replay.wav", "merged_replay.mp4"
FRONTEND_REPLAY = "frontend_replay"  # with the suffix of the uploaded type
REPLAYS_OF_BROWSERS = tuple(f"{FRONTEND_REPLAY}{suffix}" for suffix in (".webm", ".mp4", ".wav"))
REPLAYS = (REPLAY_SOUND, REPLAY_VIDEO, *REPLAYS_OF_BROWSERS)
MEDIA_FOLDERS = ("user_audio", "user_frames", "ai_audio", "user_images", "user_videos")


def create_folder(folder: Path, meta: Mapping[str, object]) -> None:
    """Create a recording's folder with its subfolders and `meta.json`. Raises: OSError, also if it exists."""
    folder.mkdir(parents=True)
    for name in MEDIA_FOLDERS:
        (folder / name).mkdir()
    write_json(folder / META, meta)


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Replace a JSON file completely or not at all. Raises: OSError."""
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    write_atomically(path, text.encode("utf-8", "replace"))


def read_json(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None if there is none, or not yet."""
    try:
        return read_object(path.read_bytes(), path.name)
    except (OSError, WireError):
        return None


def folder_bytes(folder: Path) -> int:
    """Size of all files below a folder. Files that disappear meanwhile count as 0."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(parent, name)).st_size
    return total
