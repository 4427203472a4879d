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

from server.recording.render.folder import complete
from worker import log

LOG = logging.getLogger("server.recording.render")
NICENESS = 19


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m server.recording.render", description="Completes recordings.")
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER", help="folder of a recording")
    args = parser.parse_args(argv)
    log.set_up(log.level_of(None, os.environ))
    _lower_priority()
    failed = False
    for folder in args.folders:
        try:
            complete(folder)
        except Exception as error:
            if folder.exists():  # otherwise the recording was deleted meanwhile
                LOG.exception("recording %s: %s", folder.name, error)
                failed = True
    return int(failed)


def _lower_priority() -> None:
    os.nice(NICENESS)
    with suppress(psutil.Error, OSError, AttributeError):  # not on every system
        psutil.Process().ionice(psutil.IOPRIO_CLASS_IDLE)


if __name__ == "__main__":
    sys.exit(main())
