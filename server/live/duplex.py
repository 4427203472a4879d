"""The gateway's duplex WebSockets: a ticket, a slot of a worker, and the relay between client and worker.

Sends only messages about the queue, errors and close codes of its own. Everything else is forwarded by the relay.
"""

import asyncio
import logging
import time
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import httpx
from starlette.websockets import WebSocket, WebSocketDisconnect
from websockets.asyncio.client import ClientConnection

from server.dispatch.dispatcher import Dispatcher, PendingSession
from server.dispatch.queue import QueueFullError, RequestType
from server.dispatch.workers import WorkerLease
from server.live.diagnostics import Diagnostics
from server.live.inbox import ByteBudget, ClientDisconnected, Data, Inbox
from server.live.relay import Relay
from server.live.worker_link import WorkerLostError, WorkerRefusedError, close_link, open_link
from server.metrics import GatewayMetrics
from worker.protocol.codes import CloseCode, CloseReason, ErrorCode
from worker.protocol.connection import until_gone
from worker.protocol.messages import Error, FromServer, Queued, QueueDone, QueueUpdate, write
from worker.protocol.session_id import session_id_of

LOG = logging.getLogger(__name__)
UPDATE_S = 2.5  # interval of queue_update messages; the protocol promises one every 3 s
# Pause after a queue_update before the next one of the same client: 0.3 ms for each position in the queue, up to 0.4 s.
# A change is sent to all waiting clients; the pauses spread that work, so that the relays of others run in between.
SPREAD_S, MAX_SPREAD_S = 0.0003, 0.4
MB = 2**20
MAX_BUFFERED = 32 * MB  # from one client before it has a slot
MAX_BUFFERED_TOTAL = 512 * MB
MAX_IN_FLIGHT = MB  # from one client with a slot, while its worker is slower than the client
CLOSE_TIMEOUT_S = 2.0
REASONS = frozenset(CloseReason)
AUDIO_PREFIXES = ("adx_", "audio_duplex_")


class SocketClose(NamedTuple):
    """How a connection ends. how: value of the metric's label. error: message sent before the close frame."""

    code: int
    reason: str
    how: str
    error: Error | None = None


CLIENT_GONE = SocketClose(CloseCode.NORMAL, "", "client gone")


def request_type_of(session_id: str) -> RequestType:
    """The request type, from the prefix of the session id."""
    return "audio_duplex" if session_id.startswith(AUDIO_PREFIXES) else "omni_duplex"


class GatewaySockets:
    """All duplex sockets of the gateway. draining: whether new connections are refused."""

    def __init__(
        self, dispatcher: Dispatcher, metrics: GatewayMetrics, diagnostics: Diagnostics, http: httpx.AsyncClient
    ):
        self._dispatcher, self._metrics, self._diagnostics, self._http = dispatcher, metrics, diagnostics, http
        self._budget = ByteBudget(MAX_BUFFERED_TOTAL)
        self._sessions: dict[asyncio.Task[SocketClose], PendingSession] = {}
        self._forced_close: dict[asyncio.Task[SocketClose], SocketClose] = {}
        self.draining = False

    @property
    def n_connections(self) -> int:
        """Number of connections that are not closed yet, with or without a slot."""
        return len(self._sessions)

    @property
    def buffered_bytes(self) -> int:
        """Memory of received messages that are not forwarded yet."""
        return self._budget.used

    async def serve(self, websocket: WebSocket, given_id: str) -> None:
        """Serve one connection, from the handshake to the close."""
        session_id = session_id_of(given_id)
        await websocket.accept()
        if self.draining:
            await self._close(websocket, _draining())
            return
        try:
            pending = self._dispatcher.submit(request_type_of(session_id), session_id)
        except QueueFullError:
            text = f"Queue full ({self._dispatcher.queue.max_size} requests)"
            error = Error(error=text, code=ErrorCode.QUEUE_FULL)
            await self._close(websocket, SocketClose(CloseCode.TRY_AGAIN_LATER, "Queue full", "queue full", error))
            return
        inbox = Inbox(self._budget, MAX_BUFFERED)
        session = asyncio.create_task(self._run_session(websocket, pending, inbox), name="session")
        self._sessions[session] = pending
        try:
            close = await self._run_tasks(websocket, pending, inbox, session)
            await self._close(websocket, close)
        finally:
            del self._sessions[session]
            self._forced_close.pop(session, None)
        LOG.info("session %s ended: %s", session_id, close.how)

    async def _run_tasks(
        self, websocket: WebSocket, pending: PendingSession, inbox: Inbox, session: "asyncio.Task[SocketClose]"
    ) -> SocketClose:
        """Run the session beside the tasks that read the socket and detect its loss, until the first of them ends."""
        reading = asyncio.create_task(_read(websocket, inbox), name="read")
        watching = asyncio.create_task(until_gone(websocket), name="watch")
        tasks = (session, reading, watching)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if reading.done() and pending.lease is not None:
                # Messages sent right before the disconnect, such as `stop`, are still forwarded.
                await asyncio.wait((session,), timeout=CLOSE_TIMEOUT_S)
            if not session.done():
                return CLIENT_GONE
            if session.cancelled():
                return self._forced_close.get(session, CLIENT_GONE)
            return session.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            inbox.clear()

    async def _run_session(self, websocket: WebSocket, pending: PendingSession, inbox: Inbox) -> SocketClose:
        """Wait for a slot, connect to its worker and relay. Returns: how to close the client's connection."""
        submitted_at = time.monotonic()
        try:
            opened = await self._open(websocket, pending)
            if isinstance(opened, SocketClose):
                return opened
            lease, link = opened
            self._metrics.record_session_start(lease.request_type, time.monotonic() - submitted_at)
            return await self._relay(websocket, inbox, link, lease)
        except ClientDisconnected:
            return CLIENT_GONE
        except WorkerLostError as error:
            LOG.warning("session %s: %s", pending.ticket.session_id, error)
            message = Error(error=f"The worker was lost: {error}", code=ErrorCode.WORKER_LOST)
            return SocketClose(CloseCode.INTERNAL_ERROR, "Worker lost", "worker lost", message)
        except Exception as error:  # an error of the gateway itself ends only this session
            LOG.exception("session %s", pending.ticket.session_id)
            return SocketClose(
                CloseCode.INTERNAL_ERROR, "Internal error", "internal", Error.of(error, ErrorCode.INTERNAL)
            )
        finally:
            self._dispatcher.finish(pending)

    async def _open(
        self, websocket: WebSocket, pending: PendingSession
    ) -> tuple[WorkerLease, ClientConnection] | SocketClose:
        """Wait until a worker accepts the session. Returns: the lease and the connection, or how the session ends."""
        session_id = pending.ticket.session_id
        is_notified = False
        while True:
            if pending.lease is None:
                if self.draining:
                    return _draining()
                await self._wait_for_slot(websocket, pending, is_notified)
                is_notified = True
            if pending.is_cancelled:
                error = Error(error="Request cancelled", code=ErrorCode.CANCELLED)
                return SocketClose(CloseCode.TRY_AGAIN_LATER, "Request cancelled", "cancelled", error)
            lease = pending.lease
            assert lease is not None, "expected a lease or a cancellation"
            try:
                return lease, await open_link(self._http, lease)
            except WorkerRefusedError as refused:
                LOG.warning("session %s waits again: %s", session_id, refused)
                self._dispatcher.workers.suspend(lease.worker)
            except WorkerLostError as lost:
                LOG.warning("session %s waits again: %s", session_id, lost)
                if lease.worker.health:
                    self._metrics.record_worker_lost(lease.worker.name)
                self._dispatcher.workers.record_loss(lease.worker)
            self._dispatcher.requeue(pending)

    async def _relay(
        self, websocket: WebSocket, inbox: Inbox, link: ClientConnection, lease: WorkerLease
    ) -> SocketClose:
        """Relay until the worker ends the session, and close the connection to the worker."""
        graceful = True
        try:
            LOG.info("session %s has a slot of %s", lease.session_id, lease.worker.name)
            await _send(websocket, QueueDone())
            inbox.limit(MAX_IN_FLIGHT)
            intercept = partial(self._diagnostics.intercept, session_id=lease.session_id)
            relay = Relay(websocket, inbox, link, lease, self._dispatcher.workers, self._metrics, intercept)
            ended = await relay.run()
            return SocketClose(ended.code, ended.reason, ended.reason if ended.reason in REASONS else "ended")
        except WorkerLostError:
            graceful = False
            raise
        finally:
            await close_link(link, graceful=graceful)
            self._metrics.record_session_end(lease.request_type, self._dispatcher.elapsed(lease))

    async def _wait_for_slot(self, websocket: WebSocket, pending: PendingSession, is_notified: bool) -> None:
        """Send positions until the client has a slot or is cancelled.

        is_notified: the client received `queued`, which contains its ticket id.
        """
        while (position := self._dispatcher.position_of(pending)) is not None:
            pending.changed.clear()  # a change while this message is sent causes another one
            message: Queued | QueueUpdate
            if is_notified:
                message = QueueUpdate(
                    position=position.position,
                    estimated_wait_s=position.wait_s,
                    queue_length=position.queue_length,
                )
            else:
                message = Queued(
                    ticket_id=pending.ticket.ticket_id,
                    position=position.position,
                    estimated_wait_s=position.wait_s,
                    queue_length=position.queue_length,
                )
            await _send(websocket, message)
            is_notified = True
            with suppress(TimeoutError):
                async with asyncio.timeout(UPDATE_S):
                    await pending.changed.wait()
            if pending.lease is None:
                await asyncio.sleep(min(MAX_SPREAD_S, position.position * SPREAD_S))

    async def _close(self, websocket: WebSocket, close: SocketClose) -> None:
        self._metrics.record_connection_end(close.how)
        with suppress(TimeoutError, WebSocketDisconnect, RuntimeError, ClientDisconnected):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                if close.error is not None:
                    self._metrics.record_error(close.error.code)
                    await _send(websocket, close.error)
                await websocket.close(close.code, close.reason)

    def drain(self) -> None:
        """Refuse new connections and close those that wait for a slot."""
        self.draining = True
        for task, pending in self._sessions.items():
            if pending.lease is None:
                self._force_close(task)

    def close_all(self) -> None:
        """Close all connections, with or without a slot."""
        for task in self._sessions:
            self._force_close(task)

    def _force_close(self, task: "asyncio.Task[SocketClose]") -> None:
        if not task.done():
            self._forced_close[task] = _draining()
            task.cancel()


def _draining() -> SocketClose:
    error = Error(error="The server is shutting down", code=ErrorCode.DRAINING)
    return SocketClose(CloseCode.SERVICE_RESTART, "Shutting down", "draining", error)


async def _read(websocket: WebSocket, inbox: Inbox) -> None:
    """Put received messages into the inbox until the client disconnects."""
    try:
        while True:
            event = await websocket.receive()
            if event["type"] == "websocket.disconnect":
                return
            data: Data = event["bytes"] if event.get("text") is None else event["text"]
            await inbox.put(data)
    finally:
        inbox.close()


async def _send(websocket: WebSocket, message: FromServer) -> None:
    text = write(message)
    assert isinstance(text, str), "expected a message without sound"
    try:
        await websocket.send_text(text)
    except (WebSocketDisconnect, RuntimeError):
        raise ClientDisconnected from None
