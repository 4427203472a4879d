"""One launcher for a folder of logs and pid files: a pid file that is locked for as long as its process lives."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FILE_NAME = "launcher.pid"


class Taken(Exception):
    """Another launcher has the folder. pid: 0 if its file does not say."""

    def __init__(self, pid: int):
        super().__init__(f"pid {pid}")
        self.pid = pid


@contextmanager
def held(folder: Path) -> Iterator[Path]:
    """Hold the folder; the file goes with the end. Raises: Taken; OSError."""
    path = folder / FILE_NAME
    descriptor = _lock(path)
    try:
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
        yield path
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def remove_stale(folder: Path) -> None:
    """Pid files that a launcher left which was killed. Only for who holds the folder."""
    for file in (*folder.glob("worker_*.pid"), *folder.glob("gateway.pid")):
        file.unlink(missing_ok=True)


def _lock(path: Path) -> int:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.fstat(descriptor).st_ino == path.stat().st_ino:
                return descriptor
        except BlockingIOError:
            said = os.read(descriptor, 32).strip()
            os.close(descriptor)
            raise Taken(int(said) if said.isdigit() else 0) from None
        os.close(descriptor)  # its holder removed it meanwhile
