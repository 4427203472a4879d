"""The gateway's application: every route, in front of them what all requests keep to. Knows FastAPI.

The routes themselves are in `*_routes` and `pages`; every answer comes from the desk or from the room a route names.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

from fastapi import FastAPI, Request, Response, WebSocket
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from server.dispatch.dispatcher import Dispatcher
from server.live.duplex import GatewaySockets, request_type_of
from server.metrics import GatewayMetrics
from server.origins import Origins
from server.pages import add_pages
from server.registry.apps import Apps
from server.registry.presets import NO_PRESETS, Presets
from server.request_guard import HARMLESS, RequestGuard
from server.routes.apps import app_routes
from server.routes.bodies import FrontendDefaults, Problem
from server.routes.presets import preset_routes
from server.routes.queue import queue_routes
from server.routes.status import status_routes
from worker.protocol.session_id import session_id_of
from worker.version import VERSION

REFUSED = {
    400: {"model": Problem, "description": "the body cannot be read"},
    403: {"model": Problem, "description": "asked by a page from elsewhere"},
    413: {"model": Problem, "description": "the body is too long"},
}


@dataclass(frozen=True)
class Gateway:
    """What the routes answer from. default_voice: of sessions that bring none."""

    dispatcher: Dispatcher
    duplex: GatewaySockets
    metrics: GatewayMetrics
    origins: Origins
    frontend: FrontendDefaults
    default_voice: Path | None = None
    presets: Presets = NO_PRESETS
    apps: Apps = field(default_factory=Apps)


def build_app(gateway: Gateway) -> FastAPI:
    """All routes of the gateway."""
    app = FastAPI(title="Duologue gateway", version=VERSION)
    app.add_middleware(RequestGuard, origins=gateway.origins)
    app.add_exception_handler(RequestValidationError, _misfit)
    app.add_exception_handler(Exception, _fault)
    apps, duplex, origins = gateway.apps, gateway.duplex, gateway.origins
    for router in (
        status_routes(gateway.dispatcher, duplex, gateway.metrics),
        queue_routes(gateway.dispatcher),
        app_routes(apps),
        preset_routes(gateway.presets, gateway.default_voice, gateway.frontend),
    ):
        for route in router.routes:
            if not route.methods <= HARMLESS:
                route.responses.update(REFUSED)
        app.include_router(router)

    @app.websocket("/ws/duplex/{session_id}")
    async def ws_duplex(websocket: WebSocket, session_id: str) -> None:
        name = session_id_of(session_id)
        if not origins.admits(websocket):
            await websocket.close(1008, "origin not allowed")  # before it is accepted: HTTP 403
        elif not apps.takes(request_type_of(name)):
            await websocket.close(1008, "app disabled")
        else:
            await duplex.serve(websocket, name)

    add_pages(app, apps)
    return app


async def _misfit(_: Request, error: RequestValidationError) -> Response:
    """What was sent is not repeated: it may be long, or nothing that JSON can say."""
    told = [{"type": one["type"], "loc": one["loc"], "msg": one["msg"]} for one in error.errors()]
    return Response(json.dumps({"detail": told}), 422, media_type="application/json")


async def _fault(_: Request, __: Exception) -> Response:
    """The server logs what it was."""
    return JSONResponse({"detail": "Internal server error"}, 500)
