"""With keys, every route of the schema, every page, static file and WebSocket refuses a request without a key.

The routes come from the application itself, so that a new one cannot be forgotten.
"""

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, routing
from starlette.routing import Mount, Route, WebSocketRoute
from starlette.types import Message

from server.access.access import PUBLIC
from server.app import build_app
from server.serving import build_routes
from tests.server.access.keyed_gateway import ADMIN, USER, bearer, user_and_admin
from tests.server.routes.asgi_gateway import asgi_client, gateway_of

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")
NO_SOCKETS = ("/no/such/socket", "/x")  # paths of the route that refuses all others
NOT_ADMIN = re.compile(r"/api/admin|/api/config|/compile_report|/api/access/keys")


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> FastAPI:
    return build_app(gateway_of(config=user_and_admin(tmp_path_factory.mktemp("data"))))


def paths_of(app: FastAPI) -> Iterator[tuple[str, str]]:
    """Method and path of every route: those of the schema, and those that it leaves out."""
    for path, operations in app.openapi()["paths"].items():
        for method in operations:
            yield method.upper(), _filled(path)
    for route in app.routes:
        if isinstance(route, Route):
            yield from ((method, _filled(route.path)) for method in sorted(route.methods or ()))
        elif isinstance(route, Mount):
            yield from ((method, f"{route.path}/live/live.html") for method in METHODS)
    for path in ("/", "/no/such/path", "/v1/no/such/path", "/docs", "/openapi.json"):
        yield from ((method, path) for method in METHODS)


def _filled(path: str) -> str:
    return re.sub(r"\{[^}]+\}", "x", path)


async def status_of_socket(app: FastAPI, path: str, *headers: tuple[bytes, bytes]) -> int:
    """HTTP status of a handshake; 101 if it is accepted."""
    sent: list[Message] = []
    messages = iter([{"type": "websocket.connect"}])

    async def receive() -> Message:
        return next(messages, {"type": "websocket.disconnect", "code": 1005})

    async def send(message: Message) -> None:
        sent.append(message)

    scope: dict[str, Any] = {"type": "websocket", "path": path, "root_path": "", "query_string": b"", "scheme": "ws"}
    scope |= {"headers": list(headers), "subprotocols": [], "client": ("127.0.0.1", 1), "state": {}}
    scope["extensions"] = {"websocket.http.response": {}}
    await app(scope, receive, send)
    return sent[0]["status"] if sent[0]["type"] == "websocket.http.response.start" else 101


def test_all_http_routes_need_a_key(app: FastAPI) -> None:
    """Also with a wrong key, a wrong cookie, and a key in the query."""
    given: list[dict[str, Any]] = [
        {},
        {"headers": bearer("duo_" + "x" * 43)},
        {"headers": {"Authorization": f"Basic {USER}"}},
        {"headers": {"Cookie": f"duologue_access={USER}"}},
        {"headers": {"Cookie": "duologue_access=user.9999999999.00"}},
        {"params": {"token": USER, "api_key": USER, "key": USER}},
    ]

    async def scenario() -> None:
        n_refused = 0
        async with asgi_client(app) as client:
            for method, path in sorted(set(paths_of(app))):
                for options in given[:1] if method not in ("GET", "POST") else given:
                    response = await client.raw.request(method, path, **options)
                    if (method, path) in PUBLIC:
                        assert response.status_code in (200, 422, 503), f"{method} {path}: {response.status_code}"
                        continue
                    assert response.status_code == 401, f"{method} {path} {options}: got {response.status_code}"
                    assert response.headers["www-authenticate"] == "Bearer"
                    assert USER not in response.text
                    n_refused += 1
        assert n_refused > 200, f"expected many routes, got {n_refused} refusals"

    asyncio.run(scenario())


def sockets_of(app: FastAPI) -> list[str]:
    """Paths of all WebSockets, those of included routers as well."""
    waiting, paths = list[Any](app.routes), set(NO_SOCKETS)
    while waiting:
        route = waiting.pop()
        waiting += getattr(getattr(route, "original_router", route), "routes", None) or []
        if isinstance(route, WebSocketRoute):
            paths.add(_filled(route.path))
    assert {"/ws/duplex/x", "/ws/half_duplex/x", "/ws/chat", "/v1/realtime", "/v1/duplex"} <= paths, paths
    return sorted(paths)


def test_all_sockets_refuse_pages_of_other_sites() -> None:
    """Without keys, where a page that the user visits could otherwise talk to the server of this machine."""
    app = build_app(gateway_of())
    own = (b"host", b"localhost:8006")
    foreign = [
        [own, (b"origin", b"https://other.example")],
        [own, (b"origin", b"null")],
        [(b"host", b"other.example"), (b"origin", b"http://other.example")],
    ]

    async def scenario() -> None:
        for path in sockets_of(app):
            for headers in foreign:
                status = await status_of_socket(app, path, *headers)
                expected = (403, 404) if path in NO_SOCKETS else (403,)
                assert status in expected, f"{path} {headers}: expected {expected}, got {status}"
        assert await status_of_socket(app, "/no/such/socket", own) == 404

    asyncio.run(scenario())


def test_all_sockets_need_a_key(app: FastAPI) -> None:
    async def scenario() -> None:
        for path in sockets_of(app):
            assert await status_of_socket(app, path) == 401, path
            wrong = (b"authorization", b"Bearer duo_" + b"x" * 43)
            assert await status_of_socket(app, path, wrong) == 401, path
        right = (b"authorization", f"Bearer {USER}".encode())
        assert await status_of_socket(app, "/no/such/socket", right) == 404

    asyncio.run(scenario())


def test_routes_are_built_before_the_first_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with keys: the first client does not wait until FastAPI has prepared its routes."""
    app = build_app(gateway_of(config=user_and_admin(tmp_path)))
    prepare, prepared = routing.get_dependant, list[Any]()

    def counting(**options: Any) -> Any:
        prepared.append(options)
        return prepare(**options)

    monkeypatch.setattr(routing, "get_dependant", counting)

    async def scenario() -> int:
        await build_routes(app)
        n = len(prepared)
        right = (b"authorization", f"Bearer {USER}".encode())
        assert await status_of_socket(app, "/no/such/socket", right) == 404
        async with asgi_client(app) as client:
            await client.raw.get("/status", headers=bearer(USER))
        return n

    n = asyncio.run(scenario())
    assert n > 50 and len(prepared) == n, f"expected all {n} at the start, got {len(prepared)}"


def test_errors_have_the_form_of_the_path(app: FastAPI) -> None:
    async def scenario() -> None:
        async with asgi_client(app) as client:
            detail = await client.get("/status", 401)
            assert detail == {"detail": "key: expected a valid API key, got none"}
            error = (await client.get("/v1/models", 401))["error"]
            assert error["type"] == "authentication_error" and error["code"] == "invalid_api_key", error
            page = await client.raw.get("/omni", headers={"Accept": "text/html"})
            assert page.status_code == 401 and "Sign in" in page.text
            assert "script-src 'sha256-" in page.headers["content-security-policy"]

    asyncio.run(scenario())


def test_a_key_opens_everything_but_what_concerns_everyone(app: FastAPI) -> None:
    async def scenario() -> None:
        async with asgi_client(app) as client:
            for method, path in sorted({(method, path) for method, path in paths_of(app) if method == "GET"}):
                user, admin = [(await client.raw.get(path, headers=bearer(key))).status_code for key in (USER, ADMIN)]
                assert (user == 403) == bool(NOT_ADMIN.search(path)), f"{method} {path}: got {user}"
                assert admin not in (401, 403), f"{method} {path}: got {admin}"
            changes = [
                ("PUT", "/api/admin/apps/omni", {"enabled": True}),
                ("PUT", "/api/config/eta", {"eta_chat_s": 15.0}),
                ("POST", "/api/assets/ref_audio", {"name": "x", "audio_base64": "AAAA"}),
                ("DELETE", "/api/assets/ref_audio/x", None),
            ]
            for method, path, body in changes:
                response = await client.raw.request(method, path, json=body, headers=bearer(USER))
                assert response.status_code == 403, f"{method} {path}: got {response.status_code}"
                assert "the key user" in response.json()["detail"]

    asyncio.run(scenario())


def test_remote_clients_without_keys_change_nothing(tmp_path: Path) -> None:
    """Without keys, an address of another machine may talk, and may not switch apps or estimates."""
    app = build_app(gateway_of())

    async def remote(scope: Any, receive: Any, send: Any) -> None:
        await app({**scope, "client": ("192.0.2.7", 5)}, receive, send)

    async def scenario() -> None:
        async with asgi_client(remote) as client:  # type: ignore[arg-type]  # a plain ASGI application
            await client.request("PUT", "/api/admin/apps/omni", 403, json={"enabled": False})
            await client.request("PUT", "/api/config/eta", 403, json={"eta_chat_s": 1.0})
            assert (await client.get("/api/access")) == {"requires_key": False, "is_admin": False, "key": None}
            await client.get("/status")
        async with asgi_client(app) as client:
            assert (await client.get("/api/access"))["is_admin"]

    asyncio.run(scenario())
