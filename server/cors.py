"""Middleware that lets pages of allowed origins call the routes which browsers use with an ephemeral secret.

It runs before the check of keys, since a browser asks for permission without one.
"""

import re

from starlette.datastructures import MutableHeaders
from starlette.requests import HTTPConnection
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.origins import Origins

PATHS = re.compile(r"/v1/realtime/(calls(/[^/]+/hangup)?|client_secrets)|/v1/live/sessions(/[^/]+/hangup)?")
ALLOWED = {
    "Access-Control-Allow-Methods": "POST",
    "Access-Control-Max-Age": "600",
    "Vary": "Access-Control-Request-Headers",
}
# Names of headers, each of which is allowed: clients have their own, such as `x-stainless-lang`.
NAMES = re.compile(r"[a-z0-9-]{1,60}( *, *[a-z0-9-]{1,60}){0,40}", re.IGNORECASE)
USUAL_NAMES = "authorization, content-type"
EXPOSED = "location, retry-after, x-request-id"


class ApiCors:
    """ASGI middleware. origins: those that may call; other pages get no permission from their browser."""

    def __init__(self, app: ASGIApp, origins: Origins):
        self._app, self._origins = app, origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not PATHS.fullmatch(scope["path"]):
            await self._app(scope, receive, send)
            return
        connection = HTTPConnection(scope)
        origin = connection.headers.get("origin")
        is_allowed = origin is not None and self._origins.allows(connection)

        async def send_with_permission(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.add_vary_header("Origin")
                if is_allowed and origin is not None:
                    headers["Access-Control-Allow-Origin"] = origin
                    headers["Access-Control-Expose-Headers"] = EXPOSED
            await send(message)

        asks = scope["method"] == "OPTIONS" and "access-control-request-method" in connection.headers
        if asks:
            names = connection.headers.get("access-control-request-headers", "")
            allowed = {**ALLOWED, "Access-Control-Allow-Headers": names if NAMES.fullmatch(names) else USUAL_NAMES}
            answer = Response(status_code=204, headers=allowed) if is_allowed else Response(status_code=403)
            await answer(scope, receive, send_with_permission)
            return
        await self._app(scope, receive, send_with_permission)
