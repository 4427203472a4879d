"""The guard of requests: clients that leave."""

import asyncio
import logging
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from server.access.identity import SCOPE_KEY, Identity, IdentityKind
from server.origins import Origins
from server.request_guard import RequestGuard


def test_clients_that_leave_within_a_body_are_no_error(caplog: pytest.LogCaptureFixture) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        raise ClientDisconnect

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def send(_: Any) -> None:
        raise AssertionError("expected no answer")

    headers = [(b"host", b"localhost")]
    scope: dict[str, Any] = {
        "type": "http",
        "method": "POST",
        "path": "/api/chat",
        "query_string": b"",
        "headers": headers,
    }
    scope[SCOPE_KEY] = Identity(IdentityKind.OPEN)
    asyncio.run(
        RequestGuard(app, Origins(()), print)({**scope, "server": ("localhost", 80), "scheme": "http"}, receive, send)
    )
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
