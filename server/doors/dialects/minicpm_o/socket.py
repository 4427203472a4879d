"""The socket of sessions of the MiniCPM-o ecosystem, from handshake to close. Contains no reaction to messages."""

import asyncio
import logging
import secrets
import time
from typing import get_args

from starlette.websockets import WebSocket

from server.access.identity import identity_of
from server.access.shares import run_shared
from server.dispatch.dispatcher import PendingSession
from server.dispatch.queue import RequestType
from server.doors.core.chat_turn import error_of_end
from server.doors.core.door_needs import needs_asked
from server.doors.core.door_ticket import accept_socket
from server.doors.core.event_writer import EventWriter
from server.doors.core.unit_session import UnitSession
from server.doors.dialects.ends import (
    FRAME_TOO_BIG,
    INTERNAL,
    SHUTDOWN,
    STOPPED,
    TIMEOUT,
    end_of,
    end_of_errors,
)
from server.doors.dialects.minicpm_o.chats import ModeChats
from server.doors.dialects.minicpm_o.client_messages import ModeMessage, SessionClose, read_message
from server.doors.dialects.minicpm_o.forms import Mode, error_event
from server.doors.dialects.minicpm_o.units import WHOLE_UNITS, ModeUnits
from server.doors.errors import ApiError, invalid
from server.doors.live.door_context import LARGE_EVENT, DoorContext
from server.doors.live.drain_wait import DrainWait
from server.doors.live.ends import GONE, MAX_FRAME, DoorEnd, SessionOverError
from server.doors.live.session_tasks import SessionTasks
from server.live.closes import DRAINING, SessionEnd
from server.live.kinds import Kind
from server.live.live_sessions import LiveSession
from server.live.recorder import Recorder
from worker.protocol.codec import Message
from worker.protocol.codes import ErrorCode
from worker.protocol.session_id import session_id_of
from worker.protocol.wire import WireError

LOG = logging.getLogger(__name__)
REQUESTS: dict[Mode, RequestType] = {"audio": "audio_duplex", "video": "omni_duplex", "chat": "chat"}
PREFIXES: dict[Mode, str] = {"audio": "adx_rt", "video": "omni_rt", "chat": "chat_rt"}
# Messages that wait for a slot or for answers, and their characters; further ones are not read.
MAX_UNHANDLED, MAX_UNHANDLED_CHARS = 8, 2**22
START_S = 30.0  # from the slot to the first message
POLL_S = 0.5


class MiniCpmDoor:
    """All sessions with `mode` in their query."""

    def __init__(self, context: DoorContext):
        self._context = context

    async def serve(self, websocket: WebSocket) -> None:
        """Serve one connection, from the handshake to the close."""
        slots = self._context.slots
        try:
            mode, live = self._admitted(websocket)
            pending = None
            if mode != "chat":
                pending = slots.submit(REQUESTS[mode], live.session_id, live.identity, live.needs)
        except SessionEnd as refused:
            await websocket.send_denial_response(error_of_end(refused).response())
            return
        except ApiError as error:
            await websocket.send_denial_response(error.response())
            return
        live.pending = pending
        await accept_socket(websocket, slots, pending)
        connection = ModeConnection(websocket, self._context, live, mode)
        live.task = running = asyncio.create_task(connection.run(pending), name="modes")
        if pending is not None:  # a chat's turns are sessions of their own
            slots.live.add(live)
        try:
            await asyncio.wait((running,))
            end = running.result() if not running.cancelled() else end_of(live.forced_close or DRAINING)
            slots.metrics.record_connection_end(end.how)
            await connection.close(end)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            if pending is not None:
                slots.live.remove(live)
                slots.dispatcher.finish(pending)
        LOG.info("session %s ended: %s", live.session_id, end.how)

    def _admitted(self, websocket: WebSocket) -> tuple[Mode, LiveSession]:
        """The session that the query asks for. Raises: ApiError; SessionEnd."""
        context, query = self._context, websocket.query_params
        mode = next((one for one in REQUESTS if one == query["mode"]), None)
        if mode is None:
            raise invalid("mode", expected=" or ".join(get_args(Mode)), got=query["mode"][:60])
        refusal = context.admission.refusal(websocket, REQUESTS[mode])
        if refusal is not None:
            raise ApiError(403, refusal)
        names, identity = context.model_names, identity_of(websocket)
        names.resolve_for(query.get("model") or names.served, identity)
        if context.slots.live.draining:
            raise SessionEnd(DRAINING)
        made = f"{PREFIXES[mode]}_{time.time_ns() // 10**6}_{secrets.token_hex(4)}"
        kind = Kind.CHAT if mode == "chat" else Kind.DUPLEX
        session_id, needs = session_id_of(query.get("session_id"), made), needs_asked(websocket)
        return mode, LiveSession(session_id, kind, identity, needs=needs)


class ModeConnection:
    """One client's connection."""

    def __init__(self, websocket: WebSocket, context: DoorContext, live: LiveSession, mode: Mode):
        self._websocket, self._context, self._live = websocket, context, live
        self._writer = EventWriter(websocket)
        self._put = self._writer.put
        self._messages: asyncio.Queue[tuple[ModeMessage, int]] = asyncio.Queue(MAX_UNHANDLED)
        self._n_unhandled, self._taken = 0, asyncio.Event()  # characters
        self._units = ModeUnits(self._put, live.session_id, mode, time.monotonic)
        self._chats = ModeChats(self._put, live.session_id, context.turns.at(live.needs.labels), live.identity)
        self._is_chat = mode == "chat"
        limits = context.limits
        own_s = {"audio": limits.audio_mode_s, "video": limits.video_mode_s, "chat": None}[mode]
        self._session_s = limits.session_s if own_s is None else own_s
        self._drain = DrainWait(time.monotonic)
        self._begun_at: float | None = None  # when the slot was there
        self._received_at = time.monotonic()

    async def run(self, pending: PendingSession | None) -> DoorEnd:
        """Run the session until it is over. Returns: how to close the connection."""
        try:
            async with SessionTasks() as tasks:
                tasks.create_task(self._writer.run(), name="modes-write")
                tasks.create_task(self._read(), name="modes-read")
                tasks.create_task(self._watch(), name="modes-limits")
                running = self._run_chats() if pending is None else self._run_units(pending)
                tasks.create_task(running, name="modes-session")
        except BaseExceptionGroup as errors:
            if (end := end_of_errors(errors)) is not None:
                return end
            LOG.exception("session %s", self._live.session_id)
        return INTERNAL

    async def close(self, end: DoorEnd) -> None:
        """Send the last events and the close frame."""
        if end is not GONE:
            if end.error is not None:
                self._put(error_event(end.error.code, end.error.message))
            self._put({"type": "session.closed", "session_id": self._live.session_id, "reason": end.reason})
        await self._writer.close(end.code, end.reason)

    # --- the client ----------------------------------------------------------------------------

    async def _read(self) -> None:
        """Read the client's messages, also while the session waits. Raises: SessionOverError."""
        while True:
            frame = await self._websocket.receive()
            if frame["type"] == "websocket.disconnect":
                raise SessionOverError(GONE)
            self._received_at = time.monotonic()
            self._live.touch()
            text = frame.get("text")
            try:
                if text is None:
                    raise WireError(ErrorCode.BAD_MESSAGE, "message", expected="a text frame", got="a binary one")
                if len(text) > MAX_FRAME:
                    raise SessionOverError(FRAME_TOO_BIG)
                message = await run_shared(read_message, text) if len(text) > LARGE_EVENT else read_message(text)
            except WireError as error:
                self._put(error_event(error.code, str(error)))
                continue
            if isinstance(message, SessionClose):
                raise SessionOverError(STOPPED)
            self._n_unhandled += len(text)
            await self._messages.put((message, len(text)))
            while self._n_unhandled > MAX_UNHANDLED_CHARS:
                self._taken.clear()
                await self._taken.wait()

    async def _next(self) -> ModeMessage:
        """Remove the next message that waits."""
        message, n_chars = await self._messages.get()
        self._n_unhandled -= n_chars
        self._taken.set()
        return message

    async def _watch(self) -> None:
        """End the session at its limits. Raises: SessionOverError."""
        while True:
            await asyncio.sleep(POLL_S)
            now = time.monotonic()
            self._units.rest_if_quiet()
            if self._chats.is_answering:
                self._received_at = now
                continue
            if self._begun_at is not None:
                begun_at = self._begun_at
                is_idle = now - max(self._used_at, begun_at) > (
                    self._context.limits.idle_s if self._is_used else START_S
                )
                if is_idle or now - begun_at > self._session_s:
                    raise SessionOverError(TIMEOUT)
            is_draining = self._context.slots.live.draining
            if self._drain.is_over(is_draining=is_draining, is_speaking=self._units.is_speaking):
                raise SessionOverError(SHUTDOWN)

    @property
    def _used_at(self) -> float:
        """When a message last came, or a unit in a session that holds a slot; monotonic s."""
        return self._received_at if self._is_chat else self._units.used_at

    @property
    def _is_used(self) -> bool:
        return self._is_chat or self._units.is_prepared

    async def _notify(self, message: Message) -> None:
        """Send a message about the queue."""
        self._put({**message.model_dump(mode="json", exclude_none=True), "type": f"session.{message.type}"})

    def _begin(self) -> None:
        self._begun_at = time.monotonic()
        self._put({"type": "session.queue_done"})

    # --- the session ---------------------------------------------------------------------------

    async def _run_chats(self) -> None:
        """Answer conversations, one after the other."""
        self._begin()
        while True:
            message = await self._next()
            try:
                await self._chats.handle(message)
            except WireError as error:
                self._put(error_event(error.code, str(error)))

    async def _run_units(self, pending: PendingSession) -> None:
        """Pass units to a worker. Raises: SessionOverError; SessionEnd; WorkerLostError."""
        recorder = Recorder(self._context.recordings, Kind.DUPLEX, self._live.session_id, self._live.identity)
        units = UnitSession(self._context.slots, self._live, recorder, WHOLE_UNITS)
        try:
            await units.open(pending, self._notify)
            self._units.attach(units)
            self._begin()
            async with SessionTasks() as tasks:
                tasks.create_task(self._handle_units(), name="modes-units")
                await units.run(self._units)
                raise SessionOverError(TIMEOUT)  # the worker ended the session by itself
        finally:
            await units.close(graceful=False)
            recorder.end()

    async def _handle_units(self) -> None:
        while True:
            message = await self._next()
            try:
                await self._units.handle(message)
            except WireError as error:
                self._put(error_event(error.code, str(error)))
