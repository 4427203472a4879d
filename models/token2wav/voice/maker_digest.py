"""A digest of everything that determines a prepared voice, apart from its sound: the networks' files and the recipe.

The flow's file is not part of the digest: voices are made without it and stay valid in any precision of its weights.

The digest covers the content of the files, not their path or age, so a copy of the checkpoint finds the voices of the
original. To avoid reading half a gigabyte on each start, the digest of a file is stored and reused while the file's
size, inode, mtime and ctime are unchanged. The ctime is needed because copying tools restore the mtime.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from models.atomic_file import follow_links, write_atomically
from models.errors import CheckpointError
from models.token2wav.load.parts import SPEAKER_ENCODER, SPEECH_TOKENIZER

RECIPE = 1  # to be incremented whenever the same sound and files result in a different voice
MEMO = "weights.json"
_MAX_ENTRIES = 64

_Memo = dict[str, list[Any]]  # JSON: resolved path -> [*_fingerprint, digest]


def maker_digest(model: str | Path, n_mels: int, cache: str | Path) -> str:
    """Digest of the networks that prepare voices and of the recipe.

    Args:
        model: vocoder folder.
        n_mels: mel bins of the voices.
        cache: folder that stores the digests of files; if it cannot be written, the files are read on each start.
    Raises: CheckpointError if a file cannot be read.
    """
    memo_file = Path(cache) / MEMO
    memo = _read_memo(memo_file)
    known = dict(memo)
    digests = [_file_digest(Path(model) / name, memo) for name in (SPEAKER_ENCODER, SPEECH_TOKENIZER)]
    if memo != known:
        _write_memo(memo_file, memo)
    return hashlib.sha256(json.dumps([RECIPE, n_mels, *digests]).encode()).hexdigest()


def _file_digest(path: Path, memo: _Memo) -> str:
    try:
        path = follow_links(path)
        before = _fingerprint(path)
        *stored, digest = memo.get(str(path), [None])
        if stored == before:
            return str(digest)
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        memo.pop(str(path), None)
        if _fingerprint(path) == before:  # otherwise the file is being written
            memo[str(path)] = [*before, digest]
        return str(digest)
    except OSError as error:
        raise CheckpointError(str(path), expected="a readable file", got=error.strerror) from None


def _fingerprint(path: Path) -> list[int]:
    stat = os.stat(path)
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def _read_memo(path: Path) -> _Memo:
    """The stored digests; empty if the file is missing or damaged."""
    try:
        memo = json.loads(path.read_bytes())
        return {name: entry for name, entry in memo.items() if _is_entry(entry)}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return {}


def _is_entry(entry: object) -> bool:
    return isinstance(entry, list) and len(entry) == 5 and isinstance(entry[-1], str)


def _write_memo(path: Path, memo: _Memo) -> None:
    newest = dict(list(memo.items())[-_MAX_ENTRIES:])
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(newest, indent=1).encode())
    except OSError:
        return  # the files are read again on the next start
