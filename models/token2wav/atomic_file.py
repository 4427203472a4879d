"""Files that are there whole or not at all. Knows paths only."""

import errno
import secrets
from pathlib import Path

PENDING = ".tmp"  # how the name of a file ends that is still being written


def check_target(path: Path) -> Path:
    """The plain file, there or not, that `path` stands for, links followed.

    Raises: OSError if there is no folder for it, or if something else has its place: a device must not be replaced.
    """
    path = path.resolve()
    if path.exists() and not path.is_file():
        raise FileExistsError(errno.EEXIST, "something that is no plain file", str(path))
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "no such folder", str(path.parent))
    return path


def write_atomically(path: Path, data: bytes) -> None:
    """Put a file in place at once: readers and other writers see the old one or the new one, never a part.

    Raises: OSError, with nothing left behind and an older file as it was.
    """
    path = check_target(path)
    pending = path.with_name(f".{path.name}.{secrets.token_hex(8)}{PENDING}")
    try:
        pending.write_bytes(data)
        pending.replace(path)
    finally:
        pending.unlink(missing_ok=True)
