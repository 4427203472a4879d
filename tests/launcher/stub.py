"""Stands in for a worker or the gateway: listens, answers as a file of moods says, and ends as it is told.

    python stub.py NAME PORT FOLDER

FOLDER/NAME.json says what it does, read anew for each answer: `state` of /health, `slots`, `exit` (at once, with that
status), `deaf` (SIGTERM is ignored), `child` (it starts a process of its own). FOLDER/events gets a line `NAME EVENT`
for `start` and `term`.
"""

import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

name, port, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])


def mood() -> dict:
    return json.loads((folder / f"{name}.json").read_text())


def note(event: str) -> None:
    with (folder / "events").open("a") as events:
        events.write(f"{name} {event}\n")


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        said = mood()
        state = said.get("state", "IDLE")
        failed = state == "FAILED"
        bad = (failed and self.path == "/livez") or (state != "IDLE" and self.path == "/readyz")
        body = {
            "state": state,
            "error": "the engine broke" if failed else None,
            "progress": {"what": "weights", "done": 1, "total": 4},
            "slots": {"total": said.get("slots", 2)},
            "device": {"type": "cpu", "name": None},
        }
        data = json.dumps(body).encode()
        self.send_response(503 if bad else 200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


def term(*_: object) -> None:
    note("term")
    if not mood().get("deaf"):
        time.sleep(mood().get("drain", 0))
        note("end")
        os._exit(0)


signal.signal(signal.SIGTERM, term)
note("start")
print("12:00:00 INFO stub | begins", flush=True)
now = mood()
if "exit" in now:
    print("12:00:00 ERROR stub | there is no model", flush=True)
    print("12:00:00 INFO stub | good bye", flush=True)
    sys.exit(now["exit"])
if now.get("child"):
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
HTTPServer.allow_reuse_address = True
HTTPServer(("127.0.0.1", port), Handler).serve_forever()
