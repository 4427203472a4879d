"""A ticket for clients that know no queue: they get a slot within seconds, or a refusal before the handshake."""

import asyncio
from contextlib import suppress

from starlette.websockets import WebSocket

from server.dispatch.dispatcher import Dispatcher, PendingSession, QueuePosition
from server.doors.core.chat_turn import error_of_end
from server.doors.errors import ApiError
from server.live.closes import DRAINING, SessionEnd
from server.live.live_sessions import LiveSession
from server.live.slot_wait import SlotWait

MAX_WAIT_S = 10.0  # for a slot
# An estimate counts the slot of a session that has just ended as taken until its worker has closed the connection.
SETTLE_S = 3.0


async def ticket_within_wait(slots: SlotWait, session: LiveSession) -> PendingSession:
    """A ticket of the session for a slot that is expected within `MAX_WAIT_S`.

    Raises: ApiError, with status 503 and `retry-after` if there is none after `SETTLE_S`, or no worker is ready.
    """
    if slots.live.draining:
        raise error_of_end(SessionEnd(DRAINING))
    try:
        pending = slots.submit("audio_duplex", session.session_id, session.identity, session.needs)
    except SessionEnd as end:
        raise error_of_end(end) from None
    try:
        await slots.answered(pending)
        position = await _settled_position(slots.dispatcher, pending)
        if slots.live.draining:
            raise SessionEnd(DRAINING)
    except SessionEnd as end:
        slots.dispatcher.finish(pending)
        raise error_of_end(end) from None
    except BaseException:
        slots.dispatcher.finish(pending)
        raise
    if position is not None and _is_too_late(position, slots.dispatcher):
        slots.dispatcher.finish(pending)
        wait_s = max(1, round(position.wait_s))
        message = f"No free slot: expected one within {MAX_WAIT_S:.0f} s, got {wait_s} s"
        raise ApiError(503, message, headers={"retry-after": str(wait_s)})
    session.pending = pending
    return pending


def _is_too_late(position: QueuePosition, dispatcher: Dispatcher) -> bool:
    return position.wait_s > MAX_WAIT_S or not dispatcher.workers.n_ready


async def _settled_position(dispatcher: Dispatcher, pending: PendingSession) -> QueuePosition | None:
    """Wait up to `SETTLE_S` for a slot, or an estimate that is short enough.

    Returns: the position then; None if the ticket does not wait any more.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(SETTLE_S):
            while (position := dispatcher.position_of(pending)) is not None and dispatcher.workers.n_ready:
                if not _is_too_late(position, dispatcher):
                    break
                pending.changed.clear()
                await pending.changed.wait()
    return dispatcher.position_of(pending)


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
