"""A duplex session whose worker is lost: another worker's slot, the context rebuilt there, and the input since then."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from models.errors import ModelError
from server.dispatch.dispatcher import PendingSession
from server.dispatch.workers import WorkerLease
from server.live.client_end import ClientEnd
from server.live.relay import fragments
from server.live.session_journal import ANSWERS, ERROR, SessionJournal
from server.live.slot_wait import SlotWait
from server.live.worker_link import WorkerLostError, close_link
from worker.protocol.codec import peek_header
from worker.protocol.codes import ErrorCode
from worker.protocol.gateway_messages import SessionMoved
from worker.protocol.messages import Error, write

LOG = logging.getLogger(__name__)
WAIT_S = 30.0  # for a slot
REBUILD_S = 30.0
MAX_TRIES = 3
DROPPED = "The message is dropped: two workers were lost while its answer was the next one"

Connect = Callable[[WorkerLease], Awaitable[ClientConnection]]


class RebuildError(ModelError, RuntimeError):
    """A worker does not rebuild the context."""


async def move_session(
    slots: SlotWait, pending: PendingSession, connect: Connect, end: ClientEnd, journal: SessionJournal
) -> tuple[WorkerLease, ClientConnection]:
    """Continue a session with another worker.

    Args:
        slots: gives the slot.
        pending: the session's ticket, which has the lost worker's slot.
        connect: connects to a worker. Raises: WorkerRefusedError; WorkerLostError.
        end: gets the error of a message that is dropped.
        journal: what rebuilds the context.
    Raises: WorkerLostError without a slot or a context; SessionEnd.
    """
    begun = time.monotonic()
    if journal.lose_worker():
        slots.metrics.record_quarantine()
        await end.send(write(Error(error=DROPPED, code=ErrorCode.QUARANTINED)))
    for n_tries in range(1, MAX_TRIES + 1):
        slots.dispatcher.requeue(pending, was_used=n_tries == 1)
        try:
            async with asyncio.timeout(WAIT_S):
                lease, link = await slots.open(pending, connect, None, is_move=True)
        except TimeoutError:
            break
        try:
            async with asyncio.timeout(REBUILD_S):
                await _rebuild(link, journal)
                for data in journal.unanswered:
                    await link.send(fragments(data))
        except (ConnectionClosed, TimeoutError, RebuildError) as error:
            LOG.warning("session %s: attempt %d to move: %r", pending.ticket.session_id, n_tries, error)
            await close_link(link, graceful=False)
            continue
        except BaseException:
            await close_link(link, graceful=False)
            raise
        seconds = time.monotonic() - begun
        slots.dispatcher.workers.record_pause(lease, journal.is_paused)
        slots.metrics.record_move("moved", seconds)
        LOG.info("session %s goes on with %s", pending.ticket.session_id, lease.worker.name)
        moved = SessionMoved(
            seconds=seconds, restored=journal.n_units, omitted=journal.n_omitted, repeated=journal.n_chunks
        )
        await end.send(write(moved))
        return lease, link
    slots.metrics.record_move("failed", time.monotonic() - begun)
    raise WorkerLostError("session", expected="another worker that continues it", got="none")


async def _rebuild(link: ClientConnection, journal: SessionJournal) -> None:
    """Send what the context consists of, and wait for each answer. Raises: ConnectionClosed; RebuildError."""
    for step in journal.steps:
        for data in step.messages:
            await link.send(fragments(data))
        while (kind := peek_header(await link.recv()).get("type")) not in ANSWERS:
            pass
        if kind == ERROR or kind != step.kind:
            raise RebuildError("rebuilding", expected=step.kind, got=kind)
