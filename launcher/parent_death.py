"""Replaces itself with another program that gets SIGTERM when the process that started it ends.

    python -IS parent_death.py PARENT_PID PROGRAM [ARGUMENT ...]

Linux only (`PR_SET_PDEATHSIG`); on other systems the program starts without the signal. The request runs in a process
of its own, between fork and exec. A `preexec_fn` in the parent can deadlock if another thread holds a lock at the fork.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
PARENT_GONE, NOT_FOUND = 1, 127  # exit statuses


def main(argv: list[str]) -> int:
    parent, command = int(argv[0]), argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # the parent ended before the signal was requested
            return PARENT_GONE
    try:
        os.execvp(command[0], command)  # noqa: S606 - the program and its arguments come from the launcher
    except OSError as error:
        print(f"error: {command[0]}: {error.strerror}", file=sys.stderr)
    return NOT_FOUND


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
