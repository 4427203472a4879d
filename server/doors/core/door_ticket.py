"""A ticket for clients that know no queue: they get a slot within seconds, or a refusal before the handshake."""

from starlette.websockets import WebSocket

from server.dispatch.dispatcher import PendingSession
from server.doors.core.chat_turn import error_of_end
from server.doors.errors import ApiError
from server.live.closes import DRAINING, SessionEnd
from server.live.live_sessions import LiveSession
from server.live.slot_wait import SlotWait

MAX_WAIT_S = 10.0  # for a slot


async def ticket_within_wait(slots: SlotWait, session: LiveSession) -> PendingSession:
    """A ticket of the session for a slot that is expected within `MAX_WAIT_S`.

    Raises: ApiError, with status 503 and `retry-after` if there is none.
    """
    if slots.live.draining:
        raise error_of_end(SessionEnd(DRAINING))
    try:
        pending = slots.submit("audio_duplex", session.session_id, session.identity, session.needs)
    except SessionEnd as end:
        raise error_of_end(end) from None
    try:
        await slots.answered(pending)
    except SessionEnd as end:
        slots.dispatcher.finish(pending)
        raise error_of_end(end) from None
    except BaseException:
        slots.dispatcher.finish(pending)
        raise
    position = slots.dispatcher.position_of(pending)
    if position is not None and (position.wait_s > MAX_WAIT_S or not slots.dispatcher.workers.n_ready):
        slots.dispatcher.finish(pending)
        wait_s = max(1, round(position.wait_s))
        message = f"No free slot: expected one within {MAX_WAIT_S:.0f} s, got {wait_s} s"
        raise ApiError(503, message, headers={"retry-after": str(wait_s)})
    session.pending = pending
    return pending


async def accept_socket(
    websocket: WebSocket, slots: SlotWait, pending: PendingSession | None, subprotocol: str | None = None
) -> None:
    """Complete a handshake; the ticket is given back if the client has gone. Raises: WebSocketDisconnect.

    Args:
        websocket: the connection.
        slots: has given the ticket.
        pending: the ticket; None: the session has none yet.
        subprotocol: of the client's offer; None: none.
    """
    try:
        await websocket.accept(subprotocol=subprotocol)
    except BaseException:
        if pending is not None:
            slots.dispatcher.finish(pending)
        raise
