"""Compares the files of a quantised checkpoint with their checksums while the engine compiles and warms up."""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from models.checkpoint.checksums import check_files
from models.checkpoint.index import declared_kind
from worker.assembly.hub import FILES

LOG = logging.getLogger(__name__)


class FileCheck:
    """A comparison of the files that loading has read, on a thread of its own. Hashing releases the interpreter.

    Begin it after loading: the files are in the page cache then, and no disk is read beside it. A folder that declares
    no quantised matrices has no checksums and is not read.

    Args:
        folder: of the checkpoint.
    """

    def __init__(self, folder: Path):
        self._folder, self._seconds = folder, 0.0
        self._n_files: Future[int] | None = None
        if declared_kind(folder) is not None:
            self._n_files = Future()
            threading.Thread(target=self._compare, args=(self._n_files,), name="checksums", daemon=True).start()

    def finish(self, progress: Callable[[str], None]) -> float | None:
        """Wait for the comparison and log it.

        Args:
            progress: called with a line of text before a wait.
        Returns: seconds of the comparison; None for a folder without checksums.
        Raises: CheckpointError listing the files that differ from the index, or for an index without checksums.
        """
        if self._n_files is None:
            return None
        if not self._n_files.done():
            progress("checksums of the model's files")
        start = time.perf_counter()
        n_files = self._n_files.result()
        waited = time.perf_counter() - start
        LOG.info("checksums: %d files in %.2f s beside the start, which waited %.2f s", n_files, self._seconds, waited)
        return self._seconds

    def _compare(self, result: "Future[int]") -> None:
        start = time.perf_counter()
        try:
            n_files = check_files(self._folder, FILES)
        except Exception as error:
            result.set_exception(error)
        else:
            self._seconds = time.perf_counter() - start
            result.set_result(n_files)
