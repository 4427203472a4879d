"""A chat in a slot that no session needs. A session that waits for a slot ends it."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

from server.access.identity import Identity
from server.access.shares import run_shared
from server.doors.core.chat_turn import DoorTurn, TurnPath, error_of_end
from server.doors.errors import ApiError
from server.live.closes import DRAINING, RECLAIMED, SessionEnd
from server.live.kinds import Kind, new_session_id
from server.live.live_sessions import LiveSession
from server.live.slot_wait import SlotWait
from server.live.worker_link import WorkerLostError, WorkerRefusedError, close_link
from worker.protocol.wire import json_text

MAX_WAIT_S = 30.0  # for a spare slot


class SpareTurn(DoorTurn):
    """One turn. Made by `spare_turn`.

    Attributes:
        has_slot: whether it has had its slot.
        is_reclaimed: a session needs the slot; another turn may take its place later.

    Args:
        slots: lend slots, and have the list of sessions.
        session: its entry in the list of sessions.
        make_fields: makes the fields of `ChatRequest`; called on a thread once there is a slot.
    """

    def __init__(self, slots: SlotWait, session: LiveSession, make_fields: Callable[[], Mapping[str, object]]):
        super().__init__(slots, session, TurnPath.CHAT, "")
        self._make_fields = make_fields
        self.has_slot = self.is_reclaimed = False

    async def _run(self) -> None:
        slots, session = self._slots, self._session
        dispatcher = slots.dispatcher
        owner = session.identity.owner
        spare = dispatcher.borrow("transcription", session.session_id, owner, self._on_reclaim)
        try:
            try:
                async with asyncio.timeout(MAX_WAIT_S):
                    await spare.granted.wait()
            except TimeoutError:
                raise _no_slot(f"slot: expected a free one within {MAX_WAIT_S:.0f} s, got none") from None
            lease = spare.lease
            assert lease is not None, "expected a lease of a slot that is granted"
            self.has_slot = True
            self._request = await run_shared(lambda: json_text(self._make_fields()))
            try:
                link = await self._connect(lease)
            except (WorkerRefusedError, WorkerLostError) as error:
                raise _no_slot(str(error)) from None
            begun = time.monotonic()
            try:
                if not await self._converse(lease, link):
                    raise _no_slot(f"{lease.worker.name}: expected a free slot, got none")
            finally:
                slots.metrics.record_session_end(lease.request_type, time.monotonic() - begun)
                await close_link(link, graceful=not lease.worker.lost.is_set())
        finally:
            dispatcher.give_back(spare)

    def _on_reclaim(self) -> None:
        self.is_reclaimed = True
        self._session.end(RECLAIMED)


def _no_slot(message: str) -> ApiError:
    return ApiError(503, message, code="no_free_slot")


@asynccontextmanager
async def spare_turn(
    slots: SlotWait, identity: Identity, make_fields: Callable[[], Mapping[str, object]]
) -> AsyncIterator[SpareTurn]:
    """A turn, which ends with the context.

    Args:
        slots: lend slots, and have the list of sessions.
        identity: whose work it is.
        make_fields: as in `SpareTurn`.
    Raises: ApiError 503 if the server is shutting down.
    """
    if slots.live.draining:
        raise error_of_end(SessionEnd(DRAINING))
    session = LiveSession(new_session_id(Kind.CHAT), Kind.CHAT, identity)
    turn = SpareTurn(slots, session, make_fields)
    slots.live.add(session)
    try:
        turn.start()
        yield turn
    finally:
        try:
            await turn.close()
        finally:  # also if it is cancelled meanwhile
            slots.live.remove(session)
