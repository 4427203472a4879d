"""The door of GPT-Live sessions over WebRTC: offers, and the running calls."""

import secrets
from typing import Any

import numpy as np
from pydantic import ValidationError
from starlette.requests import Request

from server.access.clients import Clients
from server.access.identity import Identity, identity_of
from server.doors.calls.call import WebRtcCall
from server.doors.calls.door import MAX_SDP
from server.doors.calls.processes import PeerProcesses
from server.doors.calls.running_calls import CallSetup, RunningCalls
from server.doors.core.door_needs import needs_asked
from server.doors.core.request_fields import RequestFields
from server.doors.errors import ApiError, invalid
from server.doors.gpt_live.client_events import SessionStart, refusal_of
from server.doors.gpt_live.socket import GptLiveConnection
from server.doors.live.door_context import DoorContext
from server.doors.live.event_error import EventError
from server.live.kinds import Kind
from server.live.live_sessions import LiveSession


class _SoundSession:
    """The session of a call that has sound and events, but no responses and no pictures. session: always None."""

    session = None

    def __init__(self, connection: GptLiveConnection):
        self._connection = connection

    def hear(self, samples: np.ndarray) -> None:
        """Add sound of the client's track, [n] float32 at 16 kHz."""
        self._connection.hear(samples)


class GptLiveCallDoor:
    """All GPT-Live sessions over WebRTC.

    Args:
        context: the gateway's parts.
        processes: hold the connections of the calls.
        clients: limits of the events that a client sends.
    """

    def __init__(self, context: DoorContext, processes: PeerProcesses, clients: Clients):
        self._context = context
        self._calls = RunningCalls(context, processes, clients, "session_id")

    async def begin(self, request: Request) -> dict[str, Any]:
        """Begin the session that a request offers. Returns: the body of the response.

        Raises: ApiError; ClientDisconnected if the client has gone before the answer.
        """
        self._calls.check(request)
        start, sdp = _offer_of(RequestFields.of_body(await request.body()))
        needs, identity = needs_asked(request), identity_of(request)
        live = LiveSession(f"adx_live_{secrets.token_hex(8)}", Kind.DUPLEX, identity, needs=needs)

        async def set_up(call: WebRtcCall) -> CallSetup:
            connection = GptLiveConnection(call, self._context, live, call)
            try:
                await connection.start(start)
            except EventError:
                connection.drop()
                raise
            return CallSetup(connection.session_id, _SoundSession(connection), connection.serve, connection.drop)

        try:
            session_id, answer = await self._calls.begin(request, live, sdp, set_up)
        except EventError as error:
            raise ApiError(400, error.message, param=error.param, code=error.code) from None
        return {"session": {"id": session_id}, "transport": {"type": "webrtc", "sdp": answer}}

    def hang_up(self, session_id: str, identity: Identity) -> None:
        """End a call. Raises: ApiError for one that the identity does not own."""
        self._calls.find(session_id, identity).hang_up()


def _offer_of(given: RequestFields) -> tuple[SessionStart, str]:
    """The session's settings and the SDP in a body. Raises: ApiError."""
    transport = given.group("transport")
    if transport is None:
        raise invalid("transport", expected="an object", got="none")
    transport.choice("type", ("webrtc",))
    sdp = transport.text("sdp")
    if not 0 < len(sdp) <= MAX_SDP:
        raise invalid("transport.sdp", expected=f"1 to {MAX_SDP} characters", got=len(sdp))
    event = {"type": "session.start", "session": given.required("session")}
    try:
        return SessionStart.model_validate(event), sdp
    except ValidationError as error:
        refused = refusal_of(error, event)
        raise ApiError(400, refused.message, param=refused.param, code=refused.code) from None
