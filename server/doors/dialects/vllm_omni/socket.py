"""The sockets of vLLM-Omni sessions, from the handshake to the close, and the sessions that may be resumed.

Contains no reaction to events.
"""

import asyncio
import logging
import secrets
import time
from contextlib import suppress
from typing import NoReturn

from starlette.websockets import WebSocket

from server.access.identity import Identity, identity_of
from server.access.shares import run_shared
from server.dispatch.dispatcher import PendingSession
from server.doors.core.door_needs import needs_asked
from server.doors.core.door_ticket import accept_socket, ticket_within_wait
from server.doors.core.event_writer import EventWriter, event_text
from server.doors.core.request_fields import RequestFields
from server.doors.dialects.choice import DUPLEX_PATH, TRUE
from server.doors.dialects.ends import (
    CLIENT_CLOSE,
    CONNECTION_LOST,
    FRAME_TOO_BIG,
    INTERNAL,
    SHUTDOWN,
    TIMEOUT,
    end_of_errors,
)
from server.doors.dialects.vllm_omni.running import OmniLink, OmniRun
from server.doors.dialects.vllm_omni.session import OmniCloseError
from server.doors.dialects.vllm_omni.settings import OmniSettings
from server.doors.errors import ApiError, invalid
from server.doors.live.door_context import LARGE_EVENT, DoorContext
from server.doors.live.ends import GOING_AWAY, GONE, MAX_FRAME, DoorEnd, SessionOverError
from server.doors.live.event_error import EventError
from server.doors.live.session_tasks import SessionTasks
from server.live.kinds import Kind
from server.live.live_sessions import LiveSession
from worker.protocol.codes import CloseCode

LOG = logging.getLogger(__name__)
RESUME_PATH = f"{DUPLEX_PATH}?resume=true"
START_S = 30.0  # from the handshake to the first settings
POLL_S = 0.5
REPLACED = DoorEnd(CloseCode.NORMAL, "session_replaced", "ended")
RESYNC_REQUIRED = "session.resync_required"
RESYNC = DoorEnd(CloseCode.NORMAL, "journal_gap", "ended")
FALSE = ("0", "false", "no", "off")
FINAL_CODES = (CloseCode.NORMAL, GOING_AWAY)  # of a client that does not come back; a lost connection has another one


class VllmOmniDoor:
    """All sessions with `duplex` in their query."""

    def __init__(self, context: DoorContext):
        self.context = context
        self._runs: dict[str, OmniRun] = {}

    async def serve(self, websocket: WebSocket) -> None:
        """Serve one connection, from the handshake to the close."""
        context, query = self.context, websocket.query_params
        identity, pending = identity_of(websocket), None
        live = LiveSession(f"adx_omni_{secrets.token_hex(8)}", Kind.DUPLEX, identity)
        try:
            live.needs = needs_asked(websocket)
            refusal = context.admission.refusal(websocket, "audio_duplex")
            if refusal is not None:
                raise ApiError(403, refusal)
            names = context.model_names
            model = names.resolve_for(query.get("model") or names.served, identity)
            if query.get("autostart", "").lower() not in FALSE and query.get("resume", "").lower() not in TRUE:
                pending = await ticket_within_wait(context.slots, live)
        except ApiError as error:
            await websocket.send_denial_response(error.response())
            return
        await accept_socket(websocket, context.slots, pending)
        link = OmniLink(EventWriter(websocket))
        connection = OmniConnection(websocket, self, link, OmniRun(context, live, OmniSettings(model), link))
        if pending is not None:
            connection.run.session.configured.set()
            self.start(connection.run, pending)
        await connection.serve()

    def start(self, run: OmniRun, pending: PendingSession) -> None:
        """Begin a session. pending: its ticket."""
        session_id = run.live.session_id
        self._runs[session_id] = run
        run.start(pending, lambda: self._runs.pop(session_id, None))

    def has(self, session_id: str) -> bool:
        """Whether this gateway has the session."""
        return session_id in self._runs

    def find(self, session_id: str, token: str, identity: Identity) -> OmniRun:
        """The session that a client resumes. Raises: ApiError."""
        run = self._runs.get(session_id)
        owner = None if run is None else run.live.identity
        if run is None or owner is None or not run.is_running or (owner.has_key and owner.owner != identity.owner):
            text = f"session_id: expected a session that goes on, got {session_id[:60]}"
            raise ApiError(404, text, param="session_id", code="session_resume_expired")
        if not run.accepts(token):
            text = "resume_token: expected the session's newest one, got another"
            raise ApiError(400, text, param="resume_token", code="invalid_resume_token")
        return run


class OmniConnection:
    """One client's connection.

    Args:
        websocket: the connection, accepted.
        door: knows all sessions.
        link: the same connection, as its session sees it.
        run: the session that begins with the client's settings, unless the client resumes another one.
    """

    def __init__(self, websocket: WebSocket, door: VllmOmniDoor, link: OmniLink, run: OmniRun):
        self._websocket, self._door, self._link, self.run = websocket, door, link, run
        self._opened_at = time.monotonic()
        self._begun = asyncio.Event()  # the session runs
        self._is_elsewhere = False  # another gateway serves the connection, or is looked for

    async def serve(self) -> None:
        """Serve the client until the session or the connection is over."""
        if self.run.is_running:
            self._begun.set()
        try:
            end = await self._run()
        finally:
            self.run.detach(self._link)
        if not self._begun.is_set() and not self._is_elsewhere:
            self._door.context.slots.metrics.record_connection_end(end.how)
        await self._link.writer.close(end.code, end.reason)

    async def _run(self) -> DoorEnd:
        try:
            async with SessionTasks() as tasks:
                tasks.create_task(self._link.writer.run(), name="vllm-omni-write")
                tasks.create_task(self._read(), name="vllm-omni-read")
                tasks.create_task(self._wait_over(), name="vllm-omni-over")
        except BaseExceptionGroup as errors:
            if (end := end_of_errors(errors)) is not None:
                return end
            LOG.exception("session %s", self.run.live.session_id)
        self.run.end(INTERNAL)
        return INTERNAL

    async def _wait_over(self) -> NoReturn:
        """Wait for the session's end, or for a connection that takes this one's place. Raises: SessionOverError."""
        while not self._begun.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await self._begun.wait()
            if self._is_elsewhere:
                continue
            if not self._begun.is_set() and time.monotonic() - self._opened_at > START_S:
                await self._end(TIMEOUT)
            if not self._begun.is_set() and self._door.context.slots.live.draining:
                await self._end(SHUTDOWN)
        assert self.run.task is not None, "expected a session that runs"
        replaced = asyncio.create_task(self._link.replaced.wait(), name="vllm-omni-replaced")
        try:
            await asyncio.wait((self.run.task, replaced), return_when=asyncio.FIRST_COMPLETED)
        finally:
            replaced.cancel()
        raise SessionOverError(REPLACED if self._link.replaced.is_set() else self.run.task.result())

    async def _end(self, end: DoorEnd) -> NoReturn:
        """End the session and the connection. Raises: SessionOverError."""
        if self._begun.is_set() and self.run.task is not None:
            self.run.end(end)
            await asyncio.wait((self.run.task,))
        else:
            self.run.say_end(end)
        raise SessionOverError(end)

    # --- the client ----------------------------------------------------------------------------

    async def _read(self) -> None:
        """Handle the client's events, strictly in order. Raises: SessionOverError."""
        while True:
            frame = await self._websocket.receive()
            if frame["type"] == "websocket.disconnect":
                if frame.get("code") in FINAL_CODES and not self._link.replaced.is_set():
                    self.run.end(GONE)
                raise SessionOverError(GONE)
            if self._link.replaced.is_set():
                continue
            text, event_id = frame.get("text"), None
            try:
                if text is None:
                    raise ApiError(400, "event: expected a text frame, got a binary one", code="invalid_json")
                if len(text) > MAX_FRAME:
                    await self._end(FRAME_TOO_BIG)
                data = text.encode("utf-8", "replace")
                is_large = len(data) > LARGE_EVENT
                given = await run_shared(RequestFields.of_body, data) if is_large else RequestFields.of_body(data)
                event_id = given.text("event_id", "")[:200] or None
                await self._handle(given)
            except ApiError as error:
                self.run.send.error(error, event_id)

    async def _handle(self, given: RequestFields) -> None:
        """React to an event. Raises: ApiError; SessionOverError."""
        kind = given.text("type")
        if kind == "session.resume":
            await self._resume(given)
            return
        session = self.run.session
        if kind == "session.event_ack":
            number = given.whole("server_event_seq", 0)
            if number is None or not self.run.acknowledge(number):
                raise invalid("server_event_seq", expected="that of an event", got=number, code="invalid_event_ack")
        else:
            try:
                await session.handle(given)
            except OmniCloseError:
                await self._end(CLIENT_CLOSE)
        self.run.accept()
        if session.configured.is_set() and not self._begun.is_set():
            await self._begin()

    async def _begin(self) -> None:
        """Begin the session that the client has configured. Raises: SessionOverError without a slot."""
        try:
            pending = await ticket_within_wait(self._door.context.slots, self.run.live)
        except ApiError as refused:
            error = EventError("resource_exhausted", refused.message, type="rate_limit_error")
            await self._end(DoorEnd(CloseCode.TRY_AGAIN_LATER, "error", "queue full", error))
        self._door.start(self.run, pending)
        self._begun.set()

    async def _resume(self, given: RequestFields) -> None:
        """Continue a session over this connection.

        Raises: ApiError; SessionOverError if events are missing, and after another gateway has served the connection.
        """
        if self._begun.is_set():
            text = "session.resume: expected it as the first event of a connection, got it later"
            raise ApiError(400, text, code="unsupported_session_resume")
        try:
            session_id, token = given.text("session_id"), given.text("resume_token")
            last_number = given.whole("last_received_server_event_seq", 0) or 0
        except ApiError as error:
            error.code = "invalid_session_resume"
            raise
        identity, metrics = self.run.live.identity, self._door.context.slots.metrics
        others = self._door.context.others
        if others is not None and not identity.is_forwarded and not self._door.has(session_id):
            fields = {"session_id": session_id, "resume_token": token, "last_received_server_event_seq": last_number}
            first, self._is_elsewhere = event_text({"type": given.text("type"), **fields}), True
            if await others.serve(self._websocket, session_id, RESUME_PATH, first, identity):
                metrics.record_resumption("forwarded")
                raise SessionOverError(GONE)
            self._is_elsewhere = False
        try:
            run = self._door.find(session_id, token, identity)
        except ApiError:
            metrics.record_resumption("refused")
            raise
        if not run.resume(self._link, token, last_number):
            metrics.record_resumption("refused")
            self._link.writer.put({"type": RESYNC_REQUIRED, "session_id": session_id, "reason": RESYNC.reason})
            run.end(CONNECTION_LOST)
            raise SessionOverError(RESYNC)
        metrics.record_resumption("resumed")
        self.run.release()
        self.run = run
        self._begun.set()
