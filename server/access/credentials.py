"""Where a request carries its key, and the request without it, so that nothing behind the guard sees or logs a key."""

from enum import StrEnum
from http.cookies import CookieError, SimpleCookie
from typing import NamedTuple
from urllib.parse import parse_qsl, urlencode

from starlette.requests import HTTPConnection
from starlette.types import Scope

from worker.key_text import SECRET_PREFIX

KEY_PROTOCOL = "openai-insecure-api-key."  # WebSocket subprotocol of browsers, which cannot set headers
REALTIME_PROTOCOL = "realtime"
COOKIE = "duologue_access"
TOKEN_PARAMETER = b"token="
_PROTOCOL_HEADER, _AUTHORIZATION = b"sec-websocket-protocol", b"authorization"


class CredentialSource(StrEnum):
    """The part of a request that carries a key."""

    HEADER = "header"
    SUBPROTOCOL = "subprotocol"
    QUERY = "query"
    COOKIE = "cookie"


class Credential(NamedTuple):
    """A key, a secret or the value of the pages' cookie, as the request carries it."""

    text: str
    source: CredentialSource


def credential_of(scope: Scope) -> Credential | None:
    """The credential of a request: of its header, else its subprotocol, its query, its cookie. None without one.

    The query is for ephemeral secrets only; anything else in it is ignored.
    """
    headers = HTTPConnection(scope).headers
    kind, _, text = headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer" and text.strip():
        return Credential(text.strip(), CredentialSource.HEADER)
    for protocol in _offered(scope):
        if protocol.startswith(KEY_PROTOCOL):
            return Credential(protocol.removeprefix(KEY_PROTOCOL), CredentialSource.SUBPROTOCOL)
    if TOKEN_PARAMETER in scope["query_string"]:
        query = dict(parse_qsl(scope["query_string"].decode("latin-1")))
        if query.get("token", "").startswith(SECRET_PREFIX):
            return Credential(query["token"], CredentialSource.QUERY)
    if COOKIE in (given := headers.get("cookie", "")):
        for part in given.split(";"):  # one by one: an invalid cookie of another program must not hide this one
            try:
                found = SimpleCookie(part.strip()).get(COOKIE)
            except CookieError:
                continue
            if found is not None:
                return Credential(found.value, CredentialSource.COOKIE)
    return None


def without_credential(scope: Scope) -> Scope:
    """The scope without the authorization header, the subprotocols with keys and the query's token."""
    headers = [(name, value) for name, value in scope["headers"] if name not in (_AUTHORIZATION, _PROTOCOL_HEADER)]
    cleaned: Scope = {**scope, "headers": headers}
    if scope["type"] == "websocket":
        kept = [one for one in _offered(scope) if not one.startswith(KEY_PROTOCOL)]
        cleaned["subprotocols"] = kept
        if kept:
            headers.append((_PROTOCOL_HEADER, ", ".join(kept).encode("latin-1")))
    if TOKEN_PARAMETER in scope["query_string"]:
        pairs = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        cleaned["query_string"] = urlencode([pair for pair in pairs if pair[0] != "token"]).encode()
    return cleaned


def offers_realtime(scope: Scope) -> bool:
    """Whether a WebSocket's client offers the subprotocol `realtime`, which the server then selects."""
    return REALTIME_PROTOCOL in _offered(scope)


def _offered(scope: Scope) -> list[str]:
    """The subprotocols of a WebSocket's client."""
    return list(scope.get("subprotocols") or ()) if scope["type"] == "websocket" else []
