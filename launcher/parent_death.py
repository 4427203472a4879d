"""Becomes another program that ends when the process which started it does, however that ends.

    python -IS tether.py PARENT PROGRAM [ARGUMENT ...]

It runs between fork and the program, as a process of its own: code between the two in the parent would hang if another
of its threads held a lock at that moment. Knows Linux's word for it; elsewhere the program just starts.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
GONE, NOT_FOUND = 1, 127


def main(argv: list[str]) -> int:
    parent, command = int(argv[0]), argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it ended before it was asked for
            return GONE
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"error: {command[0]}: {error.strerror}", file=sys.stderr)
    return NOT_FOUND


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
