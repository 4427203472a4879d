"""An id for each request and socket, in the header `x-request-id` of its response."""

import secrets

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "x-request-id"
KEY = "request_id"  # in the scope
STARTS = frozenset({"http.response.start", "websocket.accept", "websocket.http.response.start"})


class RequestIds:
    """ASGI middleware that adds the id to every response."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        scope[KEY] = request_id = f"req_{secrets.token_hex(16)}"

        async def send_with_id(message: Message) -> None:
            if message["type"] in STARTS:
                message.setdefault("headers", [])
                MutableHeaders(scope=message)[HEADER] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


def request_id_of(scope: Scope) -> str:
    """The id of a request; "" for one that the middleware did not see."""
    return str(scope.get(KEY, ""))
