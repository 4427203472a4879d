"""Routes for the state of the gateway and its workers. The response bodies are built in `status_report`."""

import asyncio
from datetime import datetime
from pathlib import Path

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST

from server.access.identity import IdentityKind, identity_of
from server.dispatch.dispatcher import Dispatcher
from server.live.live_sessions import LiveSessions
from server.metrics import GatewayMetrics
from server.routes.bodies import Alive, CacheStatus, Health, Ready, ServiceStatus, WorkerList
from server.routes.status_report import cache_status, readiness, service_status, worker_list
from worker.worker_report import read_reports


def status_routes(dispatcher: Dispatcher, live: LiveSessions, metrics: GatewayMetrics, log_folder: Path) -> APIRouter:
    """The routes. log_folder: has the reports of the launcher about its workers."""
    router = APIRouter()

    @router.get("/health")
    async def health(request: Request) -> Health:
        workers = (await asyncio.to_thread(read_reports, log_folder)).workers
        if identity_of(request).kind is IdentityKind.ANONYMOUS:
            workers = {name: report.model_copy(update={"reason": ""}) for name, report in workers.items()}
        return Health(timestamp=datetime.now().isoformat(), workers=workers)

    @router.get("/livez")
    async def livez() -> Alive:
        return Alive()

    @router.get("/readyz", response_model=Ready, responses={503: {"model": Ready, "description": "not ready"}})
    async def readyz() -> Response:
        body = readiness(dispatcher, draining=live.draining)
        return JSONResponse(body.model_dump(), 200 if body.ready else 503)

    @router.get("/status")
    async def status(request: Request) -> ServiceStatus:
        return service_status(dispatcher, identity_of(request), draining=live.draining, n_connections=len(live))

    @router.get("/workers")
    async def workers(request: Request) -> WorkerList:
        return worker_list(dispatcher, identity_of(request))

    @router.get("/api/cache")
    @router.get("/cache")
    async def cache() -> CacheStatus:
        return cache_status(dispatcher)

    @router.get("/metrics", response_class=PlainTextResponse)
    async def all_metrics() -> Response:
        return Response(metrics.render(dispatcher), media_type=CONTENT_TYPE_LATEST)

    return router
