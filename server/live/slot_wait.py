"""The wait for a slot: places in the queue, and workers that refuse a session after all.

Contains no reading of the client's messages.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

import httpx

from server.access.clients import Clients, SessionPermit, sessions_refusal
from server.access.identity import Identity
from server.access.limit import Limit
from server.access.refusal import AccessRefusedError
from server.dispatch.dispatcher import Dispatcher, PendingSession, QueuePosition
from server.dispatch.missing_model import missing_model
from server.dispatch.queue import ANY_WORKER, Needs, QueueFullError, RequestType, model_of
from server.dispatch.wait_reasons import start_progress, wait_reason
from server.dispatch.workers import Worker, WorkerLease
from server.live.closes import (
    CANCELLED,
    DRAINING,
    MISSING_MODEL_S,
    SessionEnd,
    labels_missing,
    limit_close,
    model_missing,
    queue_full,
)
from server.live.live_sessions import LiveSessions
from server.live.worker_link import WorkerLostError, WorkerRefusedError
from server.metrics import GatewayMetrics
from server.tracing import SessionTrace, TraceSpans
from worker.protocol.codec import Message
from worker.protocol.gateway_messages import Queued, QueueUpdate

LOG = logging.getLogger(__name__)
UPDATE_S = 2.5  # interval of queue_update messages; the protocol promises one every 3 s
# Pause after a queue_update before the next one of the same client: 0.3 ms for each position in the queue, up to 0.4 s.
# A change is sent to all waiting clients; the pauses spread that work, so that the relays of others run in between.
SPREAD_S, MAX_SPREAD_S = 0.0003, 0.4

Opened = TypeVar("Opened")
Notify = Callable[[Message], Awaitable[None]]


class SlotWait:
    """Gives tickets to sessions and waits until a worker accepts them.

    http: client for the workers. clients: the limits of sessions. spans: records sessions; None: nothing does.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        metrics: GatewayMetrics,
        live: LiveSessions,
        http: httpx.AsyncClient,
        clients: Clients,
        spans: TraceSpans | None = None,
    ):
        self.dispatcher, self.metrics, self.live, self.http = dispatcher, metrics, live, http
        self._clients, self._spans = clients, spans
        self._background: set[asyncio.Task[None]] = set()

    def submit(
        self, request_type: RequestType, session_id: str, identity: Identity, needs: Needs = ANY_WORKER
    ) -> PendingSession:
        """A ticket, with a slot if one is free. `Dispatcher.finish` must follow.

        Args:
            request_type: kind of session.
            session_id: its id.
            identity: whose session it is.
            needs: of the session's worker.
        Raises:
            SessionEnd if the queue is full, a limit of the client is reached, or no worker has the labels that the
            session needs. In a cluster `answered` raises the first two.
        """
        if self.dispatcher.workers.lacks(needs.labels):
            raise SessionEnd(labels_missing(needs.labels))
        permit = self._permit(request_type, identity)
        try:
            pending = self.dispatcher.submit(request_type, session_id, permit, needs)
        except QueueFullError:
            permit.release(0.0)
            raise SessionEnd(queue_full(self.dispatcher.queue.max_size)) from None
        if self._spans is not None:
            pending.trace = SessionTrace(self._spans, request_type)
        return pending

    def count_takeover(self, identity: Identity) -> None:
        """Count a search for a session of a lost gateway. Raises: AccessRefusedError."""
        try:
            self._clients.count_takeover(identity)
        except AccessRefusedError:
            self.metrics.record_limit(Limit.TAKEOVERS)
            raise

    def adopt(
        self, worker: Worker, request_type: RequestType, session_id: str, identity: Identity, needs: Needs
    ) -> PendingSession:
        """A ticket with a slot that a worker has kept for its session. `Dispatcher.finish` must follow."""
        self._clients.forgive_takeover(identity)
        permit = self._clients.adopt_session(identity, self._n_slots_of(request_type))
        pending = self.dispatcher.adopt(worker, request_type, session_id, permit, needs)
        if self._spans is not None:
            pending.trace = SessionTrace(self._spans, request_type)
            pending.trace.got_slot(worker.name)
        return pending

    def _permit(self, request_type: RequestType, identity: Identity) -> SessionPermit:
        """The right to a session. Raises: SessionEnd if a limit of the client is reached."""
        try:
            return self._clients.admit_session(identity, self._n_slots_of(request_type))
        except AccessRefusedError as error:
            if error.limit is not None:
                self.metrics.record_limit(error.limit)
            raise SessionEnd(limit_close(error)) from None

    def _n_slots_of(self, request_type: RequestType) -> int:
        return self.dispatcher.workers.n_slots_of(model_of(request_type))

    def in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Run what no session waits for."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def answered(self, pending: PendingSession) -> None:
        """Wait until it is known whether a new ticket has a slot or a position: at once without a cluster.

        Raises: SessionEnd if the cluster's queue is full, or its client has its sessions at other gateways.
        """
        await self.dispatcher.answered(pending)
        if pending.refusal == "queue_full":
            raise SessionEnd(queue_full(self.dispatcher.queue.max_size))
        if pending.refusal == "sessions":
            error = sessions_refusal(None if pending.permit is None else pending.permit.limit)
            self.metrics.record_limit(Limit.SESSIONS)
            raise SessionEnd(limit_close(error))

    async def open(
        self,
        pending: PendingSession,
        connect: Callable[[WorkerLease], Awaitable[Opened]],
        notify: Notify | None,
        *,
        is_move: bool = False,
        needs_model: bool = False,
    ) -> tuple[WorkerLease, Opened]:
        """Wait until a worker accepts the session.

        Args:
            pending: the session's ticket.
            connect: connects to the worker. Raises: WorkerRefusedError; WorkerLostError.
            notify: sends messages about the queue; None for a client that gets none.
            is_move: the session has had a slot, so it is counted already.
            needs_model: the wait ends after `MISSING_MODEL_S` without any worker that serves the model, or at once if
                none will.
        Returns:
            The lease and the result of `connect`.
        Raises:
            SessionEnd; and the errors of `notify`.
        """
        submitted_at = time.monotonic()
        session_id = pending.ticket.session_id
        is_notified = False
        while True:
            if pending.lease is None:
                self._check_drain(pending)
                await self.answered(pending)
                is_notified = await self._wait(pending, notify, is_notified=is_notified, needs_model=needs_model)
            if pending.refusal is not None:
                await self.answered(pending)  # raises
            if pending.is_cancelled:
                raise SessionEnd(CANCELLED)
            lease = pending.lease
            assert lease is not None, "expected a lease or a cancellation"
            if not self.dispatcher.may_use(lease):
                LOG.warning("session %s waits again: its lease has expired", session_id)
                self.dispatcher.requeue(pending)
                continue
            try:
                opened = await connect(lease)
            except WorkerRefusedError as refused:
                LOG.warning("session %s waits again: %s", session_id, refused)
                self.dispatcher.workers.suspend(lease.worker)
            except WorkerLostError as lost:
                LOG.warning("session %s waits again: %s", session_id, lost)
                if lease.worker.health:
                    self.metrics.record_worker_lost(lease.worker.name)
                self.dispatcher.workers.record_loss(lease.worker)
            else:
                if pending.trace is not None:
                    pending.trace.got_slot(lease.worker.name)
                if not is_move:
                    self.metrics.record_session_start(lease.request_type, time.monotonic() - submitted_at)
                LOG.info("session %s has a slot of %s", session_id, lease.worker.name)
                return lease, opened
            self.dispatcher.requeue(pending)

    async def _wait(
        self, pending: PendingSession, notify: Notify | None, *, is_notified: bool, needs_model: bool
    ) -> bool:
        """Send positions until the client has a slot or is cancelled.

        is_notified: the client received `queued`, which contains its ticket id. needs_model: as in `open`.
        Returns: whether the client has received `queued` now. Raises: SessionEnd; and the errors of `notify`.
        """
        missing_since: float | None = None
        while (position := self.dispatcher.position_of(pending)) is not None:
            self._check_drain(pending)
            if needs_model:
                missing_since = self._check_model(pending, missing_since)
            pending.changed.clear()  # a change while this message is sent causes another one
            if notify is not None:
                await notify(self._update(position) if is_notified else self._queued(pending, position))
            is_notified = True
            with suppress(TimeoutError):
                async with asyncio.timeout(UPDATE_S):
                    await pending.changed.wait()
            if pending.lease is None:
                await asyncio.sleep(min(MAX_SPREAD_S, position.position * SPREAD_S))
        return is_notified

    def _check_drain(self, pending: PendingSession) -> None:
        """Let a session that moves wait while the gateway drains, if a worker may give it a slot.

        Raises: SessionEnd for another one, and without such a worker.
        """
        if not self.live.draining:
            return
        labels = pending.ticket.needs.labels
        model = model_of(pending.ticket.request_type)
        ready = (one for one in self.dispatcher.workers.all if one.is_ready and not one.is_draining)
        able = (one for one in ready if one.n_slots_of(model))
        if not pending.has_begun or not any(labels <= one.labels for one in able):
            raise SessionEnd(DRAINING)

    def _check_model(self, pending: PendingSession, since: float | None) -> float | None:
        """Since when no worker serves the model: `since`, now, or None if one does. Raises: SessionEnd."""
        missing = missing_model(self.dispatcher.workers, model_of(pending.ticket.request_type))
        if missing is None:
            return None
        now = time.monotonic()
        since = now if since is None else since
        if missing.is_final or now - since >= MISSING_MODEL_S:
            raise SessionEnd(model_missing(missing))
        return since

    def _queued(self, pending: PendingSession, position: QueuePosition) -> Queued:
        return Queued(
            ticket_id=pending.ticket.ticket_id,
            position=position.position,
            estimated_wait_s=position.wait_s,
            queue_length=position.queue_length,
            reason=wait_reason(self.dispatcher.workers),
            progress=start_progress(self.dispatcher.workers),
        )

    def _update(self, position: QueuePosition) -> QueueUpdate:
        return QueueUpdate(
            position=position.position,
            estimated_wait_s=position.wait_s,
            queue_length=position.queue_length,
            reason=wait_reason(self.dispatcher.workers),
            progress=start_progress(self.dispatcher.workers),
        )
