"""One client's WebSocket from handshake to close: a ticket, a slot of a worker, and everything passed on between them.

Knows the queue's messages and close codes. Does not know what is said to the worker.
"""

import asyncio
import logging
import time
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import httpx
from starlette.websockets import WebSocket, WebSocketDisconnect

from server.dispatch.dispatcher import Dispatcher, PendingSession
from server.dispatch.queue import QueueFullError, RequestType
from server.live.diagnostics import Diagnostics
from server.live.inbox import ByteBudget, ClientDisconnected, Inbox
from server.live.relay import Relay
from server.live.worker_link import WorkerLostError, WorkerRefusedError, close_link, open_link
from server.metrics import GatewayMetrics
from worker.protocol.codes import CloseCode, CloseReason, ErrorCode
from worker.protocol.connection import until_gone
from worker.protocol.messages import Error, FromServer, Queued, QueueDone, QueueUpdate, write
from worker.protocol.session_id import session_id_of

LOG = logging.getLogger(__name__)
UPDATE_S = 2.5  # between two messages to a client that waits, who is promised one every 3 s
APART_S, MAX_APART_S = 0.0003, 0.4  # between news of a change to one who waits and to the next
MB = 2**20
MAX_EARLY = 32 * MB  # what one client may send before its turn
MAX_EARLY_OF_ALL = 512 * MB
MAX_IN_FLIGHT = MB  # what is read ahead of a worker that is slower than its client
LAST_WORDS_S = 2.0
REASONS = frozenset(CloseReason)
AUDIO_PREFIXES = ("adx_", "audio_duplex_")


class SocketClose(NamedTuple):
    """How a connection ends. how: a word for counting."""

    code: int
    reason: str
    how: str
    error: Error | None = None


CLIENT_GONE = SocketClose(CloseCode.NORMAL, "", "client gone")


def request_type_of(session_id: str) -> RequestType:
    """By the prefix that clients give their ids."""
    return "audio_duplex" if session_id.startswith(AUDIO_PREFIXES) else "omni_duplex"


class GatewaySockets:
    """All duplex sockets of the gateway. connections: those that are not closed yet, with or without a slot."""

    def __init__(
        self, dispatcher: Dispatcher, metrics: GatewayMetrics, diagnostics: Diagnostics, asking: httpx.AsyncClient
    ):
        self._dispatcher, self._metrics, self._diagnostics, self._asking = dispatcher, metrics, diagnostics, asking
        self._store = ByteBudget(MAX_EARLY_OF_ALL)
        self.connections: dict[asyncio.Task[SocketClose], PendingSession] = {}
        self._ending: dict[asyncio.Task[SocketClose], SocketClose] = {}
        self.draining = False

    async def serve(self, websocket: WebSocket, given_id: str) -> None:
        """From handshake to close."""
        session_id = session_id_of(given_id)
        await websocket.accept()
        if self.draining:
            await self._say_goodbye(websocket, _draining())
            return
        try:
            pending = self._dispatcher.arrive(request_type_of(session_id), session_id)
        except QueueFullError:
            text = f"Queue full ({self._dispatcher.queue.most} requests)"
            error = Error(error=text, code=ErrorCode.QUEUE_FULL)
            await self._say_goodbye(
                websocket, SocketClose(CloseCode.TRY_AGAIN_LATER, "Queue full", "queue full", error)
            )
            return
        inbox = Inbox(self._store, MAX_EARLY)
        talking = asyncio.create_task(self._talk(websocket, pending, inbox), name="talk")
        self.connections[talking] = pending
        try:
            goodbye = await self._host(websocket, pending, inbox, talking)
            await self._say_goodbye(websocket, goodbye)
        finally:
            del self.connections[talking]
            self._ending.pop(talking, None)
        LOG.info("session %s ended: %s", session_id, goodbye.how)

    async def _host(
        self, websocket: WebSocket, pending: PendingSession, inbox: Inbox, talking: "asyncio.Task[SocketClose]"
    ) -> SocketClose:
        """Until it is over. Returns: what is still to be said."""
        reading = asyncio.create_task(_read(websocket, inbox), name="read")
        watching = asyncio.create_task(until_gone(websocket), name="watch")
        tasks = (talking, reading, watching)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if reading.done() and pending.lease is not None:
                # What it said before it went is still passed on: `stop` and the end of the connection come together.
                await asyncio.wait((talking,), timeout=LAST_WORDS_S)
            if not talking.done():
                return CLIENT_GONE
            if talking.cancelled():
                return self._ending.get(talking, CLIENT_GONE)
            return talking.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            inbox.forget()

    async def _talk(self, websocket: WebSocket, pending: PendingSession, inbox: Inbox) -> SocketClose:
        """The order of things: wait, connect, pass on."""
        try:
            return await self._in_order(websocket, pending, inbox)
        except ClientDisconnected:
            return CLIENT_GONE
        except WorkerLostError as error:
            LOG.warning("session %s: %s", pending.ticket.session_id, error)
            told = Error(error=f"The worker was lost: {error}", code=ErrorCode.WORKER_LOST)
            return SocketClose(CloseCode.INTERNAL_ERROR, "Worker lost", "worker lost", told)
        except Exception as error:  # a fault of ours ends this session, and says so
            LOG.exception("session %s", pending.ticket.session_id)
            return SocketClose(
                CloseCode.INTERNAL_ERROR, "Internal error", "internal", Error.of(error, ErrorCode.INTERNAL)
            )
        finally:
            self._dispatcher.leave(pending)

    async def _in_order(self, websocket: WebSocket, pending: PendingSession, inbox: Inbox) -> SocketClose:
        ticket, since = pending.ticket, time.monotonic()
        is_told = False
        while True:
            if pending.lease is None:
                if self.draining:
                    return _draining()
                await self._wait(websocket, pending, is_told)
                is_told = True
            if pending.is_cancelled:
                error = Error(error="Request cancelled", code=ErrorCode.CANCELLED)
                return SocketClose(CloseCode.TRY_AGAIN_LATER, "Request cancelled", "cancelled", error)
            worker = pending.lease.worker
            try:
                link = await open_link(self._asking, pending.lease)
                break
            except WorkerRefusedError as error:
                LOG.warning("session %s waits on: %s", ticket.session_id, error)
                self._dispatcher.workers.refused(worker)
            except WorkerLostError as error:
                LOG.warning("session %s waits on: %s", ticket.session_id, error)
                if worker.health:
                    self._metrics.worker_lost(worker.name)
                self._dispatcher.workers.gone(worker)
            self._dispatcher.step_back(pending)
        lease = pending.lease
        politely = True
        try:
            self._metrics.seated(lease.request_type, time.monotonic() - since)
            LOG.info("session %s has a slot of %s", ticket.session_id, worker.name)
            await _send(websocket, QueueDone())
            inbox.most = MAX_IN_FLIGHT
            keep = partial(self._diagnostics.keep, session_id=ticket.session_id)
            relay = Relay(websocket, inbox, link, lease, self._dispatcher.workers, self._metrics, keep)
            ended = await relay.run()
            return SocketClose(ended.code, ended.reason, ended.reason if ended.reason in REASONS else "ended")
        except WorkerLostError:
            politely = False
            raise
        finally:
            await close_link(link, politely=politely)
            self._metrics.session(lease.request_type, self._dispatcher.elapsed(lease))

    async def _wait(self, websocket: WebSocket, pending: PendingSession, is_told: bool) -> None:
        """Until there is a slot or the ticket is cancelled. is_told: the client has its ticket's name."""
        while (place := self._dispatcher.place(pending)) is not None:
            pending.changed.clear()  # what changes while this is sent is news again
            standing = {
                "position": place.position,
                "estimated_wait_s": place.wait_s,
                "queue_length": place.queue_length,
            }
            message = QueueUpdate(**standing) if is_told else Queued(ticket_id=pending.ticket.ticket_id, **standing)
            await _send(websocket, message)
            is_told = True
            with suppress(TimeoutError):
                async with asyncio.timeout(UPDATE_S):
                    await pending.changed.wait()
            if pending.lease is None:  # all who wait have the same news: one after the other, as others are talking
                await asyncio.sleep(min(MAX_APART_S, place.position * APART_S))

    async def _say_goodbye(self, websocket: WebSocket, goodbye: SocketClose) -> None:
        self._metrics.ended(goodbye.how)
        with suppress(TimeoutError, WebSocketDisconnect, RuntimeError, ClientDisconnected):
            async with asyncio.timeout(LAST_WORDS_S):
                if goodbye.error is not None:
                    self._metrics.error(goodbye.error.code)
                    await _send(websocket, goodbye.error)
                await websocket.close(goodbye.code, goodbye.reason)

    def drain(self) -> None:
        """Take nobody new, and send away who waits."""
        self.draining = True
        for task, pending in self.connections.items():
            if pending.lease is None:
                self._end(task)

    def end_all(self) -> None:
        """End what is left."""
        for task in self.connections:
            self._end(task)

    def _end(self, task: "asyncio.Task[SocketClose]") -> None:
        if not task.done():
            self._ending[task] = _draining()
            task.cancel()


def _draining() -> SocketClose:
    error = Error(error="The server is shutting down", code=ErrorCode.DRAINING)
    return SocketClose(CloseCode.SERVICE_RESTART, "Shutting down", "draining", error)


async def _read(websocket: WebSocket, inbox: Inbox) -> None:
    """Everything that comes, until the client is gone."""
    try:
        while True:
            event = await websocket.receive()
            if event["type"] == "websocket.disconnect":
                return
            data = event.get("text")
            await inbox.put(event["bytes"] if data is None else data)
    finally:
        inbox.end()


async def _send(websocket: WebSocket, message: FromServer) -> None:
    try:
        await websocket.send_text(write(message))
    except (WebSocketDisconnect, RuntimeError):
        raise ClientDisconnected from None
