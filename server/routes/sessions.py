"""Routes that list, end and stop live sessions."""

from typing import Any

import httpx
from fastapi import APIRouter, HTTPException, Request
from fastapi.responses import RedirectResponse, Response

from server.access.identity import identity_of
from server.dispatch.health_values import iso
from server.live.kinds import Kind
from server.live.live_sessions import LiveSession, LiveSessions
from server.pages import RECORDINGS_PAGE
from server.routes.bodies import LiveSessionInfo, LiveSessionList, Problem, SessionsEnded, StopAnswer, StopBody
from server.unknown_page import accepts_page

UNKNOWN: dict[int | str, dict[str, Any]] = {404: {"model": Problem, "description": "there is no such session"}}
TIMEOUT_S = 5.0
BY_ACCEPT = {"Vary": "Accept"}


def session_routes(live: LiveSessions, http: httpx.AsyncClient) -> APIRouter:
    """http: client for the workers."""
    router = APIRouter()

    async def stop(request: Request, path: str, body: StopBody | None, *kinds: Kind) -> StopAnswer:
        identity = identity_of(request)
        session_id = body.session_id if body is not None else None
        if session_id is None:  # a client that does not know its id must not stop the answers of others
            return StopAnswer(success=False, stopped=[], message="session_id: expected an id, got none")
        found = [
            session
            for session in live.find(session_id, *kinds)
            if session.lease is not None and identity.owns(session.identity.owner)
        ]
        if not found:
            return StopAnswer(success=False, stopped=[], message=f"No session {session_id[:100]} has a slot")
        stopped = [session.session_id for session in found if await _stop(http, path, session)]
        message = "Stopped" if stopped else "The worker has no such answer"
        return StopAnswer(success=bool(stopped), stopped=stopped, message=message)

    @router.get("/sessions", response_model=LiveSessionList)
    async def sessions(request: Request, response: Response) -> LiveSessionList | Response:
        if accepts_page(request):
            page = request.url.replace(scheme="", netloc="", path=RECORDINGS_PAGE)
            return RedirectResponse(page, 302, headers={**BY_ACCEPT, "Cache-Control": "no-store"})
        response.headers.update(BY_ACCEPT)
        identity = identity_of(request)
        owned = [_info(session) for session in live.all if identity.owns(session.identity.owner)]
        return LiveSessionList(total=len(owned), sessions=owned)

    @router.delete("/sessions/{session_id}", responses=UNKNOWN)
    async def end(session_id: str, request: Request) -> SessionsEnded:
        n_ended = live.end(session_id, identity_of(request))
        if not n_ended:
            raise HTTPException(404, f"Session not found: {session_id[:100]}")
        return SessionsEnded(ended=n_ended)

    @router.post("/api/streaming/stop")
    async def stop_streaming(request: Request, body: StopBody | None = None) -> StopAnswer:
        return await stop(request, "/streaming/stop", body, Kind.STREAMING, Kind.CHAT)

    @router.post("/api/half_duplex/stop")
    async def stop_half_duplex(request: Request, body: StopBody | None = None) -> StopAnswer:
        return await stop(request, "/half_duplex/stop", body, Kind.HALF_DUPLEX)

    return router


async def _stop(http: httpx.AsyncClient, path: str, session: LiveSession) -> bool:
    """Ask a session's worker to stop its answer. Returns: whether it does."""
    if session.lease is None:  # it ended meanwhile
        return False
    url = f"http://{session.lease.worker.address}{path}"
    try:
        response = await http.post(url, json={"session_id": session.session_id}, timeout=TIMEOUT_S)
        return response.status_code == 200 and response.json().get("success") is True
    except (httpx.HTTPError, ValueError, AttributeError):
        return False


def _info(session: LiveSession) -> LiveSessionInfo:
    lease = session.lease
    return LiveSessionInfo(
        session_id=session.session_id,
        ticket_id=None if session.pending is None else session.pending.ticket.ticket_id,
        kind=str(session.kind),
        worker_id=None if lease is None else lease.worker.name,
        last_active=iso(session.active_at),
    )
