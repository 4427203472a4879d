"""`python -m server.recording.render FOLDER...` completes recordings, one after the other, with the lowest priority.

Exit status: 0, or 1 if a recording could not be completed; the others are completed nevertheless.
"""

import argparse
import logging
import os
import sys
from contextlib import suppress
from pathlib import Path

import psutil

from server.recording.render.folder import begin_completion
from worker import log

LOG = logging.getLogger("server.recording.render")
NICENESS = 19


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m server.recording.render", description="Completes recordings.")
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER", help="folder of a recording")
    args = parser.parse_args(argv)
    log.set_up(log.level_of(None, os.environ))
    _lower_priority()
    return int(_complete_all(args.folders))


def _complete_all(folders: list[Path]) -> bool:
    """Complete recordings: first all but their videos, which take the longest. Returns: whether one failed."""
    begun, failed = [], False
    for folder in folders:
        try:
            if (completion := begin_completion(folder)) is not None:
                begun.append((folder, completion))
        except Exception as error:
            failed = _report(folder, error) or failed
    for folder, completion in begun:
        try:
            completion.finish()
        except Exception as error:
            failed = _report(folder, error) or failed
    return failed


def _report(folder: Path, error: Exception) -> bool:
    """Log an error, unless the recording was deleted meanwhile. Returns: whether it counts."""
    if folder.exists():
        LOG.error("recording %s: %s", folder.name, error, exc_info=error)
    return folder.exists()


def _lower_priority() -> None:
    os.nice(NICENESS)
    with suppress(psutil.Error, OSError, AttributeError):  # not on every system
        psutil.Process().ionice(psutil.IOPRIO_CLASS_IDLE)


if __name__ == "__main__":
    sys.exit(main())
