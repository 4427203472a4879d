"""ASGI middleware of a worker: refuses WebSockets of web pages, and programs without the launcher's secret."""

import hmac

from starlette.requests import HTTPConnection
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from worker.key_text import WORKER_SECRET_HEADER

# What needs no secret: the state of the process, for launchers, orchestrators and Prometheus.
OPEN_PATHS = frozenset({"/health", "/livez", "/readyz", "/metrics"})


class WorkerGuard:
    """The check of every request and WebSocket.

    Args:
        app: the worker's application.
        secret: what the launcher gave to gateway and workers; None: none is needed.
    """

    def __init__(self, app: ASGIApp, secret: str | None):
        self._app, self._secret = app, secret

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] in ("http", "websocket") else None
        if refusal is None:
            await self._app(scope, receive, send)
        else:
            await JSONResponse({"detail": refusal}, 403)(scope, receive, send)

    def _refusal(self, scope: Scope) -> str | None:
        """Why the request is refused; None if it is admitted."""
        headers = HTTPConnection(scope).headers
        if scope["type"] == "websocket" and (origin := headers.get("origin")) is not None:
            return f"expected a connection of a program, got one of a page ({origin[:100]})"
        if self._secret is None or (scope["type"] == "http" and scope["path"] in OPEN_PATHS):
            return None
        given = headers.get(WORKER_SECRET_HEADER, "")
        if hmac.compare_digest(given.encode("utf-8", "replace"), self._secret.encode()):
            return None
        got = "another" if given else "none"
        return f"{WORKER_SECRET_HEADER}: expected the secret of this worker's launcher, got {got}"
