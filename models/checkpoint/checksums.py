"""Sizes and SHA-256 of a folder's files, which the index of a quantised checkpoint lists. Torch-free."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path

from models.errors import CheckpointError

INDEX = "model.safetensors.index.json"  # of a checkpoint folder
FILES = "files"  # key of sizes and checksums in the index's metadata
ALL = ("*",)  # pattern of any name
_CHUNK_BYTES = 4 << 20  # read and hashed at once, without the interpreter's lock

FileFacts = dict[str, dict[str, object]]


def listed_files(folder: Path) -> FileFacts:
    """What the folder's index lists. Raises: CheckpointError for an index without sizes and checksums."""
    try:
        listed: FileFacts = json.loads((folder / INDEX).read_text(encoding="utf-8"))["metadata"][FILES]
        if not listed or not all(isinstance(facts, dict) for facts in listed.values()):
            raise TypeError("entries that are not sizes and checksums")
        return listed
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        expected = "checksums of the folder's files, which python -m models.quantize SRC DST writes with a new folder"
        got = f"{type(error).__name__}: {error}"
        raise CheckpointError(str(folder / INDEX), expected=expected, got=got) from None


def check_files(folder: Path, patterns: Sequence[str] = ALL) -> int:
    """Compare the files that a folder's index lists with the index. Reads all of them.

    Files that the index does not list are ignored, unless they are shards: other weights than those of the folder.

    Args:
        patterns: of the names that are compared, as `fnmatch` takes them.
    Returns: how many files were compared.
    Raises: CheckpointError listing the files that are missing or whose size or checksum differs, and other shards.
    """
    every = listed_files(folder)
    listed = {name: facts for name, facts in every.items() if _matches(name, patterns)}
    found = {name: _found(folder / name, facts) for name, facts in listed.items()}
    differences = [
        f"{name}: expected {listed[name]}, got {found[name]}" for name in listed if listed[name] != found[name]
    ]
    differences += [
        f"{name}: expected no shard that the index does not list, got one"
        for name in sorted(file.name for file in folder.glob("*.safetensors"))
        if name not in every and not name.startswith(".") and _matches(name, patterns)
    ]
    if differences:
        raise CheckpointError(str(folder), expected="the files that its index lists", got="; ".join(differences))
    return len(listed)


def file_facts(folder: Path) -> FileFacts:
    """Bytes and SHA-256 of each file but the index, by the path in the folder."""
    return {file.relative_to(folder).as_posix(): _facts(file) for file in files_in(folder) if file != folder / INDEX}


def files_in(folder: Path) -> Iterator[Path]:
    """All files of a folder and its folders, by name, without hidden ones, such as those of git or of a download."""
    return (
        file
        for file in sorted(folder.rglob("*"))
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(folder).parts)
    )


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def _found(file: Path, listed: Mapping[str, object]) -> dict[str, object] | str:
    """Size and checksum of a listed file, the size alone if it differs, or why there is neither."""
    try:
        if not file.is_file():
            return "no such file"
        n_bytes = file.stat().st_size
        return _facts(file) if n_bytes == listed.get("bytes") else {"bytes": n_bytes}
    except OSError as error:
        return error.strerror or str(error)


def _facts(file: Path) -> dict[str, object]:
    digest, chunk = hashlib.sha256(), memoryview(bytearray(_CHUNK_BYTES))
    with file.open("rb", buffering=0) as opened:
        while n_read := opened.readinto(chunk):
            digest.update(chunk[:n_read])
    return {"bytes": file.stat().st_size, "sha256": digest.hexdigest()}
