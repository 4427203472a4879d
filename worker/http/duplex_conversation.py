"""One client's full-duplex conversation: passes its messages to the engine and answers each of them, both in order.

Messages wait in an inbox. Pictures and long sound are decoded on threads; pieces that fill no unit are answered without
the engine. The next unit is sent after the previous one is answered (`backlog: keep`) or immediately (`catch_up`; units
that are decided). An interrupt takes effect when it is received and is answered in order. Contains no sockets or JSON.
"""

import asyncio
import logging
import time
from collections import deque
from dataclasses import replace

from worker.early.pause_listener import PauseListener
from worker.engine_thread import EngineError
from worker.http.error_codes import code_of, not_now
from worker.http.idle_clock import IdleClock
from worker.http.inbox import InboxClosedError, MessageInbox, PendingMessage, WaitingFrames
from worker.http.metrics import WorkerMetrics
from worker.http.socket_conversation import ConversationEnd
from worker.http.system_prompts import adjustment, prepared_prompt, traced_spec
from worker.http.units.unit_input import check_decided, decided_message, decided_unit, decode_ahead, send_unit
from worker.http.units.unit_message import TurnCounters, UnitClock, partial_message, result_message
from worker.http.units.unsent_sound import UnsentSound
from worker.loop.command_queue import ignore_result
from worker.loop.prompt.system_prompt import SystemPrompt
from worker.loop.results import DecidedUnit, Event, Failure, InsertedText, PartialResult, UnitResult
from worker.loop.session_handle import SessionHandle
from worker.protocol.adjust_messages import Adjust, Adjusted
from worker.protocol.codec import Message
from worker.protocol.codes import CloseCode, CloseReason, ErrorCode
from worker.protocol.gateway_messages import Decided
from worker.protocol.messages import (
    AudioChunk,
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
    read_binary,
    read_text,
)
from worker.protocol.text_messages import InsertText, TextInserted
from worker.protocol.wire import WireError
from worker.service import Service
from worker.slots import SlotLease, SlotUse

LOG = logging.getLogger(__name__)
MAX_UNSENT = 8  # messages; a client that does not read them gets no further answers

Received = ClientMessage | WireError


class DuplexConversation:
    """A `SocketConversation` of units. paused: whether they are refused. n_units: the answered ones."""

    def __init__(self, service: Service, metrics: WorkerMetrics, name: str):
        self.name, self._service, self._metrics = name, service, metrics
        self.outbox: asyncio.Queue[tuple[Message, Spec]] = asyncio.Queue()
        self.paused = self._turn_open = self._interrupting = False
        self.n_units = self._n_parts = 0
        self.end_if_cancelled = ConversationEnd(CloseCode.NORMAL, "cancelled")
        self._lease: SlotLease | None = None
        self._session: SessionHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._inbox: MessageInbox[Received] = MessageInbox(service.settings.max_backlog)
        self._spec = self._spec_in = Spec()
        self._speaks = self._will_speak = False  # turns that are open; turns that begin
        self._prepared, self._prompt = False, SystemPrompt("", "")  # the prompt of the prepared session
        self._idle = IdleClock(service.settings.idle_timeout, self._loop.time)
        self._pauses, self._frames = PauseListener(), WaitingFrames(service.settings.max_backlog)
        self._inserting: asyncio.Future[InsertedText | Failure] | None = None
        self._answered, self._counters, self._unsent = asyncio.Event(), TurnCounters(), UnsentSound()
        self._in_flight: deque[UnitClock] = deque()
        self._decided: DecidedUnit | None = None  # decisions of the next unit

    async def start(self) -> None:
        """Open a session in a slot. Raises: SlotError without a free slot within 5 s; StateError; EngineError."""
        self._lease = await self._service.lease(self.name, SlotUse.DUPLEX)
        try:
            self._session = await self._lease.open(self.emit)
        except BaseException:
            self.leave()
            raise

    def leave(self) -> None:
        """Free the slot; later events of the engine are ignored."""
        self._pauses.close()
        lease, self._lease, self._session = self._lease, None, None
        if lease is not None:
            lease.close()

    # --- received messages ----------------------------------------------------------------------

    def parse(self, data: str | bytes) -> ClientMessage:
        """The message in a frame. Raises: WireError."""
        message = read_text(data) if isinstance(data, str) else read_binary(data, self._spec_in)
        check_decided(message, data)
        if isinstance(message, Prepare):
            self._spec_in = message.spec  # the messages after it may already use the encoding it requests
        return message

    async def receive(self, message: Received, n_bytes: int, received: float) -> None:
        """Append a message to the inbox; waits while the inbox is full. Arguments as in `SocketConversation`."""
        await self._inbox.wait_for_room()
        if isinstance(message, Interrupt):
            self._interrupt()
        if isinstance(message, AudioChunk):
            self._pauses.push(message)
        self._inbox.put(message, n_bytes, received)

    def emit(self, event: Event) -> None:
        """Accept an event of the engine, on the engine's thread."""
        self._loop.call_soon_threadsafe(self._on_event, event)

    async def run(self) -> ConversationEnd:
        """Answer messages until the conversation ends by itself."""
        while True:
            pending = await self._next()
            if isinstance(pending, ConversationEnd):
                return pending
            if self.outbox.qsize() > MAX_UNSENT:
                await self.outbox.join()
            try:
                end = await self._answer(pending)
            except Exception as error:
                end = await self._answer_error(error)
            if end is not None:
                return end

    async def _next(self) -> PendingMessage[Received] | ConversationEnd:
        ends_at = self._idle.ends_at(is_paused=self.paused)
        try:
            pending = await self._inbox.get(ends_at)
        except InboxClosedError:
            return ConversationEnd(CloseCode.INTERNAL_ERROR, CloseReason.ENGINE)
        except TimeoutError:
            return await self._time_out()
        return await self._time_out() if self._idle.is_past(ends_at) else pending

    async def _time_out(self) -> ConversationEnd:
        await self._wait_in_flight(0)
        reason = CloseReason.PAUSE if self.paused else CloseReason.IDLE
        seconds = self._idle.pause_s if self.paused else self._service.settings.idle_timeout
        self._send(Timeout(reason=f"{reason} ({seconds:.1f}s)"))
        return ConversationEnd(CloseCode.NORMAL, reason)

    async def _answer(self, pending: PendingMessage[Received]) -> ConversationEnd | None:
        message = pending.message
        if isinstance(message, AudioChunk):
            await self._unit(message, pending.received)
            self._idle.on_unit()
            return None
        if isinstance(message, VideoFrame):
            picture = self._frames.add(message, pending.n_bytes)
            if self._prepared and not self.paused:
                await decode_ahead(self._service.decoders, self._handle, self._frames, picture)
            return None
        if not isinstance(message, Decided):
            await self._wait_in_flight(0)
        match message:
            case WireError():
                raise message
            case Prepare():
                await self._prepare(message)
            case Adjust():
                await self._adjust(message)
            case InsertText():
                await self._insert_text(message)
            case Pause():
                self._pause(message)
            case Resume():
                self.paused = False
                self._idle.on_resume()
                self._send(Resumed())
            case Interrupt():
                self._send(Interrupted())
            case Stop():
                self._send(Stopped(session_id=self.name))
                return ConversationEnd(CloseCode.NORMAL, CloseReason.STOPPED)
            case Decided():
                self._decided = decided_unit(message)
        return None

    # --- preparing -----------------------------------------------------------------------------

    async def _prepare(self, message: Prepare) -> None:
        given = dict(message.config)
        if message.max_slice_nums is not None:
            given["max_slice_nums"] = message.max_slice_nums
        config, notes = self._service.session_config(given)
        if not message.deferred_finalize:
            notes.append("setting deferred_finalize has no effect: a unit is always finalized after its result")
        self._service.omni.check_prompt(message.system_prompt)
        async with self._service.preparing:
            prompt = await asyncio.to_thread(prepared_prompt, self._service, message)
        spec = traced_spec(self._service, self._handle.name, message.spec, notes)
        preparing = self._handle.prepare(prompt, config)  # an error before this line keeps the previous context
        self._prepared = False
        self._unsent = UnsentSound(await asyncio.wrap_future(preparing))
        await self._pauses.configure(config, starts_over=True)
        self._prepared, self._spec, self._prompt = True, spec, prompt
        self._speaks = self._will_speak = config.generate_audio and prompt.voice is not None
        self._turn_open = self._interrupting = self.paused = False
        self._idle.end_pause()
        self._frames.take()
        self._counters = TurnCounters()
        self.n_units = self._n_parts = 0
        n, ms = len(prompt.prefix) + len(prompt.suffix), self._service.start_after_ms(self._handle.name)
        self._send(Prepared(prompt_length=n, session_id=self.name, spec=spec, notes=notes, start_after_ms=ms))

    async def _adjust(self, message: Adjust) -> None:
        if not self._prepared:
            raise not_now(ErrorCode.NOT_PREPARED, "Not prepared yet", "adjust", "a prepared session")
        config = self._handle.config.adjusted(message.settings())
        if message.system_prompt is not None:
            self._service.omni.check_prompt(message.system_prompt)
        async with self._service.preparing:
            change = await asyncio.to_thread(adjustment, self._service, message, self._prompt)
        try:
            outcome = await asyncio.wrap_future(self._handle.adjust(replace(change, config=config)))
        finally:
            self._prepared = self._handle.is_live
        await self._pauses.configure(config, starts_over=False)
        self._prompt, self._will_speak = change.prompt or self._prompt, outcome.speaks
        if not self._turn_open:
            self._speaks = self._will_speak
        self._send(Adjusted.of(message, config.model_dump(mode="json"), outcome.from_unit, outcome.notes))

    async def _insert_text(self, message: InsertText) -> None:
        if not self._prepared:
            raise not_now(ErrorCode.NOT_PREPARED, "Not prepared yet", "insert_text", "a prepared session")
        inserting = self._inserting = self._loop.create_future()
        try:
            await asyncio.wrap_future(await asyncio.to_thread(self._handle.insert_text, message.role, message.text))
            event = await inserting
        finally:
            self._inserting = None
            self._prepared = self._handle.is_live
        if isinstance(event, Failure):
            raise event.error
        self._send(TextInserted(n_rows=event.n_rows))

    def _pause(self, message: Pause) -> None:
        seconds = self._service.settings.pause_timeout if message.timeout is None else message.timeout
        self._idle.on_pause(seconds)
        self.paused = True
        self._send(Paused(timeout=seconds))

    # --- units ---------------------------------------------------------------------------------

    async def _unit(self, chunk: AudioChunk, received: float) -> None:
        keep = self._spec.backlog == "keep" and self._decided is None
        await self._wait_in_flight(0 if keep else self._handle.max_waiting_units - 1)
        decided, self._decided = self._decided, None
        clock = UnitClock(received, time.monotonic(), is_replay=decided is not None)
        frames = self._frames.take()
        try:
            trial = await self._pauses.trial_of(chunk)
            if not self._prepared:
                raise not_now(ErrorCode.NOT_PREPARED, "Not prepared yet")
            if self.paused:
                raise not_now(ErrorCode.PAUSED, "Worker is paused")
            self._in_flight.append(clock)
            try:
                given = self._service.decoders, self._handle, self._unsent, chunk, frames, trial, decided
                sent = await send_unit(*given, may_hold=len(self._in_flight) == 1)
                if isinstance(sent, UnitResult):
                    self._on_event(sent)
                elif decided is None:
                    await asyncio.wrap_future(sent)
                else:  # the engine rebuilds several at once; one that it refuses comes after an error that ends this
                    ignore_result(sent)
                self._unsent.sent()
            except BaseException:
                self._unsent.refused()
                if clock in self._in_flight:  # a failing engine sends a Failure for the unit before refusing it
                    self._in_flight.remove(clock)
                raise
        except Exception:
            await self._wait_in_flight(0)  # earlier units are answered before this error
            ignore_result(self._handle.forget_ahead())  # pictures of the refused unit
            raise
        if keep:
            await self._wait_in_flight(0)

    async def _wait_in_flight(self, n: int) -> None:
        """Wait until at most `n` units are in flight."""
        while len(self._in_flight) > n:
            self._answered.clear()
            await self._answered.wait()

    def _on_event(self, event: Event) -> None:
        """Handle an event of the engine, on the event loop's thread, in the engine's order."""
        if self._session is None:  # the conversation is over
            return
        if isinstance(event, PartialResult):
            if self._spec.partial_results and self._in_flight:
                self._n_parts += 1
                self._send(partial_message(event, self._n_parts))
            return
        if self._inserting is not None and isinstance(event, InsertedText | Failure):
            if not self._inserting.done():
                self._inserting.set_result(event)
            return
        if not self._in_flight:
            if isinstance(event, Failure):  # a failing engine sends one to every session
                self._send_error(event.error)
                self._inbox.close()
            return
        clock, n_parts, self._n_parts = self._in_flight.popleft(), self._n_parts, 0
        self._answered.set()
        if isinstance(event, UnitResult):
            self._unsent.answered(event)
            self._on_result(event, clock, n_parts)
        elif isinstance(event, Failure):
            if not self._handle.is_live:
                self._prepared = False
            self._send_error(event.error)
            if isinstance(event.error, EngineError):
                self._inbox.close()

    def _on_result(self, event: UnitResult, clock: UnitClock, n_parts: int) -> None:
        self.n_units += not event.is_incomplete
        # A turn that was interrupted before the client received any of it does not end for the client.
        ends_turn = event.end_of_turn and (self._turn_open or not event.is_listen or n_parts > 0)
        if not event.is_incomplete:
            self._turn_open = not event.is_listen and not event.end_of_turn
        if self._interrupting and not self._turn_open:
            # The interrupt has ended the turn, or there was none: it does not apply to the next turn.
            self._interrupting = False
            ignore_result(self._handle.clear_break())
        message = result_message(
            event, clock, ends_turn=ends_turn, speaks=self._speaks, n_parts=n_parts, backlog=self._n_unanswered
        )
        if self._spec.counters:
            message = self._counters.counted(message, event)
        if not self._turn_open:
            self._speaks = self._will_speak
        if not clock.is_replay:
            self._metrics.unit(event, message)
            self._service.count_unit(event, clock.received)
        if self._spec.resume and event.decided is not None:
            self.outbox.put_nowait((decided_message(event.decided), self._spec))
        self._send(message)

    @property
    def _n_unanswered(self) -> int:
        """Chunks that were received and have no answer."""
        return sum(isinstance(one.message, AudioChunk) for one in self._inbox) + len(self._in_flight)

    def _interrupt(self) -> None:
        if self._prepared and (self._turn_open or self._n_unanswered):
            self._interrupting = True
            ignore_result(self._handle.break_speech())

    def end(self, error: Error, end: ConversationEnd) -> None:
        """Send an error and set how the conversation ends."""
        self._send(error)
        self.end_if_cancelled = end

    # --- sent messages -------------------------------------------------------------------------

    def _send(self, message: ServerMessage) -> None:
        self.outbox.put_nowait((message, self._spec))

    def _send_error(self, error: Exception) -> None:
        code = code_of(error)
        if code is ErrorCode.INTERNAL:
            LOG.error("session %s: %s", self.name, error, exc_info=error)
        self._metrics.error(code)
        if not (self._spec.resume and isinstance(error, EngineError)):  # with a gateway the session goes on elsewhere
            self._send(Error.of(error, code))

    async def _answer_error(self, error: Exception) -> ConversationEnd | None:
        """Send an error in order. Returns: the end of the conversation, if the error ends it."""
        await self._wait_in_flight(0)
        self._send_error(error)
        return ConversationEnd(CloseCode.INTERNAL_ERROR, CloseReason.ENGINE) if isinstance(error, EngineError) else None

    @property
    def n_rows(self) -> int:
        """Context tokens of the session."""
        return self._session.context_len if self._session is not None else 0

    @property
    def _handle(self) -> SessionHandle:
        assert self._session is not None, "expected a session while `run` runs, got None"
        return self._session
