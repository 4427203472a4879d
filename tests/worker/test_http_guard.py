"""The worker's check of pages and of the launcher's secret, on HTTP and WebSockets."""

import asyncio
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from worker.http.guard import OPEN_PATHS, WorkerGuard
from worker.key_text import WORKER_SECRET_HEADER

PASSED = 200


async def application(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "passed", "status": PASSED})


def status_of(secret: str | None, kind: str, path: str, **headers: str) -> int:
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": f"{kind}.connect"}

    async def send(message: Message) -> None:
        sent.append(message)

    given = [(name.replace("_", "-").encode(), text.encode()) for name, text in headers.items()]
    scope: dict[str, Any] = {"type": kind, "path": path, "headers": given, "query_string": b"", "method": "GET"}
    asyncio.run(WorkerGuard(application, secret)(scope, receive, send))
    return int(sent[0]["status"])


@pytest.mark.parametrize(
    "path", ["/ws/duplex", "/ws/half_duplex", "/ws/chat", "/ws/streaming", "/ws/speech", "/ws/conversion"]
)
def test_refuses_sockets_of_pages(path: str) -> None:
    for origin in ("http://localhost:22400", "https://evil.example", "null", ""):
        assert status_of(None, "websocket", path, origin=origin) == 403, origin
    assert status_of(None, "websocket", path) == PASSED


@pytest.mark.parametrize("kind", ["http", "websocket"])
def test_accepts_only_the_secret_of_its_launcher(kind: str) -> None:
    name = WORKER_SECRET_HEADER.replace("-", "_")
    for path in ("/ws/duplex", "/chat", "/model/unload", "/openapi.json"):
        assert status_of("right", kind, path, **{name: "right"}) == PASSED
        for wrong in ("", "wrong", "right2", "RIGHT"):
            assert status_of("right", kind, path, **{name: wrong}) == 403, (path, wrong)
        assert status_of("right", kind, path) == 403
        assert status_of(None, kind, path) == PASSED


def test_health_needs_no_secret() -> None:
    for path in OPEN_PATHS:
        assert status_of("right", "http", path) == PASSED
        assert status_of("right", "websocket", path) == 403
