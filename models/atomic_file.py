"""Atomic file writes: a file is replaced completely or not at all."""

import errno
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

PENDING = ".tmp"  # suffix of temporary files
_MAX_KEPT = 100  # bytes of the target's name in the name of the temporary file, whose length is limited


def follow_links(path: Path) -> Path:
    """The absolute path with symbolic links resolved; parts that do not exist stay as they are.

    Raises: OSError, also for a loop of links.
    """
    try:
        found = path.resolve()
    except RuntimeError:  # a loop of links, up to Python 3.12
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path)) from None
    with suppress(FileNotFoundError, NotADirectoryError):
        os.stat(found)  # raises for a loop of links, from Python 3.13 on
    return found


def check_target(path: Path) -> Path:
    """`path` with links resolved: an existing regular file, or a new file in an existing folder.

    Raises: OSError if the folder does not exist, for a loop of links, and if the path is no regular file: a device must
        not be replaced.
    """
    path = follow_links(path)
    # One call of stat: another process may remove the file between two.
    with suppress(FileNotFoundError, NotADirectoryError):
        if not stat.S_ISREG(path.stat().st_mode):
            raise FileExistsError(errno.EEXIST, "something other than a regular file", str(path))
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "no such folder", str(path.parent))
    return path


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file atomically: readers and other writers see the old or the new content, never a part of it.

    Raises: OSError; the temporary file is removed and an existing file unchanged then.
    """
    path = check_target(path)
    kept = os.fsencode(path.name)[:_MAX_KEPT].decode(errors="ignore")
    pending = path.with_name(f".{kept}.{secrets.token_hex(8)}{PENDING}")
    try:
        pending.write_bytes(data)
        pending.replace(path)
    finally:
        pending.unlink(missing_ok=True)
