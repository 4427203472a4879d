"""How a process of the tests ends."""

import atexit
import os
import sys
from contextlib import suppress


def end_without_clearing() -> None:
    """Let this process end after the functions that are registered for its exit from now on.

    The interpreter would clear all modules and objects before, which takes a process of the tests seconds.
    """

    def end() -> None:
        with suppress(OSError, ValueError):  # closed
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(0)

    atexit.register(end)
