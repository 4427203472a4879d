"""The socket of Realtime sessions, from the handshake to the close. Contains no reaction to events."""

import asyncio
import logging
import time
from functools import partial
from typing import Any

import numpy as np
from starlette.websockets import WebSocket

from server.access.identity import identity_of
from server.access.shares import run_shared
from server.dispatch.dispatcher import PendingSession
from server.doors.core.door_needs import needs_asked
from server.doors.core.door_ticket import MAX_WAIT_S, accept_socket, ticket_within_wait
from server.doors.core.event_writer import ClientGoneError, EventWriter
from server.doors.core.unit_session import UnitSession
from server.doors.errors import ApiError, invalid
from server.doors.live.client_channel import ClientChannel, WebSocketChannel
from server.doors.live.door_context import LARGE_EVENT, DoorContext
from server.doors.live.ends import (
    DRAINED,
    FRAME_TOO_BIG,
    GONE,
    IDLE,
    INTERNAL,
    MAX_FRAME,
    OVERLOADED,
    WORKER_LOST,
    DoorEnd,
    SessionOverError,
    end_of,
    expired,
    invalid_settings,
)
from server.doors.live.event_error import EventError, EventRefusedError
from server.doors.live.session_tasks import SessionTasks, first_of
from server.doors.realtime.events.client_events import read_event
from server.doors.realtime.events.server_events import EventSender
from server.doors.realtime.initial_config import initial_config
from server.doors.realtime.playback import SoundTrack
from server.doors.realtime.session import RealtimeSession, SessionContext
from server.doors.realtime.session_config import RealtimeConfig
from server.live.closes import DRAINING, SessionEnd
from server.live.kinds import Kind
from server.live.live_sessions import LiveSession
from server.live.recorder import Recorder
from server.live.worker_link import WorkerLostError

LOG = logging.getLogger(__name__)
MAX_FIRST_WAIT_S = 30.0  # for the first slot, if the estimate was too low
DRAIN_POLL_S = 0.5
SUBPROTOCOL = "realtime"


class RealtimeDoor:
    """All Realtime sessions over WebSockets."""

    def __init__(self, context: DoorContext):
        self._context = context

    async def serve(self, websocket: WebSocket) -> None:
        """Serve one connection, from the handshake to the close."""
        context = self._context
        try:
            config = self._admitted(websocket)
            needs, identity = needs_asked(websocket), identity_of(websocket)
            session = LiveSession(f"adx_rt_{time.time_ns():x}", Kind.DUPLEX, identity, needs=needs)
            pending = await ticket_within_wait(context.slots, session)
        except ApiError as error:
            await websocket.send_denial_response(error.response())
            return
        offered = websocket.scope.get("subprotocols", [])
        await accept_socket(websocket, context.slots, pending, SUBPROTOCOL if SUBPROTOCOL in offered else None)
        await RealtimeConnection(WebSocketChannel(websocket), context, session, config).serve(pending)

    def _admitted(self, websocket: WebSocket) -> RealtimeConfig:
        """The settings that the session begins with. Raises: ApiError."""
        query = websocket.query_params
        if query.get("intent") == "transcription":
            raise invalid("intent", expected="a conversation", got="transcription")
        refusal = self._context.admission.refusal(websocket, "audio_duplex")
        if refusal is not None:
            raise ApiError(403, refusal)
        names, identity = self._context.model_names, identity_of(websocket)
        model = query.get("model") or names.served
        return initial_config(names, identity, {**(identity.session or {}), "model": model})


class RealtimeConnection:
    """One client's connection.

    Args:
        client: carries its events.
        context: the gateway's parts.
        live: its entry in the list of sessions.
        config: settings at the start.
        track: plays the session's sound; None: the client gets it in events.
    """

    def __init__(
        self,
        client: ClientChannel,
        context: DoorContext,
        live: LiveSession,
        config: RealtimeConfig,
        track: SoundTrack | None = None,
    ):
        self._client, self._context, self._live = client, context, live
        self._writer = EventWriter(client)
        self._has_begun = False
        self._begun_at = self._accepted_at = time.monotonic()
        self._send = EventSender(self._writer.put)
        used = SessionContext(
            context.voices,
            context.turns.at(live.needs.labels),
            context.transcriber,
            live.identity,
            int(time.time() + context.limits.session_s),
            time.monotonic,
            context.slot,
            partial(context.usage.left, live.identity),
            context.picture_urls,
        )
        self._session = RealtimeSession(self._send, config, used, track)

    def drop(self) -> None:
        """Free the session, which does not begin."""
        self._session.stop()

    async def serve(self, pending: PendingSession) -> None:
        """Run the session as one of the gateway's, and close the connection after it. pending: its ticket."""
        live, slots = self._live, self._context.slots
        live.task = running = asyncio.create_task(self._run(pending), name="realtime")
        slots.live.add(live)
        try:
            await asyncio.wait((running,))
            end = end_of(live.forced_close or DRAINING) if running.cancelled() else running.result()
            slots.metrics.record_connection_end(end.how)
            await self._close(end)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            slots.live.remove(live)
            slots.dispatcher.finish(pending)
        LOG.info("session %s ended: %s", live.session_id, end.how)

    async def _run(self, pending: PendingSession) -> DoorEnd:
        """Run the session until it is over. Returns: how to close the connection."""
        lane = self._session.lane
        try:
            async with SessionTasks() as tasks:
                for name, task in (
                    ("realtime-write", self._writer.run()),
                    ("realtime-units", self._run_units(pending)),
                    ("realtime-detector", lane.detector.run(lane.on_heard)),
                    ("realtime-limits", self._watch()),
                    ("realtime-gone", self._wait_gone()),
                ):
                    tasks.create_task(task, name=name)
        except BaseExceptionGroup as errors:
            if (over := first_of(errors, SessionOverError)) is not None:
                return over.end
            if first_of(errors, ClientGoneError) is not None:
                return GONE
            LOG.exception("session %s", self._live.session_id)
        finally:
            self._has_begun = False  # a call still passes on what its client sends
            self._session.stop()
        return INTERNAL

    @property
    def session(self) -> RealtimeSession | None:
        """The session, from `session.created` to its end."""
        return self._session if self._has_begun else None

    def hear(self, samples: np.ndarray) -> None:
        """Add sound of the client's track, [n] float32 at 16 kHz, if the session has begun and is not over."""
        if self._has_begun:
            self._accepted_at = time.monotonic()
            self._live.touch()
            self._session.append_sound(samples)

    async def _close(self, end: DoorEnd) -> None:
        """Send what is unsent and the close frame."""
        if end.error is not None:
            self._send.error(end.error)
        await self._writer.close(end.code, end.reason)

    # --- the client ----------------------------------------------------------------------------

    async def _read(self) -> None:
        """Handle the client's events, strictly in order."""
        while True:
            event = await self._client.receive()
            self._live.touch()
            if event["type"] == "websocket.disconnect":
                raise SessionOverError(GONE)
            text = event.get("text")
            if text is None:
                expected = "a text frame with JSON"
                error = EventError("invalid_json", f"event: expected {expected}, got a binary frame")
                self._send.error(error)
                continue
            if len(text) > MAX_FRAME:
                raise SessionOverError(FRAME_TOO_BIG)
            try:
                given = await run_shared(read_event, text) if len(text) > LARGE_EVENT else read_event(text)
            except EventRefusedError as refused:
                self._send.error(refused.error, refused.event_id)
                continue
            if await self._session.handle(given):
                self._accepted_at = time.monotonic()

    async def _wait_gone(self) -> None:
        """End the session when the connection is lost, also before its events are read. Raises: SessionOverError."""
        await self._client.wait_gone()
        raise SessionOverError(GONE)

    # --- the worker ----------------------------------------------------------------------------

    async def _run_units(self, pending: PendingSession) -> None:
        """Keep a worker's session while the duplex lane needs one. Handles the client's events from the first on."""
        session = self._session
        recorder = Recorder(self._context.recordings, Kind.DUPLEX, self._live.session_id, self._live.identity)
        try:
            async with SessionTasks() as tasks:
                await self._run_in_slot(pending, recorder, tasks)
                while True:
                    session.lane_changed.clear()
                    if not session.is_duplex:
                        await session.lane_changed.wait()
                        continue
                    await self._run_in_slot(self._submit(), recorder, None)
        finally:
            recorder.end()

    def _submit(self) -> PendingSession:
        try:
            live = self._live
            return self._context.slots.submit("audio_duplex", live.session_id, live.identity, live.needs)
        except SessionEnd as end:
            raise SessionOverError(end_of(end.close)) from None

    async def _run_in_slot(self, pending: PendingSession, recorder: Recorder, reader: SessionTasks | None) -> None:
        """Run the duplex lane until it is left, or its worker is lost.

        reader: runs the task that reads the client's events; None: it runs already.
        """
        session, lane = self._session, self._session.lane
        units = UnitSession(self._context.slots, self._live, recorder)
        changed = asyncio.create_task(session.lane_changed.wait(), name="realtime-lane")
        running: asyncio.Task[None] | None = None
        try:
            async with asyncio.timeout(MAX_WAIT_S if reader is None else MAX_FIRST_WAIT_S):
                await units.open(pending)
            if reader is not None:
                await self._begin()
                self._has_begun = True
                reader.create_task(self._read(), name="realtime-read")
            if not session.is_duplex:
                return
            lane.attach(units, session.history() if reader is None else [])
            running = asyncio.create_task(units.run(lane), name="realtime-run")
            await asyncio.wait((running, changed), return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                running.result()
                raise SessionOverError(WORKER_LOST)  # the worker ended the session by itself
            lane.stop()
        except SessionEnd as end:
            raise SessionOverError(end_of(end.close)) from None
        except WorkerLostError as error:
            LOG.warning("session %s begins again: %s", self._live.session_id, error)
            lane.detach()
        except TimeoutError:
            raise SessionOverError(OVERLOADED) from None
        finally:
            others: list[asyncio.Task[Any]] = [changed] if running is None else [changed, running]
            for task in others:
                task.cancel()
            try:
                await asyncio.gather(*others, return_exceptions=True)
            finally:  # also if the client goes meanwhile, which cancels this task
                await units.close(graceful=False)

    async def _begin(self) -> None:
        """Send `session.created`. Raises: SessionOverError for settings of a secret that are not valid any more."""
        try:
            await self._session.begin()
        except EventError as error:
            raise SessionOverError(invalid_settings(error)) from None

    async def _watch(self) -> None:
        """End the session at its limits. Raises: SessionOverError."""
        while True:
            await asyncio.sleep(DRAIN_POLL_S)
            if self._session.is_duplex:
                self._session.lane.check_idle()
            now = time.monotonic()
            if now - self._begun_at >= self._context.limits.session_s:
                raise SessionOverError(expired(self._context.limits.session_s))
            if now - self._accepted_at > self._context.limits.idle_s:
                raise SessionOverError(IDLE)
            is_quiet = self._session.response is None and not self._session.is_playing
            if self._context.slots.live.draining and is_quiet:
                raise SessionOverError(DRAINED)
