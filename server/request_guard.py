"""What holds for every HTTP request, whatever its route: who may change things, how long a body may be, HEAD.

Knows headers and bytes. Does not know what is asked for.
"""

from fastapi import HTTPException
from fastapi.responses import JSONResponse
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.origins import Origins

MAX_BYTES = 65_536  # of a request's body; settings and switches are short
HARMLESS = frozenset({"GET", "HEAD", "OPTIONS"})


class RequestGuard:
    """In front of everything. HEAD is answered wherever GET is. WebSockets pass: their route looks for itself."""

    def __init__(self, app: ASGIApp, origins: Origins):
        self._app, self._origins = app, origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        if request.method not in HARMLESS and not self._origins.admits(request):
            got = request.headers["origin"][:100]
            refusal = JSONResponse({"detail": f"origin: expected this server's own pages, got {got}"}, 403)
            await refusal(scope, receive, send)
            return
        if request.method == "HEAD":  # the route's answer to GET without its body
            scope, send = {**scope, "method": "GET"}, _headed(send)
        await self._app(scope, _bounded(receive), send)


def _headed(send: Send) -> Send:
    async def send_head(message: Message) -> None:
        await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

    return send_head


def _bounded(receive: Receive) -> Receive:
    n_bytes = 0

    async def receive_some() -> Message:
        nonlocal n_bytes
        message = await receive()
        n_bytes += len(message.get("body", b""))
        if n_bytes > MAX_BYTES:
            raise HTTPException(413, f"body: expected at most {MAX_BYTES} bytes, got more")
        return message

    return receive_some
