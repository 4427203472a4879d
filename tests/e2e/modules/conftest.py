"""An empty page that imports the modules."""

import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page


class _Files(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def page(browser: Browser, root: Path) -> Iterator[Page]:
    """An empty page on the origin of the modules, which need no gateway."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Files, directory=root / "server")) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page = browser.new_page()
        page.goto(f"http://127.0.0.1:{server.server_port}/static/icon.svg")
        yield page
        server.shutdown()
