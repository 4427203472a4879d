"""What a prepared voice depends on beside its sound, as one digest: the networks' files and the recipe.

The content of the files counts, not their place or age, so that a copy of the checkpoint finds the voices of the
original. Half a gigabyte is not read on each start: a file's digest is remembered, and believed as long as size,
identity and both times of the file are what they were. The time of the last change of its entry (ctime) is one of
them, since copying tools set the other one back.
"""

import hashlib
import json
import os
from pathlib import Path

from models.atomic_file import follow_links, write_atomically
from models.errors import CheckpointError
from models.token2wav.load.parts import SPEAKER_ENCODER, SPEECH_TOKENIZER

RECIPE = 1  # to be raised whenever the same sound and files give another voice
MEMO = "weights.json"
_MAX_REMEMBERED = 64

_Memo = dict[str, list]  # resolved path -> [*_fingerprint, digest]


def maker_digest(model: str | Path, n_mels: int, cache: str | Path) -> str:
    """Digest of a vocoder folder's voice parts and of how voices of `n_mels` bins are made from them.

    Args: cache: folder where digests of files are remembered; one that cannot be written costs time only.
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
        *remembered, digest = memo.get(str(path), [None])
        if remembered == before:
            return digest
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        memo.pop(str(path), None)
        if _fingerprint(path) == before:  # else it is being written
            memo[str(path)] = [*before, digest]
        return digest
    except OSError as error:
        raise CheckpointError(str(path), expected="a readable file", got=error.strerror) from None


def _fingerprint(path: Path) -> list[int]:
    stat = os.stat(path)
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def _read_memo(path: Path) -> _Memo:
    """What is remembered; nothing, if the file is missing or damaged."""
    try:
        memo = json.loads(path.read_bytes())
        return {name: entry for name, entry in memo.items() if _is_entry(entry)}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return {}


def _is_entry(entry: object) -> bool:
    return isinstance(entry, list) and len(entry) == 5 and isinstance(entry[-1], str)


def _write_memo(path: Path, memo: _Memo) -> None:
    newest = dict(list(memo.items())[-_MAX_REMEMBERED:])
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(newest, indent=1).encode())
    except OSError:
        return  # remembered next time, or read again
