"""A stub of a worker or the gateway: listens on a port, with behaviour set by a JSON file.

    python stub_program.py NAME PORT FOLDER

FOLDER/NAME.json is read again for each request. Its keys: `state` of /health; number of `slots`; `exit`: exit at once
with this status; `ignores_sigterm`; `drain`: seconds from SIGTERM to the exit; `child`: start a child process;
`memory`: bytes that the process `pid` holds.
FOLDER/events gets a line `NAME EVENT` for `start`, `term` and `end`.
"""

import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

held: list[bytes] = []
name, port, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])


def behavior() -> dict:
    return json.loads((folder / f"{name}.json").read_text())


def record(event: str) -> None:
    with (folder / "events").open("a") as events:
        events.write(f"{name} {event}\n")


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        current = behavior()
        if current.get("pid") == os.getpid():
            held.append(b"x" * (current["memory"] - sum(map(len, held))))
        state = current.get("state", "IDLE")
        failed = state == "FAILED"
        bad = (failed and self.path == "/livez") or (state != "IDLE" and self.path == "/readyz")
        body = {
            "state": state,
            "error": "the engine broke" if failed else None,
            "progress": {"what": "weights", "done": 1, "total": 4},
            "slots": {"total": current.get("slots", 2)},
            "device": {"type": "cpu", "name": None},
        }
        data = json.dumps(body).encode()
        self.send_response(503 if bad else 200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


def on_sigterm(*_: object) -> None:
    record("term")
    if not behavior().get("ignores_sigterm"):
        time.sleep(behavior().get("drain", 0))
        record("end")
        os._exit(0)


signal.signal(signal.SIGTERM, on_sigterm)
signal.signal(signal.SIGINT, on_sigterm)
record("start")
print("12:00:00 INFO stub | begins", flush=True)
at_start = behavior()
if "exit" in at_start:
    print("12:00:00 ERROR stub | there is no model", flush=True)
    print("12:00:00 INFO stub | shutdown", flush=True)
    sys.exit(at_start["exit"])
if at_start.get("child"):
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
HTTPServer.allow_reuse_address = True
HTTPServer(("127.0.0.1", port), Handler).serve_forever()
