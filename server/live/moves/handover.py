"""A duplex session that leaves a worker that goes on: another one gets the context beside it, then takes over."""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress

from websockets.exceptions import ConnectionClosed

from server.dispatch.dispatcher import PendingSession
from server.dispatch.workers import WorkerLease
from server.live.client_end import ClientEnd
from server.live.moves.moving import Connect, record_moved
from server.live.moves.rebuild import ContextRebuild, RebuildError
from server.live.relay import Successor
from server.live.slot_wait import SlotWait
from server.live.worker_link import WorkerLostError, WorkerRefusedError, close_link
from worker.protocol.gateway_messages import MoveReason
from worker.protocol.takeover.journal_steps import RESULT, Step
from worker.protocol.takeover.session_journal import SessionJournal

LOG = logging.getLogger(__name__)
RETRY_S = 0.5  # until another worker is tried, or a slot of one may be free
QUIET_WAIT_S = 20.0  # for the end of a turn; then the session moves within it


class Handover:
    """The moves of one session from workers that go on.

    Args:
        slots: give the other workers' slots.
        pending: the session's ticket.
        connect: connects to a worker. Raises: WorkerRefusedError; WorkerLostError.
        end: gets the messages about a move.
        journal: what the context consists of.

    Attributes:
        reason: why the session has to leave its worker; None: it has not.
    """

    def __init__(
        self, slots: SlotWait, pending: PendingSession, connect: Connect, end: ClientEnd, journal: SessionJournal
    ):
        self._slots, self._pending, self._connect, self._end, self._journal = slots, pending, connect, end, journal
        self.reason: MoveReason | None = None
        self._asked = asyncio.Event()

    @property
    def can_move(self) -> bool:
        """Whether another worker could go on with the session."""
        return self._journal.can_rebuild

    def ask(self, reason: MoveReason) -> None:
        """Let the session leave its worker, as soon as another one has a free slot."""
        self.reason = reason
        self._asked.set()

    def withdraw(self) -> None:
        """Let the session stay, unless it has left."""
        self.reason = None
        self._asked.clear()
        self._journal.changed.set()  # a move that waits for it ends

    async def run(self, hold: Callable[[], bool]) -> Successor:
        """Wait until the session has to leave and another worker takes over.

        hold: ends the forwarding to the worker. Returns: False if the session is over.
        """
        while True:
            await self._asked.wait()
            if not self._must_leave:
                self.withdraw()
                continue
            dispatcher = self._slots.dispatcher
            lease = dispatcher.acquire_elsewhere(self._pending) if self.can_move else None
            if lease is not None:
                is_taken = False
                try:
                    if (successor := await self._attempt(lease, hold)) is not None:
                        is_taken = True
                        return successor
                finally:
                    if not is_taken:
                        dispatcher.give_up(lease)
            await asyncio.sleep(RETRY_S)

    @property
    def _must_leave(self) -> bool:
        """Whether the reason holds for the worker that has the session now."""
        lease = self._pending.lease
        return lease is not None and (lease.worker.is_closing or lease.worker.is_short_of_memory)

    async def _attempt(self, lease: WorkerLease, hold: Callable[[], bool]) -> Successor | None:
        try:
            link = await self._connect(lease)
        except (WorkerRefusedError, WorkerLostError) as error:
            LOG.warning("session %s stays for now: %s", self._pending.ticket.session_id, error)
            self._slots.dispatcher.workers.suspend(lease.worker)
            return None
        is_taken = False
        try:
            rebuild = ContextRebuild(link, lease, one_by_one=self._journal.is_one_by_one)
            n_omitted = self._journal.n_omitted
            is_taken = await self._catch_up(rebuild, hold)
            if not is_taken:
                return None
            reason = self.reason or "draining"
            self.withdraw()
            self._slots.dispatcher.replace(self._pending, lease)
            record_moved(self._slots, self._end, self._journal, self._pending, lease, reason, 0.0, n_omitted=n_omitted)
            return Successor(lease, link)
        except (ConnectionClosed, RebuildError) as error:
            LOG.warning("session %s stays for now: %s", self._pending.ticket.session_id, error)
            return None
        except Exception:  # an error of the gateway itself must not end a session that goes on
            LOG.exception("session %s stays for now", self._pending.ticket.session_id)
            return None
        finally:
            if not is_taken:
                await close_link(link, graceful=False)

    async def _catch_up(self, rebuild: ContextRebuild, hold: Callable[[], bool]) -> bool:
        """Feed what the session adds, up to an edge between two units. Returns: whether the session is held there."""
        journal, quiet_until = self._journal, time.monotonic() + QUIET_WAIT_S
        while self._asked.is_set() and journal.can_rebuild:
            further = further_steps(rebuild.fed, journal.steps)
            if further is None:
                return False
            if further:
                await rebuild.feed(further)
                continue
            is_late = time.monotonic() > quiet_until
            if journal.is_at_edge and (journal.is_quiet or is_late):
                return hold()
            journal.changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(None if is_late else quiet_until - time.monotonic() + RETRY_S):
                    await journal.changed.wait()
        return False


def further_steps(fed: list[Step], steps: tuple[Step, ...]) -> list[Step] | None:
    """The steps after those that are fed; None if another worker must begin anew: what was fed is no longer so.

    The oldest units leave the journal, and stay in the context.
    """
    kept = {id(step) for step in steps}
    left = [step for step in fed if id(step) in kept]
    is_same = all(one is other for one, other in zip(left, steps, strict=False))
    if not is_same or any(step.kind != RESULT for step in fed if id(step) not in kept):
        return None
    return list(steps[len(left) :])
