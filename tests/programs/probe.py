"""`python -m tests.programs.probe STATUS`: prints what a program finds when it starts, and ends with this status."""

import json
import os
import signal
import sys
import threading

if __name__ == "__main__":
    names = [number for number in signal.valid_signals() if number not in (signal.SIGKILL, signal.SIGSTOP)]
    found = {
        "argv": sys.argv,
        "path": sys.path[0],
        "folder": os.getcwd(),
        "environ": dict(os.environ),
        "files": sorted(os.listdir("/proc/self/fd")),
        "stdin": os.readlink("/proc/self/fd/0"),
        "group": os.getpgrp(),
        "session": os.getsid(0),
        "signals": {int(number): str(signal.getsignal(number)) for number in names},
        "threads": [thread.name for thread in threading.enumerate()],
        "flags": list(sys.flags),
        "buffered": sys.stdout.line_buffering,
        "spec": __spec__.name if __spec__ else None,
    }
    print(json.dumps(found), flush=True)
    print("to stderr", file=sys.stderr)
    if sys.argv[1] == "wait":
        signal.pause()
    sys.exit(int(sys.argv[1]))
