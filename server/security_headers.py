"""ASGI middleware that adds security headers to every HTTP response that does not set them itself."""

from starlette.datastructures import MutableHeaders
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

ALWAYS = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
# For data and for pages without scripts. Browsers show a media file in a document of its own, which this would break.
POLICY = "default-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
POLICY_TYPES = ("application/json", "text/html", "text/plain")
YEAR_S = 31_536_000


class SecurityHeaders:
    """Adds the headers of `ALWAYS`, a content security policy, and HSTS under TLS.

    HSTS is left out for localhost, where other servers of the machine may use plain HTTP. Browsers ignore it for
    addresses and after a certificate error.
    """

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        is_strict = scope.get("scheme") in ("https", "wss") and _host_of(scope) != "localhost"

        async def send_with_headers(message: Message) -> None:
            if message["type"] in ("http.response.start", "websocket.http.response.start"):
                headers = MutableHeaders(scope=message)
                for name, value in ALWAYS.items():
                    headers.setdefault(name, value)
                if headers.get("content-type", "").startswith(POLICY_TYPES):
                    headers.setdefault("Content-Security-Policy", POLICY)
                if is_strict:
                    headers.setdefault("Strict-Transport-Security", f"max-age={YEAR_S}")
            await send(message)

        await self._app(scope, receive, send_with_headers)


def _host_of(scope: Scope) -> str:
    return HTTPConnection(scope).headers.get("host", "").partition(":")[0].lower()
