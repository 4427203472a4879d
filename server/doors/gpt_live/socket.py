"""The connections of GPT-Live sessions, from the handshake to the close. Contains no reaction to events."""

import asyncio
import logging
import secrets
import time
from typing import NamedTuple

import numpy as np
from starlette.websockets import WebSocket

from server.access.identity import identity_of
from server.access.shares import run_shared
from server.dispatch.dispatcher import PendingSession
from server.doors.core.door_needs import needs_asked
from server.doors.core.door_ticket import accept_socket, ticket_within_wait
from server.doors.core.event_writer import ClientGoneError, EventWriter
from server.doors.errors import ApiError
from server.doors.gpt_live.client_events import SessionStart, read_event
from server.doors.gpt_live.output_timeline import RATE
from server.doors.gpt_live.server_events import GptLiveEventSender
from server.doors.gpt_live.session import GptLiveCloseError, GptLiveRefusedError, GptLiveSession, GptLiveTrack
from server.doors.live.client_channel import ClientChannel, WebSocketChannel
from server.doors.live.door_context import LARGE_EVENT, DoorContext
from server.doors.live.drain_wait import DrainWait
from server.doors.live.ends import GOING_AWAY, IDLE, MAX_FRAME, TOO_BIG, end_of
from server.doors.live.event_error import EventError, EventRefusedError
from server.doors.live.session_tasks import SessionTasks, first_of
from server.doors.live.unit_run import run_units
from server.live.closes import DRAINING, SessionEnd, SocketClose
from server.live.kinds import Kind
from server.live.live_sessions import LiveSession
from server.live.recorder import Recorder
from server.live.worker_link import WorkerLostError
from worker.protocol.codes import CloseCode

LOG = logging.getLogger(__name__)
START_S = 30.0  # from the handshake to session.start
BLOCK_S = 0.1  # of sound in one event
POLL_S = 0.5


class GptLiveEnd(NamedTuple):
    """How a connection ends. reason: in `session.closed`. how: value of the metric's label. error: sent before it."""

    code: int
    reason: str
    how: str
    error: EventError | None = None


class GptLiveOverError(Exception):
    """The session is over. client_event_id: of the event that ended it."""

    def __init__(self, end: GptLiveEnd, client_event_id: str | None = None):
        super().__init__(end.reason)
        self.end, self.client_event_id = end, client_event_id


CLOSED = GptLiveEnd(CloseCode.NORMAL, "close_requested", "ended")
GONE = GptLiveEnd(CloseCode.NORMAL, "remote_hangup", "client gone")
EXPIRED = GptLiveEnd(CloseCode.NORMAL, "expired", "ended")
DRAINED = GptLiveEnd(GOING_AWAY, "connection_lost", "draining")
WORKER_LOST = GptLiveEnd(CloseCode.INTERNAL_ERROR, "connection_lost", "worker lost")
FRAME_TOO_BIG = GptLiveEnd(TOO_BIG, "connection_lost", "ended")
INTERNAL = GptLiveEnd(CloseCode.INTERNAL_ERROR, "connection_lost", "internal")


class GptLiveDoor:
    """All GPT-Live sessions over WebSockets."""

    def __init__(self, context: DoorContext):
        self._context = context

    async def serve(self, websocket: WebSocket) -> None:
        """Serve one connection, from the handshake to the close."""
        context = self._context
        live = LiveSession(f"adx_live_{secrets.token_hex(8)}", Kind.DUPLEX, identity_of(websocket))
        try:
            live.needs = needs_asked(websocket)
            refusal = context.admission.refusal(websocket, "audio_duplex")
            if refusal is not None:
                raise ApiError(403, refusal)
            pending = await ticket_within_wait(context.slots, live)
        except ApiError as error:
            await websocket.send_denial_response(error.response())
            return
        await accept_socket(websocket, context.slots, pending)
        await GptLiveConnection(WebSocketChannel(websocket), context, live).serve(pending)


class GptLiveConnection:
    """One client's connection.

    Args:
        client: carries its events.
        context: the gateway's parts.
        live: its entry in the list of sessions.
        track: plays the session's sound; None: the client gets it in events.
    """

    def __init__(
        self, client: ClientChannel, context: DoorContext, live: LiveSession, track: GptLiveTrack | None = None
    ):
        self._client, self._context, self._live = client, context, live
        self._writer = EventWriter(client)
        self._send = GptLiveEventSender(self._writer.put)
        self._opened_at = self._accepted_at = time.monotonic()
        self._session = GptLiveSession(
            self._send,
            context.model_names,
            context.voices,
            live.identity,
            f"sess_{secrets.token_hex(12)}",
            int(time.time() + context.limits.session_s),
            time.monotonic,
            context.transcriber,
            context.live_barge_in_ms,
            track,
        )
        self._drain = DrainWait(time.monotonic)
        self._is_over = False

    @property
    def session_id(self) -> str:
        """The id that the client sees."""
        return self._session.id

    async def start(self, event: SessionStart) -> None:
        """Configure the session before its client is connected. Raises: EventError."""
        await self._session.handle(event)

    def hear(self, samples: np.ndarray) -> None:
        """Add sound of the client's track, [n] float32 at 16 kHz, if the session has started and is not over."""
        if self._session.is_started and not self._is_over:
            self._accepted_at = time.monotonic()
            self._live.touch()
            self._session.hear(samples)

    def drop(self) -> None:
        """Free the session, which does not begin."""
        self._session.stop()

    async def serve(self, pending: PendingSession) -> None:
        """Run the session as one of the gateway's, and close the connection after it. pending: its ticket."""
        live, slots = self._live, self._context.slots
        live.task = running = asyncio.create_task(self._run(pending), name="gpt-live")
        slots.live.add(live)
        try:
            await asyncio.wait((running,))
            over = _forced_end(live.forced_close or DRAINING) if running.cancelled() else running.result()
            slots.metrics.record_connection_end(over.end.how)
            await self._close(over)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            slots.live.remove(live)
            slots.dispatcher.finish(pending)
        LOG.info("session %s ended: %s", live.session_id, over.end.how)

    async def _run(self, pending: PendingSession) -> GptLiveOverError:
        """Run the session until it is over. Returns: how it ended."""
        try:
            async with SessionTasks() as tasks:
                for name, task in (
                    ("gpt-live-write", self._writer.run()),
                    ("gpt-live-read", self._read()),
                    ("gpt-live-gone", self._wait_gone()),
                    ("gpt-live-units", self._run_units(pending)),
                    ("gpt-live-detector", self._session.detector.run(self._session.on_heard)),
                    ("gpt-live-sound", self._send_sound()),
                    ("gpt-live-limits", self._watch()),
                ):
                    tasks.create_task(task, name=name)
        except BaseExceptionGroup as errors:
            if (over := first_of(errors, GptLiveOverError)) is not None:
                return over
            if first_of(errors, ClientGoneError) is not None:
                return GptLiveOverError(GONE)
            if (refused := first_of(errors, GptLiveRefusedError)) is not None:
                self._send.error(refused.error, refused.event_id)
                return GptLiveOverError(INTERNAL)
            LOG.exception("session %s", self._live.session_id)
        finally:
            self._is_over = True  # a call still passes on what its client sends
            self._session.stop()
        return GptLiveOverError(INTERNAL)

    async def _close(self, over: GptLiveOverError) -> None:
        """Send the last events and the close frame."""
        session = self._session
        if session.is_started:
            fields = {} if over.client_event_id is None else {"client_event_id": over.client_event_id}
            resource, usage = session.resource(), session.usage()
            if over.end.error is not None:
                self._send.error(over.end.error)
            self._send("session.closed", reason=over.end.reason, session=resource, usage=usage, **fields)
        await self._writer.close(over.end.code, over.end.reason)

    # --- the client ----------------------------------------------------------------------------

    async def _read(self) -> None:
        """Handle the client's events, strictly in order."""
        while True:
            frame = await self._client.receive()
            if frame["type"] == "websocket.disconnect":
                raise GptLiveOverError(GONE)
            self._live.touch()
            text = frame.get("text")
            if text is None:
                self._send.error(EventError("invalid_json", "event: expected a text frame, got a binary one"))
                continue
            if len(text) > MAX_FRAME:
                raise GptLiveOverError(FRAME_TOO_BIG)
            try:
                event = await run_shared(read_event, text) if len(text) > LARGE_EVENT else read_event(text)
            except EventRefusedError as refused:
                self._send.error(refused.error, refused.event_id)
                continue
            try:
                await self._session.handle(event)
                self._accepted_at = time.monotonic()
            except EventError as error:
                self._send.error(error, event.event_id)
            except GptLiveCloseError as close:
                raise GptLiveOverError(CLOSED, close.event_id) from None

    async def _wait_gone(self) -> None:
        """End the session when the connection is lost or hung up. Raises: GptLiveOverError."""
        is_asked = await self._client.wait_gone()
        raise GptLiveOverError(CLOSED if is_asked else GONE)

    async def _send_sound(self) -> None:
        """Send the reply's sound at the pace of the wall clock, silence included."""
        session = self._session
        await session.started.wait()
        started, n_sent = time.monotonic(), 0
        while True:
            n = int((time.monotonic() - started) * RATE) - n_sent
            if n > 0:
                session.send_sound(n)
                n_sent += n
            await asyncio.sleep(max(0.0, started + n_sent / RATE + BLOCK_S - time.monotonic()))

    async def _watch(self) -> None:
        """End the session at its limits. Raises: GptLiveOverError."""
        while True:
            await asyncio.sleep(POLL_S)
            now = time.monotonic()
            if now - self._opened_at >= self._context.limits.session_s:
                raise GptLiveOverError(EXPIRED)
            is_idle = now - self._accepted_at > self._context.limits.idle_s
            if is_idle or (now - self._opened_at > START_S and not self._session.configured.is_set()):
                raise GptLiveOverError(GptLiveEnd(IDLE.code, "expired", IDLE.how))
            is_draining = self._context.slots.live.draining
            if self._drain.is_over(is_draining=is_draining, is_speaking=self._session.is_speaking):
                raise GptLiveOverError(DRAINED)

    # --- the worker ----------------------------------------------------------------------------

    async def _run_units(self, pending: PendingSession) -> None:
        """Keep a worker's session. Raises: GptLiveOverError once there is none."""
        context, live = self._context, self._live
        recorder = Recorder(context.recordings, Kind.DUPLEX, live.session_id, live.identity)
        try:
            await run_units(context.slots, live, recorder, self._session, pending)
        except SessionEnd as end:
            raise _forced_end(end.close) from None
        except (WorkerLostError, TimeoutError):
            LOG.warning("session %s has lost its worker, and gets no other one", live.session_id)
        finally:
            recorder.end()
        raise GptLiveOverError(WORKER_LOST)


def _forced_end(close: SocketClose) -> GptLiveOverError:
    """The end of a session that the gateway ends."""
    end = end_of(close)
    if end.how == DRAINED.how:
        return GptLiveOverError(DRAINED)
    return GptLiveOverError(GptLiveEnd(end.code, "connection_lost", end.how, end.error))
