"""Where keys may be: header, subprotocol, cookie, query; what the application and the client see of them."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import websockets
from websockets.exceptions import InvalidStatus

from server.access.access import Access
from server.access.client_secrets import ClientSecrets
from server.access.credentials import CredentialSource, credential_of, without_credential
from server.access.identity import Identity, IdentityKind
from server.access.page_cookie import COOKIE_S, LINK_S, PageCookies, SignInLinks
from server.app import build_app
from tests.server.access.keyed_gateway import ADMIN, USER, bearer, entry, user_and_admin
from tests.server.access.test_every_route import status_of_socket
from tests.server.live_gateway import running_gateway
from tests.server.routes.asgi_gateway import asgi_client, gateway_of


def scope_of(kind: str = "websocket", query: str = "", path: str = "/v1/realtime", **headers: str) -> dict[str, Any]:
    given = [(name.replace("_", "-").encode(), text.encode()) for name, text in headers.items()]
    protocols = [one.strip() for one in headers.get("sec_websocket_protocol", "").split(",") if one.strip()]
    scope = {"type": kind, "path": path, "method": "GET", "headers": given, "query_string": query.encode()}
    return scope | {"subprotocols": protocols, "client": ("192.0.2.1", 1)}


@pytest.mark.parametrize(
    ("scope", "text", "source"),
    [
        (scope_of(authorization=f"Bearer {USER}"), USER, CredentialSource.HEADER),
        (scope_of(authorization=f"bearer  {USER}", cookie="duologue_access=x"), USER, CredentialSource.HEADER),
        (scope_of(sec_websocket_protocol=f"realtime, openai-insecure-api-key.{USER}"), USER, "subprotocol"),
        (scope_of(query="mode=audio&token=ek_abc"), "ek_abc", CredentialSource.QUERY),
        (scope_of(cookie="a=[b]; x; duologue_access=u.1.s; c=d"), "u.1.s", CredentialSource.COOKIE),
        (scope_of(query=f"token={USER}"), None, None),
        (scope_of("http", sec_websocket_protocol=f"openai-insecure-api-key.{USER}"), None, None),
        (scope_of(authorization=f"Basic {USER}"), None, None),
        (scope_of(authorization="Bearer "), None, None),
    ],
)
def test_finds_the_credential(scope: dict[str, Any], text: str | None, source: str | None) -> None:
    found = credential_of(scope)
    assert found == (None if text is None else (text, source)), found


def test_application_sees_no_key() -> None:
    scope = scope_of(
        query=f"model=m&token=ek_{'a' * 30}&x=",
        authorization=f"Bearer {USER}",
        sec_websocket_protocol=f"openai-insecure-api-key.{USER}, realtime",
        host="localhost",
    )
    cleaned = without_credential(scope)
    assert USER not in str(cleaned) and "ek_" not in str(cleaned), cleaned
    assert cleaned["subprotocols"] == ["realtime"] and cleaned["query_string"] == b"model=m&x="
    assert (b"host", b"localhost") in cleaned["headers"]
    assert (b"sec-websocket-protocol", b"realtime") in cleaned["headers"]


def test_subprotocol_key_is_never_echoed(tmp_path: Path) -> None:
    """The server selects `realtime` if it is offered and nothing otherwise."""
    keys = {"data_dir": tmp_path, "api_keys": (entry("user", USER),)}
    key_protocol = f"openai-insecure-api-key.{USER}"

    async def scenario() -> None:
        async with running_gateway(**keys) as gateway:
            url = f"ws://127.0.0.1:{gateway.port}/ws/duplex/omni_x"
            for offered, selected in (
                (["realtime", key_protocol, "openai-beta.realtime-v1"], "realtime"),
                ([key_protocol, "realtime"], "realtime"),
            ):
                async with websockets.connect(url, subprotocols=offered, proxy=None) as socket:
                    assert socket.subprotocol == selected
                    assert socket.response is not None and USER not in str(socket.response.headers)
            async with websockets.connect(url, subprotocols=[key_protocol], proxy=None) as socket:
                assert socket.subprotocol is None and USER not in str(socket.response)
            with pytest.raises(InvalidStatus) as refused:
                await websockets.connect(url, subprotocols=["realtime", f"{key_protocol}x"], proxy=None)
            assert refused.value.response.status_code == 401
            assert USER not in str(refused.value.response.headers) + str(refused.value.response.body)

    asyncio.run(scenario())


def test_secrets_open_realtime_sockets_until_they_expire(tmp_path: Path) -> None:
    gateway = gateway_of(config=user_and_admin(tmp_path))
    now = 1_000_000.0
    object.__setattr__(gateway.access, "secrets", ClientSecrets(lambda: now))
    app = build_app(gateway)

    async def status(value: str, path: str = "/v1/realtime/none") -> int:
        return await status_of_socket(app, path, (b"authorization", f"Bearer {value}".encode()))

    async def scenario() -> None:
        nonlocal now
        async with asgi_client(app) as client:
            body = {"expires_after": {"anchor": "created_at", "seconds": 60}, "session": {"instructions": "Be brief."}}
            answer = await client.raw.post("/v1/realtime/client_secrets", json=body, headers=bearer(USER))
            assert answer.status_code == 200, answer.text
            made = answer.json()
            assert made["value"].startswith("ek_") and made["expires_at"] == now + 60
            assert made["session"]["instructions"] == "Be brief." and made["session"]["id"].startswith("sess_")
            assert answer.headers["cache-control"] == "no-store"
            secret = made["value"]
            assert await status(secret) == 404 and await status(secret) == 404, "expected any number of uses"
            assert await status(secret, "/ws/duplex/x") == 401, "expected secrets on realtime paths only"
            for path in ("/status", "/v1/models", "/api/access/keys"):
                assert (await client.raw.get(path, headers=bearer(secret))).status_code == 401, path
            found = gateway.access.secrets.find(secret, gateway.access.keys, "192.0.2.1")
            assert found is not None and found.kind is IdentityKind.SECRET and found.owner == "key:user"
            assert found.session == {"instructions": "Be brief."} and not found.is_admin
            for path in ("/v1/realtime/client_secrets", "/v1/realtime/sessions"):
                refused = await client.raw.post(path, json={}, headers=bearer(secret))
                assert refused.status_code == 403, "expected a secret to make no secret that outlives it"
            now += 61
            assert await status(secret) == 401, "expected an expired secret to be refused"
            legacy = await client.raw.post("/v1/realtime/sessions", json={}, headers=bearer(USER))
            assert legacy.json()["client_secret"]["value"].startswith("ek_")
            for seconds in (9, 7201):
                body = {"expires_after": {"seconds": seconds}}
                bad = await client.raw.post("/v1/realtime/client_secrets", json=body, headers=bearer(USER))
                assert bad.status_code == 400 and bad.json()["error"]["param"].endswith("seconds"), bad.text
            unknown = {"session": {"model": "unknown"}}
            bad = await client.raw.post("/v1/realtime/client_secrets", json=unknown, headers=bearer(USER))
            assert bad.status_code == 404 and bad.json()["error"]["code"] == "model_not_found"

    asyncio.run(scenario())


def test_secret_ends_with_its_key(tmp_path: Path) -> None:
    access = Access.of(user_and_admin(tmp_path), lambda _: None)
    key = access.keys.named("user")
    assert key is not None
    secret = access.secrets.make(key.identity(""), access.keys, 600, {})
    others = Access.of(user_and_admin(tmp_path / "other").model_copy(), lambda _: None)
    assert access.secrets.find(secret.value, others.keys, "") is not None
    removed = Access.of(user_and_admin(tmp_path), lambda _: None).keys
    object.__setattr__(removed, "_keys", ())
    assert access.secrets.find(secret.value, removed, "") is None


def test_cookies_end_with_time_and_key(tmp_path: Path) -> None:
    now = 1000.0
    keys = Access.of(user_and_admin(tmp_path), lambda _: None).keys
    cookies = PageCookies(tmp_path / "page_secret", lambda: now)
    user = keys.named("user")
    assert user is not None
    cookie = cookies.make(user)
    again = PageCookies(tmp_path / "page_secret", lambda: now)
    assert again.find(cookie, keys) == user, "expected cookies to survive a restart"
    assert (tmp_path / "page_secret").stat().st_mode & 0o777 == 0o600 and USER not in cookie
    name, ends_at, signature = cookie.split(".")
    for forged in (
        f"boss.{ends_at}.{signature}",
        f"{name}.9{ends_at}.{signature}",
        f"{name}.{ends_at}.",
        "",
        "..",
        "é.1.x",
    ):
        assert cookies.find(forged, keys) is None, forged
    assert PageCookies(tmp_path / "another", lambda: now).find(cookie, keys) is None
    now += COOKIE_S + 1
    assert cookies.find(cookie, keys) is None


@pytest.mark.parametrize("before", [None, b"damaged"])
def test_gateways_that_start_together_have_one_secret(
    before: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second gateway makes its first cookie while the first one makes the secret."""
    keys = Access.of(user_and_admin(tmp_path), lambda _: None).keys
    user, path = keys.named("user"), tmp_path / "shared" / "page_secret"
    assert user is not None
    if before is not None:
        path.parent.mkdir()
        path.write_bytes(before)
    first, second = PageCookies(path), PageCookies(path)
    cookies, write = [], Path.write_bytes

    def write_late(file: Path, content: bytes) -> int:
        monkeypatch.undo()
        cookies.append(second.make(user))
        return write(file, content)

    monkeypatch.setattr(Path, "write_bytes", write_late)
    cookies.append(first.make(user))
    found = [one.find(cookie, keys) for one in (first, second, PageCookies(path)) for cookie in cookies]
    assert found == [user] * 6, f"expected each cookie to be valid at each gateway, got {found}"
    assert [one.name for one in path.parent.iterdir()] == [path.name], "expected no other file"
    assert path.stat().st_mode & 0o777 == 0o600


def test_links_sign_in_once() -> None:
    now = 0.0
    links = SignInLinks(lambda: now)
    token, late = links.make("user"), links.make("user")
    assert links.take(token) == "user" and links.take(token) is None and links.take("link_x") is None
    now = LINK_S + 1
    assert links.take(late) is None


def test_signing_in_sets_a_strict_cookie(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with asgi_client(gateway_of(config=user_and_admin(tmp_path))) as client:
            assert (await client.raw.post("/api/access", json={"key": "duo_" + "x" * 43})).status_code == 401
            link = (await client.raw.post("/api/access/link", headers=bearer(ADMIN))).json()["token"]
            for key, name in ((USER, "user"), (link, "boss")):
                answer = await client.raw.post("/api/access", json={"key": key})
                assert answer.json()["key"]["name"] == name
                cookie = answer.headers["set-cookie"]
                assert "HttpOnly" in cookie and "SameSite=strict" in cookie and key not in cookie, cookie
                assert (await client.get("/api/access"))["key"]["name"] == name, "expected the cookie to be sent"
                assert (await client.raw.get("/omni")).status_code == 200
            assert (await client.raw.post("/api/access", json={"key": link})).status_code == 401
            crossing = {"Origin": "https://evil.example"}
            assert (await client.raw.delete("/api/access", headers=crossing)).status_code == 403

    asyncio.run(scenario())


def test_tickets_and_sessions_belong_to_their_key(tmp_path: Path) -> None:
    gateway = gateway_of(config=user_and_admin(tmp_path))
    other = Identity("other", IdentityKind.KEY)

    async def scenario() -> None:
        ticket = gateway.slots.submit("chat", "chat_1", other).ticket
        async with asgi_client(gateway) as client:
            path = f"/api/queue/{ticket.ticket_id}"

            async def ask(method: str, key: str, path: str) -> Any:
                return (await client.raw.request(method, path, headers=bearer(key))).json()

            assert (await ask("GET", USER, "/api/queue"))["items"] == []
            assert not (await ask("GET", USER, path))["found"]
            assert (await ask("DELETE", USER, path)) == {"success": False}
            assert len((await ask("GET", ADMIN, "/api/queue"))["items"]) == 1
            assert (await ask("DELETE", ADMIN, path)) == {"success": True}

    asyncio.run(scenario())


def test_recordings_belong_to_their_key(tmp_path: Path) -> None:
    gateway = gateway_of(config=user_and_admin(tmp_path))
    recordings = gateway.recordings
    object.__setattr__(recordings, "is_enabled", True)

    async def scenario() -> None:
        recordings.open()
        ids = {}
        for owner in ("key:user", "key:other", None):
            recording = recordings.start("chat", f"chat_{len(ids)}", owner=owner)
            assert recording is not None
            ids[owner] = recording.recording_id
            recording.from_client("{}")
            recording.end()
        await asyncio.to_thread(recordings.close)
        async with asgi_client(gateway) as client:
            listed = (await client.raw.get("/api/sessions", headers=bearer(USER))).json()
            assert [one["session_id"] for one in listed["sessions"]] == [ids["key:user"]] and listed["total"] == 1
            assert (await client.raw.get("/api/sessions", headers=bearer(ADMIN))).json()["total"] == 3
            for owner in ("key:other", None):
                path = f"/api/sessions/{ids[owner]}"
                assert (await client.raw.delete(path, headers=bearer(USER))).status_code == 404
                comment = await client.raw.post(f"{path}/comment", json={"comment": "x"}, headers=bearer(USER))
                assert comment.status_code == 404
            path = f"/api/sessions/{ids['key:user']}"
            assert (await client.raw.delete(path, headers=bearer(USER))).status_code == 200
            path = f"/api/sessions/{ids['key:other']}"
            assert (await client.raw.delete(path, headers=bearer(ADMIN))).status_code == 200

    asyncio.run(scenario())
