"""The door of calls over WebRTC: offers, the running calls, and the sockets that follow one."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import FormData, UploadFile
from starlette.requests import Request
from starlette.websockets import WebSocket

from server.access.clients import Clients
from server.access.identity import Identity, identity_of
from server.access.shares import run_shared
from server.doors.calls.call import WebRtcCall
from server.doors.calls.processes import PeerProcesses
from server.doors.calls.running_calls import CallSetup, RunningCalls
from server.doors.core.door_needs import needs_asked
from server.doors.core.event_writer import EventWriter
from server.doors.errors import ApiError, invalid, missing
from server.doors.live.client_channel import WebSocketChannel
from server.doors.live.door_context import DoorContext
from server.doors.live.ends import FRAME_TOO_BIG, MAX_FRAME, SessionOverError
from server.doors.realtime.initial_config import initial_config
from server.doors.realtime.session_config import RealtimeConfig
from server.doors.realtime.socket import SUBPROTOCOL, RealtimeConnection
from server.live.kinds import Kind
from server.live.live_sessions import LiveSession
from worker.protocol.wire import WireError, read_object

MAX_SDP = 256 * 2**10  # characters
Json = dict[str, Any]


@dataclass(frozen=True)
class CallOffer:
    """What a client sends to begin a call. session: settings of its session."""

    sdp: str
    session: Json


class CallDoor:
    """All calls of a gateway.

    Args:
        context: the gateway's parts.
        processes: hold the connections of the calls.
        clients: limits of the events that a client sends.
    """

    def __init__(self, context: DoorContext, processes: PeerProcesses, clients: Clients):
        self._context = context
        self._calls = RunningCalls(context, processes, clients, "call_id")

    async def begin(self, request: Request) -> tuple[str, str]:
        """Begin the call that a request offers. Returns: its id, and the answer.

        Raises: ApiError; ClientDisconnected if the client has gone before the answer.
        """
        self._calls.check(request)
        identity, offer = identity_of(request), await _offer_of(request)
        config = self._config(request, identity, offer.session)
        await run_shared(self._context.voices.resolve, config.voice)  # raises now, not in the session
        needs = needs_asked(request)
        live = LiveSession(f"adx_rtc_{time.time_ns():x}", Kind.DUPLEX, identity, needs=needs)

        async def set_up(call: WebRtcCall) -> CallSetup:
            connection = RealtimeConnection(call, self._context, live, config, call)
            return CallSetup(call.id, connection, connection.serve, connection.drop)

        return await self._calls.begin(request, live, offer.sdp, set_up)

    def hang_up(self, call_id: str, identity: Identity) -> None:
        """End a call. Raises: ApiError for one that the identity does not own."""
        self._calls.find(call_id, identity).hang_up()

    async def follow(self, websocket: WebSocket) -> None:
        """Serve a socket that sees the events of a call and sends events to its session."""
        try:
            call = self._calls.find(websocket.query_params["call_id"], identity_of(websocket))
            refusal = self._context.admission.refusal(websocket, "audio_duplex")
            if refusal is not None:
                raise ApiError(403, refusal)
        except ApiError as error:
            await websocket.send_denial_response(error.response())
            return
        offered = websocket.scope.get("subprotocols", [])
        await websocket.accept(subprotocol=SUBPROTOCOL if SUBPROTOCOL in offered else None)
        channel = WebSocketChannel(websocket)
        writer = EventWriter(channel)
        call.follow(writer)
        reading = asyncio.create_task(_read(channel, call), name="follow-read")
        others = (writer.run(), channel.wait_gone(), asyncio.shield(call.ended))
        tasks = [reading, *(asyncio.ensure_future(one) for one in others)]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            call.unfollow(writer)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if call.ended.done():
            await writer.close(*call.ended.result())
        elif not reading.cancelled() and isinstance(reading.exception(), SessionOverError):
            await writer.close(FRAME_TOO_BIG.code, FRAME_TOO_BIG.reason)

    def _config(self, request: Request, identity: Identity, given: Mapping[str, Any]) -> RealtimeConfig:
        """The settings of the call's session. Raises: ApiError."""
        session = {**(identity.session or {}), **given}
        model = request.query_params.get("model") or session.get("model") or self._context.model_names.served
        return initial_config(self._context.model_names, identity, {**session, "model": model})


async def _read(channel: WebSocketChannel, call: WebRtcCall) -> None:
    """Pass the events of a socket to the call. Raises: SessionOverError for a frame above the limit."""
    while True:
        message = await channel.receive()
        if message["type"] == "websocket.disconnect":
            return
        if len(message.get("text") or "") > MAX_FRAME:
            raise SessionOverError(FRAME_TOO_BIG)
        await call.put(message)


async def _offer_of(request: Request) -> CallOffer:
    """The offer in a request's body: a form with `sdp` and `session`, or the SDP alone. Raises: ApiError."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "application/sdp":
        try:
            return _checked((await request.body()).decode(), {})
        except UnicodeDecodeError:
            raise invalid("sdp", expected="text in UTF-8", got="other bytes") from None
    if kind == "multipart/form-data":
        async with request.form(max_files=2, max_fields=8) as form:
            return _checked(await _text(form, "sdp"), _session_of(await _text(form, "session")))
    expected = "multipart/form-data or application/sdp"
    raise ApiError(400, f"content-type: expected {expected}, got {kind[:60] or 'none'}", param="content-type")


async def _text(form: FormData, name: str) -> str:
    """A part of a form; "" if it is missing. Raises: ApiError."""
    part = form.get(name)
    if part is None:
        return ""
    if not isinstance(part, UploadFile):
        return part
    try:
        return (await part.read()).decode()
    except UnicodeDecodeError:
        raise invalid(name, expected="text in UTF-8", got="other bytes") from None


def _checked(sdp: str, session: Json) -> CallOffer:
    if not sdp.strip():
        raise missing("sdp")
    if len(sdp) > MAX_SDP:
        raise invalid("sdp", expected=f"at most {MAX_SDP} characters", got=len(sdp))
    return CallOffer(sdp, session)


def _session_of(text: str) -> Json:
    if not text.strip():
        return {}
    try:
        return dict(read_object(text))
    except WireError:
        raise invalid("session", expected="a JSON object", got="other text") from None
