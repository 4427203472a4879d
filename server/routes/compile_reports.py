"""The route for a worker's compile report, which the gateway forwards."""

import httpx
from fastapi import APIRouter, HTTPException
from fastapi.responses import JSONResponse

from server.dispatch.dispatcher import Dispatcher
from server.routes.bodies import Problem

TIMEOUT_S = 5.0
MAX_BYTES = 8 * 2**20


def compile_report_routes(dispatcher: Dispatcher, http: httpx.AsyncClient) -> APIRouter:
    """http: client for the workers."""
    router = APIRouter()

    @router.get(
        "/workers/{worker_id}/compile_report",
        response_class=JSONResponse,
        responses={
            200: {"content": {"application/json": {"schema": {"type": "object"}}}},
            404: {"model": Problem, "description": "there is no such worker, or it makes no reports"},
            502: {"model": Problem, "description": "the worker did not answer with a report"},
            503: {"model": Problem, "description": "the worker has no report yet"},
        },
    )
    async def compile_report(worker_id: str) -> JSONResponse:
        worker = next((one for one in dispatcher.workers.all if one.name == worker_id), None)
        if worker is None:
            raise HTTPException(404, f"Worker not found: {worker_id[:100]}")
        name = f"{worker.name} ({worker.address})"
        try:
            response = await http.get(f"http://{worker.address}/compile_report", timeout=TIMEOUT_S)
        except httpx.HTTPError as error:
            raise HTTPException(502, f"{name}: expected a compile report, got {type(error).__name__}") from None
        if response.status_code in (404, 503):
            raise HTTPException(response.status_code, f"{name}: it has no compile report")
        if response.status_code != 200 or len(response.content) > MAX_BYTES:
            got = f"status {response.status_code} with {len(response.content)} bytes"
            raise HTTPException(502, f"{name}: expected a compile report of at most {MAX_BYTES} bytes, got {got}")
        try:
            report = response.json()
        except ValueError:
            raise HTTPException(502, f"{name}: expected a compile report, got no JSON") from None
        if not isinstance(report, dict):
            raise HTTPException(502, f"{name}: expected a compile report, got JSON of another form")
        return JSONResponse(report)

    return router
