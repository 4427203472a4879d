"""Middleware: host check, and for HTTP requests origin check, limit of the body size, and HEAD for every GET route."""

import logging
import re
from collections.abc import Callable

from fastapi import HTTPException
from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.access.identity import identity_of
from server.access.limit import Limit
from server.doors.errors import ApiError, error_response
from server.origins import Origins
from worker.protocol.connection import MAX_MESSAGE, bytes_of
from worker.protocol.held_bytes import ConnectionBytes

LOG = logging.getLogger(__name__)
MAX_BODY_BYTES = 65_536
MAX_VOICE_BODY = 24 * 2**20  # a sound file of 16 MiB in base64
MAX_CONVERSION_BODY = 64 * 2**20  # a sound to convert and that of a voice
MAX_SESSION_BODY = 2**20  # instructions and functions of a session, and the media of a call
MAX_UPLOAD_BODY = 200 * 2**20 + 65_536  # a recording of 200 MiB with its multipart headers
# Routes whose bodies carry media: pattern of the path -> limit in bytes.
LARGE_BODIES: dict[re.Pattern[str], int] = {
    re.compile(r"/api/chat"): MAX_MESSAGE,
    re.compile(r"/v1/chat/completions"): MAX_MESSAGE,
    re.compile(r"/api/assets/ref_audio"): MAX_VOICE_BODY,
    re.compile(r"/v1/audio/speech"): MAX_VOICE_BODY,
    re.compile(r"/v1/audio/conversions"): MAX_CONVERSION_BODY,
    re.compile(r"/v1/realtime/(calls|client_secrets|sessions)"): MAX_SESSION_BODY,
    re.compile(r"/v1/live/sessions"): MAX_SESSION_BODY,
    re.compile(r"/api/sessions/[^/]+/upload-recording"): MAX_UPLOAD_BODY,
}
IS_HEAD = "is_head"  # key in the scope of a GET request that stands for HEAD
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


class RequestGuard:
    """ASGI middleware. The routes of WebSockets check the origin themselves.

    A request with a key may name any host: a page of another site cannot send the key.

    Args:
        app: the application.
        origins: of the pages and hosts that are allowed.
        count: counts that a body was too long.
    """

    def __init__(self, app: ASGIApp, origins: Origins, count: Callable[[Limit], None]):
        self._app, self._origins, self._count = app, origins, count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        connection = HTTPConnection(scope)
        if not identity_of(connection).has_key and not self._origins.allows_host(connection):
            got = connection.headers["host"][:100]
            expected = "localhost, an address, or a name in service.allowed_hosts"
            await error_response(scope["path"], ApiError(403, f"host: expected {expected}, got {got}"))(
                scope, receive, send
            )
            return
        if scope["type"] == "websocket":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        if request.method not in SAFE_METHODS and not self._origins.allows(request):
            got = request.headers["origin"][:100]
            error = ApiError(403, f"origin: expected this server's own pages, got {got}")
            await error_response(request.url.path, error)(scope, receive, send)
            return
        if request.method == "HEAD":  # the route's answer to GET without its body
            scope, send = {**scope, "method": "GET", IS_HEAD: True}, _without_body(send)
        held, limit = bytes_of(request), limit_of(request.url.path)
        body = LimitedBody(receive, limit, None if limit == MAX_UPLOAD_BODY else held, self._count)
        try:
            await self._app(scope, body.receive, send)
        except ClientDisconnect:
            LOG.debug("%s %s: the client has gone within its body", request.method, request.url.path)
        finally:
            body.release()


def is_head(scope: Scope) -> bool:
    """Whether the response's body is not sent, so that a route need not make it."""
    return scope.get(IS_HEAD, False) is True


def _without_body(send: Send) -> Send:
    async def send_head(message: Message) -> None:
        await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

    return send_head


def limit_of(path: str) -> int:
    """Maximum length of a request's body, in bytes."""
    return next((limit for pattern, limit in LARGE_BODIES.items() if pattern.fullmatch(path)), MAX_BODY_BYTES)


class LimitedBody:
    """The body of a request, as it is received.

    Args:
        receive: of ASGI.
        max_bytes: its maximum length.
        held: the connection's bytes, of which the body is a part until `release`; None for a body that is stored
            while it arrives.
        count: called for a body above the limit.
    """

    def __init__(self, receive: Receive, max_bytes: int, held: ConnectionBytes | None, count: Callable[[Limit], None]):
        self._receive, self._max_bytes, self._held, self._count = receive, max_bytes, held, count
        self._n_bytes = 0

    async def receive(self) -> Message:
        """The next message of ASGI. Raises: HTTPException 413 for a body above the limit."""
        message = await self._receive()
        n_bytes = len(message.get("body", b""))
        self._n_bytes += n_bytes
        if self._held is not None:
            self._held.add(n_bytes)
        if self._n_bytes > self._max_bytes:
            self._count(Limit.BODY)
            raise HTTPException(413, f"body: expected at most {self._max_bytes} bytes, got more")
        return message

    def release(self) -> None:
        """Count the body as freed."""
        if self._held is not None:
            self._held.add(-self._n_bytes)
