"""A duplex session that has lost its worker: the slot of another one, the context there, and the input since then."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from server.dispatch.dispatcher import PendingSession
from server.dispatch.workers import WorkerLease
from server.live.client_end import ClientEnd
from server.live.moves.rebuild import ContextRebuild, RebuildError
from server.live.moves.takeover import end_kept
from server.live.relay import fragments
from server.live.slot_wait import SlotWait
from server.live.worker_link import WorkerDrainsError, WorkerLostError, close_link
from server.metrics import GatewayMetrics
from worker.protocol.codes import CloseReason, ErrorCode
from worker.protocol.gateway_messages import MoveReason, SessionMoved, SessionMoving
from worker.protocol.messages import Error
from worker.protocol.takeover.journal_steps import Step
from worker.protocol.takeover.session_journal import SessionJournal
from worker.protocol.takeover.slot_messages import KEPT_FIELD

LOG = logging.getLogger(__name__)
WAIT_S = 30.0  # for a slot
MAX_FAILED, MAX_TRIES = 3, 6  # attempts after which nothing was dropped; all attempts
DROPPED = "The message is dropped: two workers were lost while its answer was the next one"

Connect = Callable[[WorkerLease], Awaitable[ClientConnection]]


async def move_session(
    slots: SlotWait,
    pending: PendingSession,
    connect: Connect,
    end: ClientEnd,
    journal: SessionJournal,
    error: WorkerLostError,
) -> tuple[WorkerLease, ClientConnection]:
    """Continue a session with another worker.

    Args:
        slots: gives the slot.
        pending: the session's ticket, which has the lost worker's slot.
        connect: connects to a worker. Raises: WorkerRefusedError; WorkerLostError.
        end: gets the messages about the move, and the error of a message that is dropped.
        journal: what rebuilds the context.
        error: how the worker was lost.
    Raises: WorkerLostError without a slot or a context; SessionEnd.
    """
    begun = time.monotonic()
    reason: MoveReason = "draining" if isinstance(error, WorkerDrainsError) else "worker_lost"
    end.post(SessionMoving(reason=reason))
    _lose_worker(journal, end, slots.metrics, is_death=reason == "worker_lost")
    kept = end.keep_slot(pending.ticket.owner)
    if pending.lease is not None and kept is not None and KEPT_FIELD in pending.lease.worker.health:
        ending = end_kept(slots.http, pending.lease.worker, pending.ticket.session_id, kept)
        slots.in_background(ending)  # the other worker does not wait for this one
    n_failed, one_by_one = 0, journal.is_one_by_one
    joint: Sequence[Step] = ()  # sent together, with no answer yet when a worker was lost
    for n_tries in range(1, MAX_TRIES + 1):
        asked = time.monotonic()
        slots.dispatcher.requeue(pending, was_used=n_tries == 1)
        try:
            async with asyncio.timeout(WAIT_S):
                lease, link = await slots.open(pending, connect, None, is_move=True)
        except TimeoutError:
            break
        connected = time.monotonic()
        try:
            await ContextRebuild(link, lease, one_by_one=one_by_one).feed(journal.steps)
            for data in journal.unanswered:
                await link.send(fragments(data))
        except (ConnectionClosed, RebuildError) as failed:
            LOG.warning("session %s: attempt %d to move: %r", pending.ticket.session_id, n_tries, failed)
            await close_link(link, graceful=False)
            if isinstance(failed, ConnectionClosed):
                _lose_worker(journal, end, slots.metrics, is_death=_is_death(failed))
            elif failed.suspect is not None and not one_by_one:
                one_by_one, joint = True, failed.joint  # the unit at fault may be a later one of the same prefill
            elif failed.suspect is not None:
                is_among = any(one is failed.suspect for one in joint)
                joint = () if is_among else joint  # that loss counts for one step only
                if journal.lose_worker_at(failed.suspect, 1 + is_among):
                    slots.metrics.record_quarantine()
                    continue  # the step at which workers were lost is dropped
            n_failed += 1
            if n_failed == MAX_FAILED:
                break
            continue
        except BaseException:
            await close_link(link, graceful=False)
            raise
        ready = time.monotonic()
        LOG.info(
            "session %s: %.3f s for a slot and its connection, %.3f s for %d units",
            pending.ticket.session_id,
            connected - asked,
            ready - connected,
            journal.n_units,
        )
        record_moved(slots, end, journal, pending, lease, reason, ready - begun)
        return lease, link
    slots.metrics.record_move("failed", time.monotonic() - begun)
    raise WorkerLostError("session", expected="another worker that continues it", got="none")


def record_moved(
    slots: SlotWait,
    end: ClientEnd,
    journal: SessionJournal,
    pending: PendingSession,
    lease: WorkerLease,
    reason: MoveReason,
    seconds: float,
    *,
    n_omitted: int | None = None,
) -> None:
    """Report a move to the client and the metrics.

    Args:
        seconds: without a worker.
        n_omitted: units that the context lacks; None: those that the journal lacks, and nothing was handed over.
    """
    slots.dispatcher.workers.record_pause(lease, journal.is_paused)
    slots.metrics.record_move("moved" if n_omitted is None else "handed over", seconds)
    LOG.info("session %s goes on with %s after %.2f s", pending.ticket.session_id, lease.worker.name, seconds)
    dropped = journal.take_dropped()
    end.post(
        SessionMoved(
            reason=reason,
            seconds=seconds,
            restored=journal.n_units + (0 if n_omitted is None else journal.n_omitted - n_omitted),
            omitted=journal.n_omitted if n_omitted is None else n_omitted,
            omitted_pictures=journal.n_omitted_pictures,
            repeated=journal.n_chunks,
            dropped=dropped.n_units,
            dropped_sound_s=dropped.content.sound_s,
            dropped_pictures=dropped.content.n_pictures,
        )
    )


def _is_death(closed: ConnectionClosed) -> bool:
    """Whether a worker has ended, or its engine."""
    return closed.rcvd is None or closed.rcvd.reason == CloseReason.ENGINE


def _lose_worker(journal: SessionJournal, end: ClientEnd, metrics: GatewayMetrics, *, is_death: bool) -> None:
    if journal.lose_worker(is_death=is_death):
        metrics.record_quarantine()
        end.post(Error(error=DROPPED, code=ErrorCode.QUARANTINED))
