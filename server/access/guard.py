"""The one check of keys and limits, for HTTP requests and WebSockets alike: pure ASGI around the whole application."""

from starlette.types import ASGIApp, Receive, Scope, Send

from server.access.identity import SCOPE_KEY, Identity, address_of


class AccessGuard:
    """ASGI middleware that leaves an `Identity` in the scope of every request and WebSocket."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            scope[SCOPE_KEY] = Identity(address=address_of(scope))
        await self._app(scope, receive, send)
