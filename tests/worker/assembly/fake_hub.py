"""A Hugging Face hub on this machine: a cache in its layout on disk, and an HTTP server with one model."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import urlsplit

import pytest

NAME = "someone/tiny-omni"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def use_cache(folder: Path, monkeypatch: pytest.MonkeyPatch, *, offline: bool = True) -> Path:
    """Make `folder` the hub's cache in this process, which has read its environment already, without a token."""
    for name, value in {"HF_HUB_CACHE": str(folder), "HF_HUB_OFFLINE": offline, "HF_TOKEN_PATH": "/dev/null"}.items():
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    return folder


def fill_cache(cache: Path, folder: Path) -> Path:
    """Put a checkpoint folder into a hub cache as a download would. Returns: its snapshot folder."""
    model = cache / f"models--{NAME.replace('/', '--')}"
    snapshot = model / "snapshots" / COMMIT
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text(COMMIT)
    (model / "blobs").mkdir()
    for number, file in enumerate(sorted(path for path in folder.rglob("*") if path.is_file())):
        blob, link = model / "blobs" / f"{number:040x}", snapshot / file.relative_to(folder)
        blob.write_bytes(file.read_bytes())
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(blob)
    return snapshot


@contextmanager
def hub(files: dict[str, bytes]) -> Iterator[tuple[str, list[str]]]:
    """Serve one model. Gives: the hub's address, and the paths whose content was requested so far."""
    requested: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def _answer(self, *, with_body: bool) -> None:
            path = urlsplit(self.path).path
            headers, status = {"X-Repo-Commit": COMMIT}, 200
            if path == f"/api/models/{NAME}/revision/main" or path == f"/api/models/{NAME}":
                body = json.dumps({"id": NAME, "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]})
                data = body.encode()
            elif path == f"/api/models/{NAME}/tree/{COMMIT}":
                tree = [
                    {"type": "file", "path": name, "size": len(content), "oid": f"{number:040x}"}
                    for number, (name, content) in enumerate(files.items())
                ]
                data = json.dumps(tree).encode()
            elif (name := path.removeprefix(f"/{NAME}/resolve/{COMMIT}/")) in files:
                data = files[name]
                headers["ETag"] = f'"{list(files).index(name):040x}"'
                requested.extend([name] if with_body else [])
            else:
                data, status = b"{}", 404
                headers["X-Error-Code"] = "RepoNotFound"
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(data))}.items():
                self.send_header(key, value)
            self.end_headers()
            if with_body:
                self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", requested
    finally:
        server.shutdown()
        server.server_close()
