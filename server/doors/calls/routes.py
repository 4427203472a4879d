"""The routes of calls over WebRTC, and the choice of sockets that follow one."""

from typing import Any

from fastapi import APIRouter, Request, Response, WebSocket

from server.access.identity import identity_of
from server.doors.calls.door import CallDoor
from server.doors.calls.live_door import GptLiveCallDoor
from server.doors.errors import ApiErrorBody
from server.live.inbox import ClientDisconnected

SDP = "application/sdp"
CALLS_PATH = "/v1/realtime/calls"
LIVE_PATH = "/v1/live/sessions"
LIVE_OFFER: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "properties": {"session": {"type": "object"}, "transport": {"type": "object"}},
                    "required": ["session", "transport"],
                }
            }
        },
    }
}
OFFER: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            SDP: {"schema": {"type": "string"}},
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "properties": {"sdp": {"type": "string"}, "session": {"type": "string"}},
                    "required": ["sdp"],
                }
            },
        },
    }
}
ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": ApiErrorBody, "description": "the offer or the settings are invalid"},
    404: {"model": ApiErrorBody, "description": "the model is unknown, or calls are switched off"},
    501: {"model": ApiErrorBody, "description": "the server has no WebRTC"},
    503: {"model": ApiErrorBody, "description": "no slot is free, or no process takes another call"},
}
CLIENT_GONE = 499  # status of a response that is never sent
UNKNOWN: dict[int | str, dict[str, Any]] = {404: {"model": ApiErrorBody, "description": "there is no such call"}}


def call_routes(door: CallDoor) -> APIRouter:
    """Routes that begin and end calls of the Realtime API."""
    router = APIRouter()

    @router.post(CALLS_PATH, status_code=201, response_class=Response, responses=ERRORS, openapi_extra=OFFER)
    async def begin(request: Request) -> Response:
        try:
            call_id, answer = await door.begin(request)
        except ClientDisconnected:
            return Response(status_code=CLIENT_GONE)
        return Response(answer, 201, {"Location": f"{CALLS_PATH}/{call_id}"}, SDP)

    @router.post(f"{CALLS_PATH}/{{call_id}}/hangup", response_class=Response, responses=UNKNOWN)
    async def hang_up(call_id: str, request: Request) -> Response:
        door.hang_up(call_id, identity_of(request))
        return Response()

    return router


def live_call_routes(door: GptLiveCallDoor) -> APIRouter:
    """Routes that begin and end GPT-Live sessions over WebRTC."""
    router = APIRouter()

    @router.post(LIVE_PATH, status_code=201, response_model=dict[str, Any], responses=ERRORS, openapi_extra=LIVE_OFFER)
    async def begin(request: Request) -> dict[str, Any] | Response:
        try:
            return await door.begin(request)
        except ClientDisconnected:
            return Response(status_code=CLIENT_GONE)

    @router.post(f"{LIVE_PATH}/{{session_id}}/hangup", response_class=Response, responses=UNKNOWN)
    async def hang_up(session_id: str, request: Request) -> Response:
        door.hang_up(session_id, identity_of(request))
        return Response()

    return router


class CallSockets:
    """The sockets that follow calls, as a dialect of the path of Realtime sessions."""

    def __init__(self, door: CallDoor):
        self._door = door

    async def serve(self, websocket: WebSocket) -> None:
        """Serve one connection, from the handshake to the close."""
        await self._door.follow(websocket)
