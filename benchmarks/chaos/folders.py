"""Folders of their own file systems, which can be full or read-only, also for root. Needs the right to mount."""

import errno
import os
import subprocess
from contextlib import suppress
from pathlib import Path

SIZE = "256m"
FILLER = "filler"
STEP = 2**20


class SmallDisk:
    """A tmpfs at a folder. reason: why there is none; empty if there is."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.reason = _mount("-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(folder))
        self._is_read_only = False

    def fill(self) -> None:
        """Leave no room."""
        with (self.folder / FILLER).open("wb", buffering=0) as file:
            for size in (STEP, 1):
                try:
                    while file.write(b"x" * size) == size:
                        pass
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise

    def forbid_writing(self) -> None:
        """Refuse to open files for writing; those that are open stay so."""
        if not self._is_read_only:
            self._is_read_only = True
            _must("--bind", str(self.folder), str(self.folder))
            _must("-o", "remount,bind,ro", str(self.folder))

    def recover(self) -> None:
        """Make room, and allow writing."""
        if self._is_read_only:
            self._is_read_only = False
            _unmount(self.folder)
        (self.folder / FILLER).unlink(missing_ok=True)

    def close(self) -> None:
        if not self.reason:
            with suppress(OSError):
                self.recover()
            _unmount(self.folder)


def _mount(*arguments: str) -> str:
    """Returns: why it was refused; empty if it was not."""
    try:
        run = subprocess.run(["mount", *arguments], capture_output=True, text=True)
    except OSError as error:
        return f"mount: {error.strerror}"
    return "" if run.returncode == 0 else run.stderr.strip() or f"mount: exit status {run.returncode}"


def _must(*arguments: str) -> None:
    if reason := _mount(*arguments):
        raise OSError(errno.EPERM, f"mount {' '.join(arguments)}: {reason}", os.fspath(arguments[-1]))


def _unmount(folder: Path) -> None:
    # Lazily: the processes that have files open there may still run.
    subprocess.run(["umount", "-l", str(folder)], capture_output=True)
