"""A lock that lets one launcher at a time use a folder of logs and pid files.

The lock is held on the launcher's own pid file. The kernel releases it when the process ends, also after SIGKILL.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

FILE_NAME = "launcher.pid"
TIMEOUT_S = 0.1  # long enough to retry when the previous launcher removes its file at the same moment
POLL_S = 0.02


class FolderLockedError(Exception):
    """Another launcher uses the folder. pid: of that launcher, 0 if its pid file does not contain one."""

    def __init__(self, pid: int):
        super().__init__(f"pid {pid}")
        self.pid = pid


@contextmanager
def lock_folder(folder: Path) -> Iterator[Path]:
    """Hold the folder's lock and write the pid file, which is removed on exit.

    Yields: the path of the pid file.
    Raises:
        FolderLockedError: another launcher holds the lock.
        OSError: the pid file cannot be opened or written.
    """
    path = folder / FILE_NAME
    lock = FileLock(path, timeout=TIMEOUT_S, poll_interval=POLL_S, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout:
        raise FolderLockedError(_read_pid(path)) from None
    try:
        path.write_text(f"{os.getpid()}\n")
        yield path
    finally:
        path.unlink(missing_ok=True)
        lock.release()


def remove_stale_pid_files(folder: Path) -> None:
    """Remove the pid files left by a launcher that was killed. Call this only while holding the folder's lock."""
    for file in (*folder.glob("worker_*.pid"), *folder.glob("gateway.pid")):
        file.unlink(missing_ok=True)


def _read_pid(path: Path) -> int:
    with suppress(OSError, ValueError):
        return int(path.read_text())
    return 0
