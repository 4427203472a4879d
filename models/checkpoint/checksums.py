"""Sizes and SHA-256 of a folder's files, which the index of a quantised checkpoint lists. Torch-free."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from models.errors import CheckpointError

INDEX = "model.safetensors.index.json"  # of a checkpoint folder
FILES = "files"  # key of sizes and checksums in the index's metadata

FileFacts = dict[str, dict[str, object]]


def listed_files(folder: Path) -> FileFacts:
    """What the folder's index lists. Raises: CheckpointError for an index without sizes and checksums."""
    try:
        listed: FileFacts = json.loads((folder / INDEX).read_text(encoding="utf-8"))["metadata"][FILES]
        return dict(listed)
    except (OSError, ValueError, KeyError, TypeError) as error:
        got = f"{type(error).__name__}: {error}"
        raise CheckpointError(str(folder / INDEX), expected="checksums of the folder's files", got=got) from None


def check_files(folder: Path) -> int:
    """Compare all files of a folder with its index. Reads all of them.

    Returns: how many files there are.
    Raises: CheckpointError listing the files whose size or checksum differs from the index, or which it lacks.
    """
    listed, found = listed_files(folder), file_facts(folder)
    differences = [
        f"{name}: expected {listed.get(name, 'no such file')}, got {found.get(name, 'no such file')}"
        for name in sorted(listed.keys() | found.keys())
        if listed.get(name) != found.get(name)
    ]
    if differences:
        raise CheckpointError(str(folder), expected="the files that its index lists", got="; ".join(differences))
    return len(found)


def file_facts(folder: Path) -> FileFacts:
    """Bytes and SHA-256 of each file but the index, by the path in the folder."""
    facts: FileFacts = {}
    for file in files_in(folder):
        if file != folder / INDEX:
            with file.open("rb") as opened:
                digest = hashlib.file_digest(opened, "sha256").hexdigest()
            facts[file.relative_to(folder).as_posix()] = {"bytes": file.stat().st_size, "sha256": digest}
    return facts


def files_in(folder: Path) -> Iterator[Path]:
    """All files of a folder and its folders, by name."""
    return (file for file in sorted(folder.rglob("*")) if file.is_file())
