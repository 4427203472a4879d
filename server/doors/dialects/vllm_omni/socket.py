"""The socket of vLLM-Omni sessions, from the handshake to the close. Contains no reaction to events."""

import asyncio
import logging
import secrets
import time

from starlette.websockets import WebSocket

from server.access.identity import identity_of
from server.dispatch.dispatcher import PendingSession
from server.doors.core.door_ticket import ticket_within_wait
from server.doors.core.event_writer import EventWriter
from server.doors.core.request_fields import RequestFields
from server.doors.core.unit_session import UnitSession
from server.doors.dialects.ends import FRAME_TOO_BIG, INTERNAL, SHUTDOWN, TIMEOUT, end_of, end_of_errors
from server.doors.dialects.vllm_omni.responses import OmniEvents
from server.doors.dialects.vllm_omni.session import OmniCloseError, OmniSession
from server.doors.dialects.vllm_omni.settings import OmniSettings
from server.doors.errors import ApiError
from server.doors.live.door_context import LARGE_EVENT, DoorContext
from server.doors.live.ends import GONE, MAX_FRAME, DoorEnd, SessionOverError
from server.live.closes import DRAINING
from server.live.kinds import Kind
from server.live.live_sessions import LiveSession
from server.live.recorder import Recorder
from worker.protocol.codes import CloseCode

LOG = logging.getLogger(__name__)
CLOSED = DoorEnd(CloseCode.NORMAL, "client_close", "ended")
START_S = 30.0  # from the handshake to the first settings
POLL_S = 0.5


class VllmOmniDoor:
    """All sessions with `duplex` in their query."""

    def __init__(self, context: DoorContext):
        self._context = context

    async def serve(self, websocket: WebSocket) -> None:
        """Serve one connection, from the handshake to the close."""
        context, query = self._context, websocket.query_params
        live = LiveSession(f"adx_omni_{secrets.token_hex(8)}", Kind.DUPLEX, identity_of(websocket))
        try:
            refusal = context.admission.refusal(websocket, "audio_duplex")
            if refusal is not None:
                raise ApiError(403, refusal)
            names = context.model_names
            model = names.resolve_for(query.get("model") or names.served, live.identity)
            pending = ticket_within_wait(context.slots, live)
        except ApiError as error:
            await websocket.send_denial_response(error.response())
            return
        await websocket.accept()
        connection = VllmOmniConnection(websocket, context, live, OmniSettings(model))
        if query.get("autostart") != "0":
            connection.session.configured.set()
        live.task = running = asyncio.create_task(connection.run(pending), name="vllm-omni")
        context.slots.live.add(live)
        try:
            await asyncio.wait((running,))
            end = running.result() if not running.cancelled() else end_of(live.forced_close or DRAINING)
            context.slots.metrics.record_connection_end(end.how)
            await connection.close(end)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            context.slots.live.remove(live)
            context.slots.dispatcher.finish(pending)
        LOG.info("session %s ended: %s", live.session_id, end.how)


class VllmOmniConnection:
    """One client's connection. session: reacts to its events."""

    def __init__(self, websocket: WebSocket, context: DoorContext, live: LiveSession, settings: OmniSettings):
        self._websocket, self._context, self._live = websocket, context, live
        self._writer = EventWriter(websocket)
        self._send = OmniEvents(self._writer.put, live.session_id)
        self._opened_at = self._received_at = time.monotonic()
        self.session = OmniSession(self._send, settings, context.voices, live.session_id, time.monotonic)

    async def run(self, pending: PendingSession) -> DoorEnd:
        """Run the session until it is over. Returns: how to close the connection."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._writer.run(), name="vllm-omni-write")
                tasks.create_task(self._read(), name="vllm-omni-read")
                tasks.create_task(self._watch(), name="vllm-omni-limits")
                tasks.create_task(self._run_units(pending), name="vllm-omni-units")
        except BaseExceptionGroup as errors:
            if (end := end_of_errors(errors)) is not None:
                return end
            LOG.exception("session %s", self._live.session_id)
        finally:
            self.session.lane.detach()
        return INTERNAL

    async def close(self, end: DoorEnd) -> None:
        """Send the last events and the close frame."""
        if end is not GONE:
            if end.error is not None:
                self._send.error(ApiError(500, end.error.message, code=end.error.code), None)
            kind = "session.expired" if end is TIMEOUT else "session.closed"
            self._send(kind, reason=end.reason)
        await self._writer.close(end.code, end.reason)

    async def _read(self) -> None:
        """Handle the client's events, strictly in order. Raises: SessionOverError."""
        while True:
            frame = await self._websocket.receive()
            if frame["type"] == "websocket.disconnect":
                raise SessionOverError(GONE)
            self._live.touch()
            text, event_id = frame.get("text"), None
            try:
                if text is None:
                    raise ApiError(400, "event: expected a text frame, got a binary one", code="invalid_json")
                if len(text) > MAX_FRAME:
                    raise SessionOverError(FRAME_TOO_BIG)
                data = text.encode("utf-8", "replace")
                is_large = len(data) > LARGE_EVENT
                given = (
                    await asyncio.to_thread(RequestFields.of_body, data) if is_large else RequestFields.of_body(data)
                )
                event_id = given.text("event_id", "")[:200] or None
                await self.session.handle(given)
                self._received_at = time.monotonic()
            except ApiError as error:
                self._send.error(error, event_id)
            except OmniCloseError:
                raise SessionOverError(CLOSED) from None

    async def _watch(self) -> None:
        """End the session at its limits. Raises: SessionOverError."""
        while True:
            await asyncio.sleep(POLL_S)
            now = time.monotonic()
            idle_s = self._context.limits.idle_s if self.session.configured.is_set() else START_S
            if now - self._received_at > idle_s or now - self._opened_at > self._context.limits.session_s:
                raise SessionOverError(TIMEOUT)
            if self._context.slots.live.draining:
                raise SessionOverError(SHUTDOWN)

    async def _run_units(self, pending: PendingSession) -> None:
        """Pass units to a worker. Raises: SessionOverError; SessionEnd; WorkerLostError."""
        context, live = self._context, self._live
        recorder = Recorder(context.recordings, Kind.DUPLEX, live.session_id, live.identity)
        units = UnitSession(context.slots, live, recorder)
        try:
            await units.open(pending)
            await self.session.configured.wait()
            self.session.lane.attach(units, self.session.prepare(), [])
            await units.run(self.session.lane)
            raise SessionOverError(TIMEOUT)  # the worker ended the session by itself
        finally:
            await units.close(graceful=False)
            recorder.end()
