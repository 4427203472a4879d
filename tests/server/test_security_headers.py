"""Host names that a request may use, and headers of every response."""

import asyncio
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.access.keys import hash_of
from server.app import build_app
from server.origins import Origins
from tests.server.access.keyed_gateway import USER, bearer, user_and_admin
from tests.server.access.test_every_route import status_of_socket
from tests.server.routes.asgi_gateway import gateway_of
from tests.server.test_origins import request_from


@pytest.mark.parametrize(
    ("host", "on_loopback", "remote"),
    [
        (None, True, True),
        ("localhost", True, True),
        ("LOCALHOST:8006", True, True),
        ("127.0.0.1:8006", True, True),
        ("[::1]:8006", True, True),
        ("192.0.2.7:8006", False, True),
        ("[2001:db8::1]", False, True),
        (socket.gethostname(), False, True),
        ("talk.example.org:8443", True, True),
        ("page.example.org", True, True),
        ("evil.example:8006", False, False),
        ("localhost.evil.example", False, False),
        ("127.0.0.1.evil.example", False, False),
        ("[::1", False, False),
        ("", False, False),
    ],
)
def test_allows_names_of_this_server(host: str | None, on_loopback: bool, remote: bool) -> None:
    got = tuple(
        Origins(("https://page.example.org",), ("talk.example.org",), loopback_only=one).allows_host(
            request_from(None, host)
        )
        for one in (True, False)
    )
    assert got == (on_loopback, remote), f"{host}: expected {(on_loopback, remote)}, got {got}"
    assert Origins((), ("*",), loopback_only=True).allows_host(request_from(None, host))


def test_foreign_names_read_nothing(tmp_path: Path) -> None:
    """A page whose name is rebound to this machine gets no answer to GET; a request with a key does."""
    foreign = {"Host": "evil.example:8006"}

    async def scenario() -> None:
        for app, allowed in (
            (build_app(gateway_of(loopback_only=True)), {}),
            (build_app(gateway_of(config=user_and_admin(tmp_path))), bearer(USER)),
        ):
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                for path in ("/status", "/health", "/", "/static/shared/i18n.js", "/openapi.json"):
                    assert (await client.get(path, headers=foreign)).status_code in (401, 403), path
                    assert (await client.get(path, headers=allowed)).status_code == 200, path
                    if allowed:
                        assert (await client.get(path, headers={**foreign, **allowed})).status_code == 200, path
            assert await status_of_socket(app, "/ws/duplex/x", (b"host", b"evil.example")) in (401, 403)

    asyncio.run(scenario())


def test_every_response_has_security_headers(tmp_path: Path) -> None:
    app = build_app(gateway_of(config=user_and_admin(tmp_path)))

    async def headers_of(client: httpx.AsyncClient, path: str, **options: Any) -> httpx.Headers:
        return (await client.get(path, **options)).headers

    async def scenario() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="https://127.0.0.1") as client:
            for path in ("/status", "/docs", "/no/such", "/", "/static/none.js", "/v1/models", "/health", "/metrics"):
                for options in ({}, {"headers": bearer(USER)}):
                    headers = await headers_of(client, path, **options)
                    assert headers["x-content-type-options"] == "nosniff", path
                    assert headers["referrer-policy"] == "no-referrer", path
                    assert "frame-ancestors" in headers["content-security-policy"], path
                    assert headers["strict-transport-security"].startswith("max-age="), path
        for base in ("http://127.0.0.1", "https://localhost"):
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=base) as client:
                assert "strict-transport-security" not in await headers_of(client, "/health"), base

    asyncio.run(scenario())


def test_stored_hash_is_no_key(tmp_path: Path) -> None:
    """The hash of a key, as in the settings, opens nothing."""
    app = build_app(gateway_of(config=user_and_admin(tmp_path)))

    async def scenario() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            for text in (hash_of(USER), hash_of(USER).removeprefix("sha256:")):
                assert (await client.get("/status", headers=bearer(text))).status_code == 401

    asyncio.run(scenario())
