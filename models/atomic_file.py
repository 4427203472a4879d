"""Files that are there whole or not at all. Knows paths only."""

import errno
import os
import secrets
from contextlib import suppress
from pathlib import Path

PENDING = ".tmp"  # how the name of a file ends that is still being written
_MAX_KEPT = 100  # bytes of a file's name in the name of its pending one, which must not get too long


def follow_links(path: Path) -> Path:
    """The absolute path without links; what is not there is left as it is.

    Raises: OSError, also if links go in circles.
    """
    try:
        found = path.resolve()
    except RuntimeError:  # links in circles, up to Python 3.12
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path)) from None
    with suppress(FileNotFoundError, NotADirectoryError):
        os.stat(found)  # links in circles, from Python 3.13 on
    return found


def check_target(path: Path) -> Path:
    """The plain file, there or not, that `path` stands for, links followed.

    Raises: OSError if there is no folder for it, if links go in circles, or if something else has its place: a device
        must not be replaced.
    """
    path = follow_links(path)
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
    kept = os.fsencode(path.name)[:_MAX_KEPT].decode(errors="ignore")
    pending = path.with_name(f".{kept}.{secrets.token_hex(8)}{PENDING}")
    try:
        pending.write_bytes(data)
        pending.replace(path)
    finally:
        pending.unlink(missing_ok=True)
