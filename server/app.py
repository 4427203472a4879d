"""The gateway's routes. Knows FastAPI; every answer comes from the desk or from the room that its route names."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any

from fastapi import FastAPI, Request, Response, WebSocket
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, Field

from server.desk import Desk
from server.duplex import Duplex
from server.metrics import Metrics
from server.origins import Origins
from server.pages import add_pages
from server.status import eta_status, queue_status, service_status, ticket_status, worker_info
from worker.service_config import MAX_S
from worker.version import VERSION

Seconds = Annotated[float, Field(ge=0, le=MAX_S, allow_inf_nan=False)]


class EtaRequest(BaseModel):
    """PUT /api/config/eta: what is not given stays as it is, what is not known is passed over."""

    eta_chat_s: Seconds = 0.0
    eta_half_duplex_s: Seconds = 0.0
    eta_audio_duplex_s: Seconds = 0.0
    eta_omni_duplex_s: Seconds = 0.0
    ema_alpha: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None


@dataclass(frozen=True)
class Gateway:
    """What the routes answer from."""

    desk: Desk
    duplex: Duplex
    metrics: Metrics
    origins: Origins


def build_app(gateway: Gateway) -> FastAPI:
    """All routes of the gateway."""
    app = FastAPI(title="Duologue gateway", version=VERSION)
    desk, duplex, origins = gateway.desk, gateway.duplex, gateway.origins

    @app.middleware("http")
    async def only_own_pages_change(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        if request.method not in ("GET", "HEAD", "OPTIONS") and not origins.admits(request):
            got = request.headers["origin"][:100]
            return JSONResponse({"detail": f"origin: expected this server's own pages, got {got}"}, 403)
        return await call_next(request)

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {"status": "healthy", "timestamp": datetime.now().isoformat()}

    @app.get("/livez")
    async def livez() -> dict[str, Any]:
        return {"alive": True}

    @app.get("/readyz", responses={503: {"description": "no worker is ready, or the gateway is shutting down"}})
    async def readyz() -> Response:
        workers = desk.workers
        ready = workers.n_ready > 0 and not duplex.draining
        body = {
            "ready": ready,
            "free_slots": workers.n_free,
            "total_slots": workers.n_slots,
            "ready_workers": workers.n_ready,
            "total_workers": len(workers.all),
            "queue_length": len(desk.queue),
            "draining": duplex.draining,
        }
        return JSONResponse(body, 200 if ready else 503)

    @app.get("/status")
    async def status() -> dict[str, Any]:
        return service_status(desk, draining=duplex.draining, n_connections=len(duplex.connections))

    @app.get("/workers")
    async def workers() -> dict[str, Any]:
        return {"total": len(desk.workers.all), "workers": [worker_info(worker) for worker in desk.workers.all]}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(gateway.metrics.text(desk), media_type=CONTENT_TYPE_LATEST)

    @app.get("/api/queue")
    async def queue() -> dict[str, Any]:
        return queue_status(desk)

    @app.get("/api/queue/{ticket_id}")
    async def one_ticket(ticket_id: str) -> dict[str, Any]:
        return ticket_status(desk, ticket_id)

    @app.delete("/api/queue/{ticket_id}")
    async def cancel(ticket_id: str) -> dict[str, Any]:
        return {"success": desk.cancel(ticket_id)}

    @app.get("/api/config/eta")
    async def eta() -> dict[str, Any]:
        return eta_status(desk)

    @app.put("/api/config/eta")
    async def adjust_eta(wanted: EtaRequest) -> dict[str, Any]:
        desk.eta.adjust(**wanted.model_dump(exclude_unset=True, exclude_none=True))
        return eta_status(desk)

    @app.websocket("/ws/duplex/{session_id}")
    async def ws_duplex(websocket: WebSocket, session_id: str) -> None:
        if not origins.admits(websocket):
            await websocket.close(1008, "origin not allowed")  # before it is accepted: HTTP 403
            return
        await duplex.serve(websocket, session_id)

    add_pages(app)
    return app
