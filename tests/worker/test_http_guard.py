"""The worker's check of pages and of the launcher's secret, on HTTP and WebSockets."""

import asyncio
from typing import Any

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send

from worker.config.service import load_config
from worker.http.app import build_app
from worker.http.guard import OPEN_PATHS, WorkerGuard
from worker.http.metrics import WorkerMetrics
from worker.http.socket import WorkerSockets
from worker.key_text import WORKER_SECRET_HEADER
from worker.service import Service
from worker.serving import worker_settings
from worker.status import State

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


@pytest.mark.parametrize(
    ("secret", "sent", "host", "expected"),
    [
        (None, None, "127.0.0.1", 202),
        (None, None, "::ffff:127.0.0.1", 202),
        (None, None, "10.0.0.5", 403),
        ("right", None, "127.0.0.1", 403),
        ("right", "wrong", "10.0.0.5", 403),
        ("right", "right", "10.0.0.5", 202),
    ],
)
def test_a_gateway_on_another_host_drains_with_the_secret(
    secret: str | None, sent: str | None, host: str, expected: int
) -> None:
    config, _ = load_config(None, flags={"model.device": "cpu"}, environ={})
    service, metrics = Service(worker_settings(config, secret=secret)), WorkerMetrics()
    app = WorkerGuard(build_app(service, metrics, WorkerSockets(service, metrics)), secret)

    async def drain() -> httpx.Response:
        transport = httpx.ASGITransport(app, client=(host, 40_000))
        async with httpx.AsyncClient(transport=transport, base_url="http://worker") as client:
            return await client.post("/drain", headers={} if sent is None else {WORKER_SECRET_HEADER: sent})

    response = asyncio.run(drain())
    assert response.status_code == expected, f"expected {expected}, got {response.status_code}: {response.text}"
    is_draining = service.status.state is State.DRAINING
    assert is_draining == (expected == 202), f"got {service.status.state}"
