"""The gateway's WebSockets: a ticket, a slot of a worker, and the relay between client and worker.

Sends only messages about the queue, errors and close codes of its own. Everything else is forwarded by the relay.
"""

import asyncio
import logging
import secrets
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from starlette.websockets import WebSocket, WebSocketDisconnect
from websockets.asyncio.client import ClientConnection

from server.access.identity import identity_of
from server.dispatch.workers import WorkerLease
from server.live.closes import (
    BUSY,
    CLIENT_GONE,
    CLOSED,
    DRAINING,
    NO_REQUEST,
    SessionEnd,
    SocketClose,
    internal_error,
    worker_lost,
)
from server.live.diagnostics import Diagnostics
from server.live.inbox import ByteBudget, ClientDisconnected, Data, Inbox
from server.live.kinds import Kind, request_type_of
from server.live.live_sessions import LiveSession
from server.live.recorder import Recorder
from server.live.relay import MessageSource, Relay, RelayEnds
from server.live.slot_wait import SlotWait
from server.live.streaming import CLOSE, PREFILL, STOP, TurnIdleError, TurnSource, kind_of
from server.live.worker_link import WorkerLostError, close_link, open_link
from server.recording.recordings import Recordings
from worker.protocol.codec import Message
from worker.protocol.codes import CloseReason, ErrorCode
from worker.protocol.connection import bytes_of, until_gone
from worker.protocol.messages import Error, write
from worker.protocol.queue_messages import QueueDone
from worker.protocol.wire import WireError

LOG = logging.getLogger(__name__)
MB = 2**20
MAX_BUFFERED = 32 * MB  # from one client before it has a slot
MAX_BUFFERED_TOTAL = 512 * MB
MAX_IN_FLIGHT = MB  # from one client with a slot, while its worker is slower than the client
CLOSE_TIMEOUT_S = 2.0
REQUEST_TIMEOUT_S = 300.0  # from the handshake of a chat to its request, which a slow client uploads for minutes
REASONS = frozenset(CloseReason)


@dataclass(frozen=True)
class LiveClient:
    """One client's connection and what belongs to it. inbox: its messages that are not forwarded yet.

    diagnostics_name: of its reports; differs from the session id while another session has the same one.
    """

    websocket: WebSocket
    session: LiveSession
    inbox: Inbox
    recorder: Recorder
    diagnostics_name: str


class GatewaySockets:
    """All WebSockets of the gateway. slots: gives slots to their sessions, and knows all sessions."""

    def __init__(self, slots: SlotWait, diagnostics: Diagnostics, recordings: Recordings):
        self._slots, self._diagnostics, self._recordings = slots, diagnostics, recordings
        self._metrics, self._live = slots.metrics, slots.live
        self._budget = ByteBudget(MAX_BUFFERED_TOTAL)

    @property
    def buffered_bytes(self) -> int:
        """Memory of received messages that are not forwarded yet."""
        return self._budget.used

    async def serve(self, websocket: WebSocket, kind: Kind, session_id: str) -> None:
        """Serve one connection, from the handshake to the close."""
        await websocket.accept()
        if self._live.draining:
            await self._close(websocket, DRAINING)
            return
        session = LiveSession(session_id, kind, identity_of(websocket))
        inbox = Inbox(self._budget, MAX_BUFFERED, bytes_of(websocket))
        recorder = Recorder(self._recordings, kind, session_id, session.identity)
        is_first = not self._live.find(session_id)
        name = session_id if is_first else f"{session_id}-{secrets.token_hex(4)}"
        client = LiveClient(websocket, session, inbox, recorder, name)
        running = asyncio.create_task(self._run_session(client), name="session")
        session.task = running
        self._live.add(session)
        try:
            close = await self._run_tasks(client, running)
            await self._close(websocket, close)
        finally:
            recorder.end()
            self._live.remove(session)
        LOG.info("session %s ended: %s", session_id, close.how)

    async def _run_tasks(self, client: LiveClient, running: "asyncio.Task[SocketClose]") -> SocketClose:
        """Run the session beside the tasks that read the socket and detect its loss, until the first of them ends."""
        reading = asyncio.create_task(_read(client.websocket, client.inbox), name="read")
        watching = asyncio.create_task(until_gone(client.websocket), name="watch")
        tasks = (running, reading, watching)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if reading.done() and client.session.lease is not None:
                # Messages sent right before the disconnect, such as `stop`, are still forwarded.
                await asyncio.wait((running,), timeout=CLOSE_TIMEOUT_S)
            if not running.done():
                return CLIENT_GONE
            if running.cancelled():
                return client.session.forced_close or CLIENT_GONE
            return running.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            client.inbox.clear()

    async def _run_session(self, client: LiveClient) -> SocketClose:
        """Run the session until it is over. Returns: how to close the client's connection."""
        try:
            if client.session.kind is Kind.STREAMING:
                return await self._take_turns(client)
            if client.session.kind is Kind.CHAT:
                await self._wait_for_request(client.inbox)
            return await self._converse(client, client.inbox)
        except ClientDisconnected:
            return CLIENT_GONE
        except SessionEnd as end:
            return end.close
        except WorkerLostError as error:
            LOG.warning("session %s: %s", client.session.session_id, error)
            return worker_lost(error)
        except Exception as error:  # an error of the gateway itself ends only this session
            LOG.exception("session %s", client.session.session_id)
            return internal_error(error)

    async def _wait_for_request(self, inbox: Inbox) -> None:
        """Wait for the request of a chat, so that a client without one takes no slot. Raises: SessionEnd."""
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                await inbox.peek()
        except TimeoutError:
            raise SessionEnd(NO_REQUEST) from None
        if self._budget.is_exhausted:  # requests of many MB would fill the memory while they wait
            raise SessionEnd(BUSY)

    async def _take_turns(self, client: LiveClient) -> SocketClose:
        """Run turn after turn of a streaming session. Returns: how to close. Raises: ClientDisconnected; SessionEnd."""
        inbox = client.inbox
        while True:
            try:
                kind = kind_of((await inbox.peek()).data)
                if kind == PREFILL:
                    await self._converse(client, TurnSource(inbox))
                    inbox.limit(MAX_BUFFERED)
                    continue
                if kind == CLOSE:
                    return CLOSED
                if kind != STOP:  # between turns there is nothing to stop
                    raise WireError(ErrorCode.BAD_MESSAGE, "message.type", expected=PREFILL, got=kind)
            except (WireError, TurnIdleError) as error:
                message = Error.of(error, ErrorCode.BAD_MESSAGE)
                self._metrics.record_error(message.code)
                await _send(client.websocket, message)
                if isinstance(error, TurnIdleError):
                    continue
            await inbox.get()

    async def _converse(self, client: LiveClient, source: MessageSource) -> SocketClose:
        """Get a slot, connect to its worker, relay, and give the slot back."""
        session = client.session

        async def connect(lease: WorkerLease) -> ClientConnection:
            return await open_link(self._slots.http, lease, session.kind)

        request_type = request_type_of(session.kind, session.session_id)
        session.pending = pending = self._slots.submit(request_type, session.session_id, session.identity)
        try:
            lease, link = await self._slots.open(pending, connect, partial(_send, client.websocket))
            client.inbox.limit(MAX_IN_FLIGHT)
            return await self._relay(client, RelayEnds(client.websocket, source, link, lease))
        finally:
            self._slots.dispatcher.finish(pending)
            session.pending = None

    async def _relay(self, client: LiveClient, ends: RelayEnds) -> SocketClose:
        """Relay until the worker ends the session, and close the connection to the worker."""
        graceful = True
        try:
            await _send(ends.websocket, QueueDone())
            intercept = partial(self._diagnostics.intercept, session_id=client.diagnostics_name)
            workers = self._slots.dispatcher.workers
            relay = Relay(ends, client.session, workers, self._metrics, intercept, client.recorder)
            ended = await relay.run()
            return SocketClose(ended.code, ended.reason, ended.reason if ended.reason in REASONS else "ended")
        except WorkerLostError:
            graceful = False
            raise
        finally:
            await close_link(ends.link, graceful=graceful)
            elapsed = self._slots.dispatcher.elapsed(ends.lease)
            self._metrics.record_session_end(ends.lease.request_type, elapsed)

    async def _close(self, websocket: WebSocket, close: SocketClose) -> None:
        self._metrics.record_connection_end(close.how)
        with suppress(TimeoutError, WebSocketDisconnect, RuntimeError, ClientDisconnected):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                if close.error is not None:
                    self._metrics.record_error(close.error.code)
                    await _send(websocket, close.error)
                await websocket.close(close.code, close.reason)


async def _read(websocket: WebSocket, inbox: Inbox) -> None:
    """Put received messages into the inbox until the client disconnects."""
    try:
        while True:
            event = await websocket.receive()
            if event["type"] == "websocket.disconnect":
                return
            data: Data = event["bytes"] if event.get("text") is None else event["text"]
            waiting = inbox.put(data)
            del event, data  # they may have 128 MiB, and the next message may come much later
            await waiting
    finally:
        inbox.close()


async def _send(websocket: WebSocket, message: Message) -> None:
    text = write(message)
    assert isinstance(text, str), "expected a message without sound"
    try:
        await websocket.send_text(text)
    except (WebSocketDisconnect, RuntimeError):
        raise ClientDisconnected from None
