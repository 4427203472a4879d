"""One client's half-duplex conversation: passes its sound to the voice detector and sends what comes of it.

Messages wait in an inbox and take effect in order. Answers are made meanwhile: their parts are sent as they arrive from
the engine, and no message waits for an answer. Contains no sockets, JSON or tensors.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from enum import Enum
from functools import partial

import numpy as np

from models.inputs.image import EncodedImage
from models.token2wav.voice.voice import Voice
from worker.chat.config import HalfDuplexConfig, ReplyConfig
from worker.chat.half_duplex import HalfDuplex
from worker.engine_thread import EngineError
from worker.http.error_codes import code_of
from worker.http.idle_clock import IdleClock
from worker.http.inbox import InboxClosedError, MessageInbox, PendingMessage
from worker.http.metrics import WorkerMetrics
from worker.http.socket_conversation import ConversationEnd
from worker.http.units.unit_input import unpacked_pictures
from worker.loop.results import (
    SOUND_RATE,
    Event,
    Failure,
    Generating,
    Interruption,
    PartialResult,
    ReplyResult,
    VoiceState,
)
from worker.protocol.codec import Message
from worker.protocol.codes import CloseCode, CloseReason, ErrorCode
from worker.protocol.half_duplex_messages import (
    HALF_DUPLEX_CLIENT,
    TIMEOUT_S,
    AnswerInterrupted,
    HalfDuplexPrepare,
    HalfDuplexRequest,
    HalfDuplexSettings,
    SpeechChunk,
    TurnChunk,
    TurnDone,
    TurnHeard,
    TurnPrepared,
    TurnTimeout,
    VadState,
)
from worker.protocol.messages import PLAIN_SPEC, Error, Interrupt, Spec, Stop, Stopped
from worker.protocol.wire import Sound, WireError
from worker.service import Service
from worker.slots import SlotLease, SlotUse

LOG = logging.getLogger(__name__)
MAX_UNSENT = 64  # messages; a client that does not read them gets no further answers
GRACE_S = 4.0  # after the end of the conversation's time, for the answer in flight


class Notice(Enum):
    """What the engine puts into the inbox."""

    ANSWER_OVER = "an answer has ended"


Received = HalfDuplexRequest | WireError | Notice


class HalfDuplexConversation:
    """A `SocketConversation` of turns. n_units: the answered ones."""

    def __init__(self, service: Service, metrics: WorkerMetrics, name: str):
        self.name, self._service, self._metrics = name, service, metrics
        self.outbox: asyncio.Queue[tuple[Message, Spec]] = asyncio.Queue()
        self.paused = False
        self.n_units = 0
        self.end_if_cancelled = ConversationEnd(CloseCode.NORMAL, "cancelled")
        self._lease: SlotLease | None = None
        self._talk: HalfDuplex | None = None
        self._n_prepared = 0
        self._loop = asyncio.get_running_loop()
        self._inbox: MessageInbox[Received] = MessageInbox(service.settings.max_backlog)
        self._began, self._timeout_s = self._loop.time(), TIMEOUT_S
        self._idle = IdleClock(service.settings.idle_timeout, self._loop.time)
        self._is_answering = False
        self._n_chunks = 0
        self._text = ""

    async def start(self) -> None:
        """Lease a slot. Raises: SlotError without a free one within 5 s; StateError."""
        self._lease = await self._service.lease(self.name, SlotUse.HALF_DUPLEX)

    def leave(self) -> None:
        """Free the slot; later events of the engine are ignored."""
        lease, self._lease, self._talk = self._lease, None, None
        self._n_prepared += 1
        if lease is not None:
            lease.close()

    # --- received messages ----------------------------------------------------------------------

    def parse(self, data: str | bytes) -> HalfDuplexRequest:
        """The message in a text frame. Raises: WireError."""
        if isinstance(data, bytes):
            return HALF_DUPLEX_CLIENT.read_frame(data, PLAIN_SPEC.sound_in)
        return HALF_DUPLEX_CLIENT.read_text(data)

    async def receive(self, message: HalfDuplexRequest | WireError, n_bytes: int, received: float) -> None:
        """Append a message to the inbox; waits while the inbox is full. Arguments as in `SocketConversation`."""
        await self._inbox.wait_for_room()
        if isinstance(message, Interrupt) and self.interrupt():
            return  # its answer is an event
        self._inbox.put(message, n_bytes, received)

    def interrupt(self) -> bool:
        """Stop the answer that is made or played, and send `interrupted`. Returns: whether there was one."""
        return self._talk is not None and self._talk.interrupt()

    async def run(self) -> ConversationEnd:
        """Answer messages until the conversation ends by itself."""
        while True:
            try:
                pending = await self._next()
            except InboxClosedError:
                return ConversationEnd(CloseCode.INTERNAL_ERROR, CloseReason.ENGINE)
            if isinstance(pending, ConversationEnd):
                return pending
            if self.outbox.qsize() > MAX_UNSENT:
                await self.outbox.join()
            try:
                end = await self._answer(pending.message)
            except Exception as error:
                self._send_error(error)
                failed = isinstance(error, EngineError)
                end = ConversationEnd(CloseCode.INTERNAL_ERROR, CloseReason.ENGINE) if failed else None
            if end is not None:
                return end

    async def _next(self) -> PendingMessage[Received] | ConversationEnd:
        idle_s = self._service.settings.idle_timeout
        while True:
            idle = None if self._is_answering else self._idle.deadline
            ends = self._began + self._timeout_s + GRACE_S * self._is_answering
            if self._loop.time() >= ends:
                return self._time_out(CloseReason.SESSION, self._timeout_s)
            if idle is not None and idle_s is not None and self._loop.time() >= idle:
                return self._time_out(CloseReason.IDLE, idle_s)
            try:
                return await self._inbox.get(ends if idle is None else min(ends, idle))
            except TimeoutError:
                continue  # an answer may have begun meanwhile, which moves the end

    def _time_out(self, reason: CloseReason, seconds: float) -> ConversationEnd:
        elapsed_s = self._loop.time() - self._began
        return self._finish(TurnTimeout(elapsed_s=elapsed_s, reason=f"{reason} ({seconds:.1f}s)"), reason)

    def _finish(self, last: Message, reason: CloseReason) -> ConversationEnd:
        """Send the last message. Events that come before the slot is freed are ignored."""
        self._n_prepared += 1
        self._send(last)
        return ConversationEnd(CloseCode.NORMAL, reason)

    async def _answer(self, message: Received) -> ConversationEnd | None:
        match message:
            case WireError():
                raise message
            case SpeechChunk():
                await self._hear(message)
                self._idle.on_unit()
            case Notice.ANSWER_OVER:
                self._idle.on_unit()
                if (talk := self._talk) is not None:
                    await self._service.decoders.run_sized(talk.n_pixels, talk.answer_waiting)
            case HalfDuplexPrepare():
                await self._prepare(message)
            case Interrupt():
                self._send(AnswerInterrupted())
            case Stop():
                return self._finish(Stopped(session_id=self.name), CloseReason.STOPPED)
        return None

    async def _hear(self, chunk: SpeechChunk) -> None:
        talk = self._talk
        if talk is None:
            expected = "a prepared conversation"
            raise WireError(
                ErrorCode.NOT_PREPARED, "audio_chunk", expected=expected, got="none", text="Not prepared yet"
            )
        if chunk.audio_base64:
            pictures = await self._service.decoders.run(unpacked_pictures, chunk)
            n_pixels = talk.n_pixels + sum(picture.n_pixels for picture in pictures)
            await self._service.decoders.run_sized(n_pixels, partial(_push, talk, chunk, pictures))

    # --- preparing -----------------------------------------------------------------------------

    async def _prepare(self, message: HalfDuplexPrepare) -> None:
        config = engine_settings(message.config)
        assert self._lease is not None, "expected a lease while `run` runs, got None"
        async with self._service.preparing:
            system, voice = await asyncio.to_thread(self._system, message)
            self._talk = None  # an error before this line keeps the former conversation
            self._n_prepared += 1
            self._is_answering, number = False, self._n_prepared

            def emit(event: Event) -> None:
                self._loop.call_soon_threadsafe(self._on_event, number, event)

            self._talk = await self._lease.converse(system, config, emit, voice=voice)
        self.n_units = 0
        self._began, self._timeout_s = self._loop.time(), message.config.session.timeout_s
        self._send(TurnPrepared(session_id=self.name, timeout_s=self._timeout_s))

    def _system(self, message: HalfDuplexPrepare) -> tuple[list[str | np.ndarray], Voice | None]:
        """The system message, and the voice of the answers. Slow: call on a thread."""
        system = message.system()
        self._service.omni.check_prompt("".join(part for part in system if isinstance(part, str)))
        sound = next((part for part in system if isinstance(part, np.ndarray)), None)
        if not message.config.tts.enabled:
            return system, None
        reference = self._service.reference(samples=sound)
        return system, None if reference is None else reference.voice

    # --- events --------------------------------------------------------------------------------

    def _on_event(self, number: int, event: Event) -> None:
        """Handle an event on the event loop's thread. number: of the `prepare` that it belongs to."""
        if number != self._n_prepared:
            return
        match event:
            case VoiceState():
                self._send(VadState(speaking=event.is_speaking))
            case Generating():
                self._is_answering, self._n_chunks, self._text = True, 0, ""
                heard = TurnHeard(speech_duration_ms=round(event.speech_ms), video_frames=event.n_pictures or None)
                self._send(heard)
            case PartialResult():
                self._text += event.text
                self._send_part(event)
            case Interruption():
                self._send(
                    AnswerInterrupted(
                        turn_index=event.index, text=event.text, audio_ms=event.sound_ms, heard_ms=event.heard_ms
                    )
                )
            case ReplyResult():
                self.n_units += 1
                self._metrics.reply(event)
                if event.voice_error is not None:
                    self._send_error(event.voice_error)
                self._end_turn(event.index, event.text, event.stopped)
            case Failure():
                self._on_failure(event)

    def _on_failure(self, event: Failure) -> None:
        self._send_error(event.error)
        if isinstance(event.error, EngineError):  # a failing engine sends one to every session
            self._inbox.close()
        elif self._is_answering:
            self._end_turn(max(event.unit, 1), self._text, "failed")

    def _send_part(self, event: PartialResult) -> None:
        pcm = event.pcm if event.pcm is not None and len(event.pcm) else None
        duration_ms = None if pcm is None else round(1000 * len(pcm) / SOUND_RATE, 3)
        audio = None if pcm is None else Sound(pcm)
        text = event.text or None
        self._send(TurnChunk(chunk_index=self._n_chunks, text_delta=text, audio_data=audio, duration_ms=duration_ms))
        self._n_chunks += 1

    def _end_turn(self, index: int, text: str, stopped: str) -> None:
        self._is_answering = False
        self._send(TurnChunk(chunk_index=self._n_chunks, is_final=True))
        self._send(TurnDone(turn_index=index, text=text, stopped=stopped))
        self._inbox.put(Notice.ANSWER_OVER, 0, time.monotonic())

    # --- sent messages -------------------------------------------------------------------------

    def end(self, error: Error, end: ConversationEnd) -> None:
        """Send an error and set how the conversation ends."""
        self._send(error)
        self.end_if_cancelled = end

    def _send(self, message: Message) -> None:
        self.outbox.put_nowait((message, PLAIN_SPEC))

    def _send_error(self, error: Exception) -> None:
        code = code_of(error)
        if code is ErrorCode.INTERNAL:
            LOG.error("session %s: %s", self.name, error, exc_info=error)
        self._metrics.error(code)
        self._send(Error.of(error, code))

    @property
    def n_rows(self) -> int:
        """Context tokens of the session."""
        return 0 if self._talk is None else self._talk.context_len


def engine_settings(config: HalfDuplexSettings) -> HalfDuplexConfig:
    """The engine's settings for a client's. Raises: SettingError."""
    vad = config.vad
    return HalfDuplexConfig(
        reply=ReplyConfig(speak=config.tts.enabled, **dict(config.generation)),
        threshold=vad.threshold,
        min_speech_ms=vad.min_speech_duration_ms,
        min_silence_ms=vad.min_silence_duration_ms,
        speech_pad_ms=vad.speech_pad_ms,
        barge_in=vad.barge_in,
        barge_in_ms=vad.barge_in_ms,
        frame_interval_s=config.vision.frame_interval_s,
        max_slice_nums=config.vision.max_slice_nums,
    )


def _push(talk: HalfDuplex, chunk: SpeechChunk, pictures: Sequence[EncodedImage]) -> None:
    """Decode sound and pass it to the detector. Slow: call on a thread."""
    samples = chunk.samples()
    if samples is not None:
        talk.push(samples, pictures)
