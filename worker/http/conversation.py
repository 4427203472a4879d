"""One client's conversation: its messages in their order to the engine, one answer to each in the same order.

Messages wait in an inbox until their turn; units are decoded on a thread, the next one goes to the engine when the
last one is answered (`backlog: keep`) or at once (`catch_up`: whoever is behind only listens until it has caught up).
An interrupt acts when it is read and is answered at its turn. Knows the order of things and what the session protocol
promises. Does not know sockets, JSON or tensors.
"""

import asyncio
import logging
import time
from collections import deque
from concurrent.futures import Future
from typing import Any, NamedTuple

from worker.engine import EngineError
from worker.http.error_codes import code_of
from worker.http.metrics import WorkerMetrics
from worker.http.unit_message import UnitClock, partial_message, result_message
from worker.loop.results import Event, Failure, PartialResult, UnitResult
from worker.loop.sessions import SystemPrompt
from worker.protocol.codes import CloseReason, ErrorCode
from worker.protocol.messages import (
    AudioChunk,
    ClientDiagnostic,
    ClientMessage,
    Error,
    Interrupt,
    Interrupted,
    Pause,
    Paused,
    Prepare,
    Prepared,
    Resume,
    Resumed,
    ServerMessage,
    Spec,
    Stop,
    Stopped,
    Timeout,
    VideoFrame,
)
from worker.protocol.wire import WireError
from worker.service import Service, SlotLease

LOG = logging.getLogger(__name__)
NORMAL, FAILED, RESTART = 1000, 1011, 1012  # WebSocket close codes
MAX_FRAMES = 32  # pictures that came by themselves and wait for their sound
MAX_UNSENT = 8  # messages; a client that does not read gets nothing further answered
MIN_BYTES = 1024  # that a message takes up in memory, however short it is


class ConversationEnd(NamedTuple):
    """How a conversation ends. code: the socket's close code."""

    code: int
    reason: str


class PendingMessage(NamedTuple):
    """A message that waits for its turn. n_bytes: the room it takes."""

    message: ClientMessage | WireError
    n_bytes: int
    received: float


class Conversation:
    """Give it every message with `take`, run `run`, and send what `outbox` holds.

    outbox: messages to send with the format they go in. paused: takes no units now. lease: the slot, from outside.
    farewell: how it ends if `run` is cancelled.
    """

    def __init__(self, service: Service, metrics: WorkerMetrics, name: str):
        self.name, self._service, self._metrics = name, service, metrics
        self.outbox: asyncio.Queue[tuple[ServerMessage, Spec]] = asyncio.Queue()
        self.paused = False
        self.n_units = 0
        self.farewell = ConversationEnd(NORMAL, "cancelled")
        self.lease: SlotLease | None = None
        self._loop = asyncio.get_running_loop()
        self._inbox: deque[PendingMessage] = deque()
        self._arrived = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._n_bytes = 0
        self._spec = Spec()
        self._speaks = False
        self._prepared = False
        self._pause_ends: float | None = None
        self._pause_timeout = 0.0
        self._frames: list[VideoFrame] = []
        self._n_frame_bytes = 0
        self._in_flight: deque[UnitClock] = deque()
        self._answered = asyncio.Event()
        self._turn_open = False
        self._break_open = False
        self._n_parts = 0
        self._broken: Exception | None = None

    # --- what comes in -------------------------------------------------------------------------

    async def take(self, message: ClientMessage | WireError, n_bytes: int, received: float) -> None:
        """One message, in the order they came; waits while too much is waiting already. received: monotonic s."""
        await self._room.wait()
        if isinstance(message, Interrupt):
            self._interrupt()
        n_bytes = max(n_bytes, MIN_BYTES)
        self._inbox.append(PendingMessage(message, n_bytes, received))
        self._n_bytes += n_bytes
        if self._n_bytes > self._service.settings.max_backlog:
            self._room.clear()
        self._arrived.set()

    def emit(self, event: Event) -> None:
        """The engine's events, on its thread."""
        self._loop.call_soon_threadsafe(self._on_event, event)

    async def run(self) -> ConversationEnd:
        """Answer messages until the conversation is over by its own rules."""
        while True:
            waiting = await self._next()
            if isinstance(waiting, ConversationEnd):
                return waiting
            if self.outbox.qsize() > MAX_UNSENT:
                await self.outbox.join()
            try:
                over = await self._answer(waiting)
            except Exception as error:
                over = await self._tell_error(error)
            if over is not None:
                return over

    async def _next(self) -> PendingMessage | ConversationEnd:
        while not self._inbox or self._broken is not None:
            if self._broken is not None:
                return ConversationEnd(FAILED, CloseReason.ENGINE)
            self._arrived.clear()
            try:
                async with asyncio.timeout_at(self._deadline()):
                    await self._arrived.wait()
            except TimeoutError:
                return await self._time_out()
        if self._pause_ends is not None and self._loop.time() >= self._pause_ends:
            return await self._time_out()
        waiting = self._inbox.popleft()
        self._n_bytes -= waiting.n_bytes
        if self._n_bytes <= self._service.settings.max_backlog:
            self._room.set()
        return waiting

    def _deadline(self) -> float | None:
        if self._pause_ends is not None:
            return self._pause_ends
        idle = self._service.settings.idle_timeout
        return None if idle is None else self._loop.time() + idle

    async def _time_out(self) -> ConversationEnd:
        await self._until(0)
        reason = CloseReason.PAUSE if self.paused else CloseReason.IDLE
        seconds = self._pause_timeout if self.paused else self._service.settings.idle_timeout
        self._say(Timeout(reason=f"{reason} ({seconds:.1f}s)"))
        return ConversationEnd(NORMAL, reason)

    async def _answer(self, waiting: PendingMessage) -> ConversationEnd | None:
        message = waiting.message
        if isinstance(message, AudioChunk):
            await self._unit(message, waiting.received)
            return None
        if isinstance(message, VideoFrame):
            self._n_frame_bytes += waiting.n_bytes
            most = self._service.settings.max_backlog
            if len(self._frames) >= MAX_FRAMES or self._n_frame_bytes > most:
                self._n_frame_bytes -= waiting.n_bytes
                expected = f"at most {MAX_FRAMES} of {most} bytes together before a chunk"
                raise WireError(ErrorCode.BACKLOG_FULL, "video_frame", expected=expected, got="one more")
            self._frames.append(message)
            return None
        await self._until(0)
        match message:
            case WireError():
                raise message
            case Prepare():
                await self._prepare(message)
            case Pause():
                self._pause(message)
            case Resume():
                self.paused, self._pause_ends = False, None
                self._say(Resumed())
            case Interrupt():
                self._say(Interrupted())
            case Stop():
                self._say(Stopped(session_id=self.name))
                return ConversationEnd(NORMAL, CloseReason.STOPPED)
            case ClientDiagnostic():
                LOG.debug("session %s: a diagnostic message is ignored", self.name)
        return None

    # --- preparing -----------------------------------------------------------------------------

    async def _prepare(self, message: Prepare) -> None:
        given = dict(message.config)
        if message.max_slice_nums is not None:
            given["max_slice_nums"] = message.max_slice_nums
        config, notes = self._service.session_config(given)
        self._service.check_prompt(message.system_prompt)
        async with self._service.preparing:
            prompt = await asyncio.to_thread(self._prompt, message)
        preparing = self._handle.prepare(prompt, config)  # up to here the context is as it was
        self._prepared = False
        await asyncio.wrap_future(preparing)
        self._prepared, self._spec = True, message.spec
        self._speaks = config.generate_audio and prompt.voice is not None
        self._turn_open = self._break_open = self.paused = False
        self._pause_ends = None
        self._frames.clear()
        self._n_frame_bytes = 0
        self.n_units = self._n_parts = 0
        self._say(
            Prepared(
                prompt_length=len(prompt.prefix) + len(prompt.suffix),
                session_id=self.name,
                spec=message.spec,
                notes=notes,
            )
        )

    def _pause(self, message: Pause) -> None:
        default = self._service.settings.pause_timeout
        self._pause_timeout = default if message.timeout is None else message.timeout
        self.paused, self._pause_ends = True, self._loop.time() + self._pause_timeout
        self._say(Paused(timeout=self._pause_timeout))

    def _prompt(self, message: Prepare) -> SystemPrompt:
        service = self._service
        if message.ref_audio_path is not None:
            heard = service.reference(named=message.ref_audio_path)
        else:
            heard = service.reference(samples=message.ref_audio())
        own = message.tts_ref_audio_base64
        spoken = service.reference(samples=message.tts_ref_audio()) if own else heard
        return SystemPrompt.of(message.system_prompt, heard and heard.heard, spoken and spoken.voice)

    # --- units ---------------------------------------------------------------------------------

    async def _unit(self, chunk: AudioChunk, received: float) -> None:
        keep = self._spec.backlog == "keep"
        await self._until(0 if keep else self._handle.most_waiting - 1)
        clock = UnitClock(received, time.monotonic())
        frames, self._frames, self._n_frame_bytes = self._frames, [], 0
        try:
            if not self._prepared:
                raise _not_now(ErrorCode.NOT_PREPARED, "Not prepared yet")
            if self.paused:
                raise _not_now(ErrorCode.PAUSED, "Worker is paused")
            self._in_flight.append(clock)
            try:
                await asyncio.wrap_future(await asyncio.to_thread(self._send, chunk, frames))
            except BaseException:
                if clock in self._in_flight:  # an engine that breaks down answers it before it is refused
                    self._in_flight.remove(clock)
                raise
        except Exception:
            await self._until(0)  # what came before is answered before
            raise
        if keep:
            await self._until(0)

    def _send(self, chunk: AudioChunk, frames: list[VideoFrame]) -> "Future[None]":
        """Decode a unit and hand it to the engine; takes its time."""
        pictures = [*(frame.picture() for frame in frames), *chunk.pictures()]
        return self._handle.send(
            chunk.samples(), pictures, force_listen=chunk.force_listen, max_slice_nums=chunk.max_slice_nums
        )

    async def _until(self, n: int) -> None:
        """Wait until at most so many units are in flight."""
        while len(self._in_flight) > n:
            self._answered.clear()
            await self._answered.wait()

    def _on_event(self, event: Event) -> None:
        """On the loop's thread, in the order the engine told."""
        if self.lease is None:  # over: nobody is there to hear it
            return
        if isinstance(event, PartialResult):
            if self._spec.partial_results and self._in_flight:
                self._n_parts += 1
                self._say(partial_message(event, self._n_parts))
            return
        if not self._in_flight:  # nobody asked: the engine tells everyone that it broke down
            if isinstance(event, Failure):
                self._say_error(event.error)
                self._broken = event.error
                self._arrived.set()
            return
        clock, n_parts, self._n_parts = self._in_flight.popleft(), self._n_parts, 0
        self._answered.set()
        if isinstance(event, UnitResult):
            self._on_result(event, clock, n_parts)
        elif isinstance(event, Failure):
            if not self._handle.is_live:
                self._prepared = False
            self._say_error(event.error)
            if isinstance(event.error, EngineError):
                self._broken = event.error
                self._arrived.set()

    def _on_result(self, event: UnitResult, clock: UnitClock, n_parts: int) -> None:
        self.n_units += 1
        # What was broken off before anything of it was heard is no turn that ends.
        ends_turn = event.end_of_turn and (self._turn_open or not event.is_listen or n_parts > 0)
        self._turn_open = not event.is_listen and not event.end_of_turn
        if self._break_open and not self._turn_open:
            # It has done its work, or came when there was nothing to break off: the next turn is not its business.
            self._break_open = False
            _forget(self._handle.clear_break())
        n_behind = sum(isinstance(one.message, AudioChunk) for one in self._inbox) + len(self._in_flight)
        message = result_message(
            event, clock, ends_turn=ends_turn, speaks=self._speaks, n_parts=n_parts, n_behind=n_behind
        )
        self._metrics.unit(event, message)
        self._say(message)

    def _interrupt(self) -> None:
        if self._prepared and (self._turn_open or self._in_flight):
            self._break_open = True
            _forget(self._handle.break_speech())

    def end(self, error: Error, farewell: ConversationEnd) -> None:
        """Say why; to be called before `run` is cancelled."""
        self._say(error)
        self.farewell = farewell

    # --- what goes out -------------------------------------------------------------------------

    def _say(self, message: ServerMessage) -> None:
        self.outbox.put_nowait((message, self._spec))

    def _say_error(self, error: Exception) -> None:
        code = code_of(error)
        if code is ErrorCode.INTERNAL:
            LOG.error("session %s: %s", self.name, error, exc_info=error)
        self._metrics.error(code)
        self._say(Error.of(error, code))

    async def _tell_error(self, error: Exception) -> ConversationEnd | None:
        """Returns: the end of the conversation, if the error is one."""
        await self._until(0)
        self._say_error(error)
        return ConversationEnd(FAILED, CloseReason.ENGINE) if isinstance(error, EngineError) else None

    @property
    def n_rows(self) -> int:
        """Context rows that the session holds."""
        return self.lease.handle.n_rows if self.lease is not None else 0

    @property
    def _handle(self) -> Any:
        return self.lease.handle


def _not_now(code: ErrorCode, text: str) -> WireError:
    """Clients look for these words."""
    return WireError(code, "audio_chunk", expected="a prepared session that is not paused", got=code, text=text)


def _forget(asked: "Future[None]") -> None:
    """Nobody waits for it; whether it still applies is the engine's to know."""
    asked.add_done_callback(lambda done: done.exception())
