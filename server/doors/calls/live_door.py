"""The door of GPT-Live sessions over WebRTC: offers, and the running calls."""

import asyncio
import logging
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
from server.doors.core.door_ticket import ticket_within_wait
from server.doors.core.request_fields import RequestFields
from server.doors.errors import ApiError, invalid
from server.doors.gpt_live.client_events import SessionStart, refusal_of
from server.doors.gpt_live.socket import GptLiveConnection
from server.doors.live.door_context import DoorContext
from server.doors.live.event_error import EventError
from server.live.kinds import Kind
from server.live.live_sessions import LiveSession

LOG = logging.getLogger(__name__)


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
        self._context, self._processes, self._clients = context, processes, clients
        self._calls: dict[str, WebRtcCall] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def begin(self, request: Request) -> dict[str, Any]:
        """Begin the session that a request offers. Returns: the body of the response. Raises: ApiError."""
        self._processes.check()
        context, identity = self._context, identity_of(request)
        refusal = context.admission.refusal(request, "audio_duplex")
        if refusal is not None:
            raise ApiError(403, refusal)
        start, sdp = _offer_of(RequestFields.of_body(await request.body()))
        live = LiveSession(f"adx_live_{secrets.token_hex(8)}", Kind.DUPLEX, identity)
        call = WebRtcCall(identity, self._processes.choose(), lambda receive: self._clients.paced(receive, identity))
        connection, pending = GptLiveConnection(call, context, live, call), None
        try:
            await connection.start(start)
            pending = ticket_within_wait(context.slots, live)
            answer = await call.open(sdp)
        except BaseException as error:
            await call.close(1000, "")
            if pending is not None:
                context.slots.dispatcher.finish(pending)
            if isinstance(error, EventError):
                raise ApiError(400, error.message, param=error.param, code=error.code) from None
            raise
        session_id = connection.session_id
        call.attach(_SoundSession(connection))
        self._calls[session_id] = call
        context.slots.metrics.record_call(1)
        task = asyncio.create_task(connection.serve(pending), name="live-call")
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._end(session_id, done))
        return {"session": {"id": session_id}, "transport": {"type": "webrtc", "sdp": answer}}

    def hang_up(self, session_id: str, identity: Identity) -> None:
        """End a call. Raises: ApiError for one that the identity does not own."""
        call = self._calls.get(session_id)
        if call is None or not identity.owns(call.identity.owner):
            text = f"session_id: expected a call that is running, got {session_id[:60]}"
            raise ApiError(404, text, param="session_id")
        call.hang_up()

    def _end(self, session_id: str, task: "asyncio.Task[None]") -> None:
        del self._calls[session_id]
        self._context.slots.metrics.record_call(-1)
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            LOG.error("session %s failed", session_id, exc_info=error)


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
