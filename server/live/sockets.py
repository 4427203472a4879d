"""The gateway's WebSockets: a ticket, a slot of a worker, and the relay between client and worker.

Sends only messages about the queue, errors and close codes of its own. Everything else is forwarded by the relay.
"""

import asyncio
import logging
import secrets
from functools import partial

from starlette.websockets import WebSocket
from websockets.asyncio.client import ClientConnection

from models.errors import SettingsError
from server.access.identity import Identity, identity_of
from server.dispatch.placement import needs_of
from server.dispatch.queue import Needs
from server.dispatch.workers import WorkerLease
from server.live.client_end import Attachment, ClientEnd
from server.live.closes import (
    BUSY,
    CLIENT_GONE,
    CLOSED,
    DRAINING,
    HANDED_OVER,
    NO_REQUEST,
    REPLACED,
    TRY_RESUME_AGAIN,
    SessionEnd,
    SocketClose,
    bad_labels,
    internal_error,
    resume_refused,
    worker_lost,
)
from server.live.diagnostics import Diagnostics
from server.live.inbox import ClientDisconnected, Inbox
from server.live.kinds import Kind, request_type_of
from server.live.live_client import LiveClient, OtherGateways, read_messages, wait_for_return
from server.live.live_sessions import LiveSession
from server.live.moves.handover import Handover
from server.live.moves.moving import move_session
from server.live.moves.takeover import TakenSession, TakeoverError, take_session
from server.live.own_messages import CLOSE_TIMEOUT_S, close_socket, send_own
from server.live.recorder import Recorder
from server.live.relay import MessageSource, Relay, RelayEnds, Successor
from server.live.resumption import KEPT_BYTES_TOTAL, refused_token, resume_request
from server.live.slot_wait import SlotWait
from server.live.streaming import CLOSE, PREFILL, STOP, TurnIdleError, TurnSource, kind_of
from server.live.worker_link import WorkerDrainsError, WorkerLostError, close_link, open_link
from server.recording.recordings import Recordings
from worker.protocol.codes import CloseReason, ErrorCode
from worker.protocol.connection import bytes_of, until_gone
from worker.protocol.gateway_messages import RESUME_QUERY, QueueDone
from worker.protocol.messages import Error, write
from worker.protocol.takeover.message_bytes import ByteBudget, Data
from worker.protocol.takeover.session_journal import MAX_BYTES_TOTAL, SessionJournal
from worker.protocol.wire import WireError

LOG = logging.getLogger(__name__)
MB = 2**20
MAX_BUFFERED = 32 * MB  # from one client before it has a slot
MAX_BUFFERED_TOTAL = 512 * MB
MAX_IN_FLIGHT = MB  # from one client with a slot, while its worker is slower than the client
REQUEST_TIMEOUT_S = 300.0  # from the handshake of a chat to its request, which a slow client uploads for minutes
REASONS = frozenset(CloseReason)
MAX_LOSSES = 5  # workers that one session may lose


class GatewaySockets:
    """All WebSockets of the gateway.

    Args:
        slots: gives slots to their sessions, and has the list of all sessions.
        diagnostics, recordings: of all sessions.
        resume_grace_s: seconds that a session is kept after a lost connection; 0: none is.
        others: other gateways of a cluster, which may have a session; None: there are none.
    """

    def __init__(
        self,
        slots: SlotWait,
        diagnostics: Diagnostics,
        recordings: Recordings,
        resume_grace_s: float,
        others: OtherGateways | None = None,
    ):
        self._slots, self._diagnostics, self._recordings = slots, diagnostics, recordings
        self._metrics, self._live = slots.metrics, slots.live
        self._budget = ByteBudget(MAX_BUFFERED_TOTAL)
        self._kept, self.resume_grace_s = ByteBudget(KEPT_BYTES_TOTAL), resume_grace_s
        self._running: dict[LiveClient, asyncio.Task[SocketClose]] = {}
        self._relays: dict[LiveSession, Relay] = {}
        self._journals, self._others = ByteBudget(MAX_BYTES_TOTAL), others
        self._metrics.watch_kept_bytes(lambda: self._kept.used, lambda: self._journals.used)

    @property
    def buffered_bytes(self) -> int:
        """Memory of received messages that are not forwarded yet."""
        return self._budget.used

    @property
    def transferable(self) -> frozenset[LiveSession]:
        """Sessions that their workers keep for another gateway, if this one ends."""
        return frozenset(session for session, relay in self._relays.items() if relay.is_kept_by_worker)

    async def serve(self, websocket: WebSocket, kind: Kind, session_id: str) -> None:
        """Serve one connection, from the handshake to the close."""
        await websocket.accept()
        try:
            needs = needs_of(websocket.query_params)
        except SettingsError as error:
            await close_socket(websocket, bad_labels(error), self._metrics)
            return
        if kind is Kind.DUPLEX and websocket.query_params.get(RESUME_QUERY) == "1":
            await self._resume(websocket, session_id, needs)
            return
        if self._live.draining:
            await close_socket(websocket, DRAINING, self._metrics)
            return
        session = LiveSession(session_id, kind, identity_of(websocket), needs=needs)
        inbox = Inbox(self._budget, MAX_BUFFERED, bytes_of(websocket))
        recorder = Recorder(self._recordings, kind, session_id, session.identity)
        is_first = not self._live.find(session_id)
        name = session_id if is_first else f"{session_id}-{secrets.token_hex(4)}"
        end = ClientEnd(websocket, self._kept, self.resume_grace_s)
        client = LiveClient(end, session, inbox, recorder, name)
        running = session.task = asyncio.create_task(self._run_session(client), name="session")
        self._live.add(session)
        self._running[client] = running
        await self._serve_connection(client, end.newest, running)

    # --- connections ----------------------------------------------------------------------------

    async def _resume(self, websocket: WebSocket, session_id: str, needs: Needs) -> None:
        """Continue a session over this connection, if its first message has the secret."""
        try:
            request = await resume_request(websocket)
            others, identity = self._others, identity_of(websocket)
            is_elsewhere = others is not None and not self._live.find(session_id, Kind.DUPLEX)
            path = f"/ws/duplex/{session_id}?{RESUME_QUERY}=1"
            if is_elsewhere and others and await others.serve(websocket, session_id, path, write(request), identity):
                self._metrics.record_resumption("forwarded")
                return
            found = self._client_of(session_id, request.token, identity)
            if found is None and self.resume_grace_s and not self._live.draining:
                taken = await take_session(self._slots, session_id, request, identity, needs)
                if taken is not None:
                    self._metrics.record_resumption("taken over")
                    await self._serve_taken(websocket, session_id, identity, taken)
                    return
            if found is None:
                raise SessionEnd(TRY_RESUME_AGAIN) if self._live.draining else refused_token()
            client, running = found
            connection = client.end.resume(websocket, request)
        except ClientDisconnected:
            self._metrics.record_connection_end(CLIENT_GONE.how)
            return
        except SessionEnd as end:
            await close_socket(websocket, end.close, self._metrics)
            return
        except TakeoverError as error:
            LOG.warning("session %s: %s", session_id, error)
            await close_socket(websocket, TRY_RESUME_AGAIN, self._metrics)
            return
        except WireError as error:
            self._metrics.record_resumption("refused")
            await close_socket(websocket, resume_refused(error), self._metrics)
            return
        client.inbox.move(bytes_of(websocket))
        self._metrics.record_resumption("resumed")
        LOG.info("session %s goes on over another connection", session_id)
        await self._serve_connection(client, connection, running)

    async def _serve_taken(
        self, websocket: WebSocket, session_id: str, identity: Identity, taken: TakenSession
    ) -> None:
        """Serve the first connection here of a session that this gateway has taken over."""
        session = LiveSession(session_id, Kind.DUPLEX, identity, taken.pending, needs=taken.lease.needs)
        recorder = Recorder(self._recordings, Kind.DUPLEX, session_id, identity)
        end = ClientEnd(websocket, self._kept, self.resume_grace_s)
        connection = end.take(taken.answer, taken.tokens, taken.new_token)
        inbox = Inbox(self._budget, MAX_BUFFERED, bytes_of(websocket))
        client = LiveClient(end, session, inbox, recorder, f"{session_id}-{secrets.token_hex(4)}")
        running = session.task = asyncio.create_task(self._run_session(client, taken), name="session")
        self._live.add(session)
        self._running[client] = running
        await self._serve_connection(client, connection, running)

    def _client_of(
        self, session_id: str, token: str, identity: Identity
    ) -> "tuple[LiveClient, asyncio.Task[SocketClose]] | None":
        """The client whose session a client with this secret and identity continues; None if there is none."""
        for client, running in self._running.items():
            if client.session.session_id != session_id or not client.end.accepts(token):
                continue
            owner = client.session.identity
            if not running.done() and (not owner.has_key or owner.owner == identity.owner):
                return client, running
        return None

    async def _serve_connection(
        self, client: LiveClient, connection: Attachment, running: "asyncio.Task[SocketClose]"
    ) -> None:
        """Serve a session until it is over, or goes on over another connection."""
        try:
            close = await self._run_tasks(client, connection, running)
            await close_socket(connection.websocket, close, self._metrics)
        finally:
            if not connection.replaced.is_set():
                client.recorder.end()
                client.end.close()
                self._live.remove(client.session)
                del self._running[client]
        if close is not REPLACED:
            LOG.info("session %s ended: %s", client.session.session_id, close.how)

    async def _run_tasks(
        self, client: LiveClient, connection: Attachment, running: "asyncio.Task[SocketClose]"
    ) -> SocketClose:
        """Run the session beside the tasks of one connection, until the first of them ends. Returns: how to close."""
        websocket = connection.websocket
        reading = asyncio.create_task(read_messages(client, connection), name="read")
        watching = asyncio.create_task(until_gone(websocket), name="watch")
        writing = asyncio.create_task(client.end.write(connection), name="write")
        replaced = asyncio.create_task(connection.replaced.wait(), name="replaced")
        tasks = (reading, watching, writing, replaced)
        try:
            await asyncio.wait((running, *tasks), return_when=asyncio.FIRST_COMPLETED)
            if client.end.is_kept and not running.done():
                if writing.done():
                    reading.cancel()  # the client does not read
                close = await wait_for_return(
                    client, connection, (running, reading, replaced), self.resume_grace_s, self._metrics
                )
                if close is not REPLACED:
                    client.end.close()  # a client that comes now, while the session ends, is refused
                if close is not None:
                    return close
            if reading.done():
                client.inbox.close()
                if client.session.lease is not None:
                    # Messages sent right before the disconnect, such as `stop`, are still forwarded.
                    await asyncio.wait((running,), timeout=CLOSE_TIMEOUT_S)
            if not running.done():
                return CLIENT_GONE
            if running.cancelled():
                return client.session.forced_close or CLIENT_GONE
            return running.result()
        finally:
            ended = tasks if connection.replaced.is_set() else (running, *tasks)
            for task in ended:
                task.cancel()
            await asyncio.gather(*ended, return_exceptions=True)
            if running in ended:
                client.inbox.clear()

    async def _run_session(self, client: LiveClient, taken: TakenSession | None = None) -> SocketClose:
        """Run the session until it is over. Returns: how to close the client's connection.

        taken: the session was taken over from another gateway.
        """
        try:
            if client.session.kind is Kind.STREAMING:
                return await self._take_turns(client)
            if client.session.kind is Kind.CHAT:
                await self._wait_for_request(client.inbox)
            return await self._converse(client, client.inbox, taken)
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
                await send_own(client.end.newest.websocket, message)
                if isinstance(error, TurnIdleError):
                    continue
            await inbox.get()

    async def _converse(
        self, client: LiveClient, source: MessageSource, taken: TakenSession | None = None
    ) -> SocketClose:
        """Get a slot, connect to its worker, relay, and give the slot back. taken: the session has all of this."""
        session = client.session

        async def connect(lease: WorkerLease) -> ClientConnection:
            return await open_link(self._slots.http, lease, session.kind)

        request_type = request_type_of(session.kind, session.session_id)
        if taken is None:
            pending = self._slots.submit(request_type, session.session_id, session.identity, session.needs)
        else:
            pending = taken.pending
        session.pending = pending
        journal = SessionJournal(self._journals) if session.kind is Kind.DUPLEX else None
        n_losses, n_repeated, is_open, is_first = 0, 0, False, True
        handover: Handover | None = None
        if journal is not None:
            session.handover = handover = Handover(self._slots, pending, connect, client.end, journal)
        try:
            if taken is None:
                lease, link = await self._slots.open(pending, connect, partial(send_own, client.end.newest.websocket))
            else:
                lease, link, is_first = taken.lease, taken.link, False
                self._metrics.record_session_start(request_type, 0.0)
                n_repeated = taken.answer.n_repeated
                if journal is not None and taken.journal is not None:
                    journal.restore(*taken.journal)
                    taken.journal[1].clear()  # otherwise this session would hold the journal in memory until its end
                elif journal is not None:
                    journal.keep(False)  # it lacks what the session began with
            client.inbox.limit(MAX_IN_FLIGHT)
            is_open = True
            while True:
                try:
                    ends = RelayEnds(client.end, source, link, lease, journal, n_repeated)
                    n_repeated = 0
                    outcome = await self._relay(client, ends, handover, is_first=is_first)
                    if isinstance(outcome, SocketClose):
                        return outcome
                    lease, link, is_first = outcome.lease, outcome.link, False
                    continue
                except WorkerLostError as error:
                    n_losses += not isinstance(error, WorkerDrainsError)
                    if journal is None or not journal.can_rebuild or n_losses > MAX_LOSSES:
                        raise
                    LOG.warning("session %s moves: %s", session.session_id, error)
                    lost, is_first = error, False
                lease, link = await move_session(self._slots, pending, connect, client.end, journal, lost)
        finally:
            session.handover = None
            if journal is not None:
                journal.clear()
            if is_open:
                self._metrics.record_session_end(request_type, self._slots.dispatcher.held(pending))
            self._slots.dispatcher.finish(pending)
            session.pending = None

    async def _relay(
        self, client: LiveClient, ends: RelayEnds, handover: Handover | None, *, is_first: bool
    ) -> SocketClose | Successor:
        """Relay until the worker ends the session, or another one takes over; close the connection to the worker."""
        graceful = True
        try:
            if is_first:
                await send_own(client.end.newest.websocket, QueueDone())

            def intercept(data: Data) -> bool:
                return client.end.acknowledge(data) or self._diagnostics.intercept(data, client.diagnostics_name)

            session, workers = client.session, self._slots.dispatcher.workers
            relay = Relay(ends, session, workers, self._metrics, intercept, client.recorder)
            self._relays[session] = relay
            handing = None if handover is None else asyncio.create_task(handover.run(relay.hold), name="handover")
            ended = await relay.run(handing)
            if isinstance(ended, Successor):
                graceful = False  # which does not wait
                return ended
            return SocketClose(ended.code, ended.reason, ended.reason if ended.reason in REASONS else "ended")
        except WorkerLostError:
            graceful = False
            raise
        finally:
            self._relays.pop(client.session, None)
            if client.session.forced_close is HANDED_OVER:
                ends.link.transport.abort()  # without a close frame, so that the worker keeps the session
            else:
                await close_link(ends.link, graceful=graceful)
