"""A conversation that a client feeds in steps and has answered turn by turn. Contains no sockets, JSON or tensors.

Each turn leases a slot, from its first `prefill` to its `done`, and reads the whole conversation again: between two
turns other clients use the slot.
"""

import asyncio
import logging
import time
from collections.abc import Sequence

from models.inputs.messages import ChatMessage
from worker.chat.config import ReplyConfig
from worker.chat.media_parts import check_pixels
from worker.engine_thread import EngineError
from worker.http.chat_answer import ChatAnswer
from worker.http.error_codes import code_of
from worker.http.inbox import MessageInbox
from worker.http.metrics import WorkerMetrics
from worker.http.socket_conversation import ConversationEnd
from worker.loop.results import SOUND_RATE, Event, PartialResult, ReplyResult
from worker.protocol.chat_messages import SpeechFields, TokenStats
from worker.protocol.codec import Message
from worker.protocol.codes import CloseCode, CloseReason, ErrorCode
from worker.protocol.content import ChatTurn
from worker.protocol.half_duplex_messages import TurnChunk
from worker.protocol.messages import PLAIN_SPEC, Error, Spec, Stop, Timeout
from worker.protocol.streaming_messages import (
    STREAMING_CLIENT,
    StreamingClose,
    StreamingRequest,
    TurnAnswered,
    TurnGenerate,
    TurnPrefill,
    TurnPrefilled,
)
from worker.protocol.wire import Sound, WireError
from worker.service import Service
from worker.slots import SlotUse
from worker.status import StateError

LOG = logging.getLogger(__name__)
MAX_UNSENT = 64  # messages; a client that does not read them gets no further answers
HOLD_S = 60.0  # a turn without `generate` gives its slot back


class StreamingConversation:
    """A `SocketConversation` of turns. n_units: the answered ones."""

    def __init__(self, service: Service, metrics: WorkerMetrics, name: str):
        self.name, self._service, self._metrics = name, service, metrics
        self.outbox: asyncio.Queue[tuple[Message, Spec]] = asyncio.Queue()
        self.paused = False
        self.n_units = 0
        self.end_if_cancelled = ConversationEnd(CloseCode.NORMAL, "cancelled")
        self._inbox: MessageInbox[StreamingRequest | WireError] = MessageInbox(service.settings.max_backlog)
        self._turns: list[ChatTurn] = []  # as the client sent them, to recognise a repeated conversation
        self._messages: list[ChatMessage] = []  # the same, decoded
        self._speech = SpeechFields(enabled=True)
        self._max_slice_nums: int | None = None
        self._answer: ChatAnswer | None = None  # of the turn that holds a slot
        self._is_asked = False  # from the arrival of `generate` to the end of its answer
        self._is_stopped = False
        self._n_chunks = 0

    async def start(self) -> None:
        """Raises: StateError for a worker that is not ready."""
        if not self._service.is_ready:
            raise StateError("worker", expected="one that is ready", got=self._service.status.state)

    def parse(self, data: str | bytes) -> StreamingRequest:
        """The message in a text frame. Raises: WireError."""
        if isinstance(data, bytes):
            raise WireError(ErrorCode.BAD_MESSAGE, "message", expected="a text frame", got="a binary frame")
        return STREAMING_CLIENT.read_text(data)

    async def receive(self, message: StreamingRequest | WireError, n_bytes: int, received: float) -> None:
        """Append a message to the inbox; `stop` and `close` end an answer in flight at once."""
        if isinstance(message, Stop | StreamingClose):
            self.stop()
        self._is_asked = self._is_asked or isinstance(message, TurnGenerate)
        await self._inbox.wait_for_room()
        self._inbox.put(message, n_bytes, received)

    async def run(self) -> ConversationEnd:
        """Answer messages until the conversation ends by itself."""
        idle = self._service.settings.idle_timeout
        while True:
            try:
                message = await self._next(idle)
            except TimeoutError:
                self._send(Timeout(reason=f"{CloseReason.IDLE} ({idle:.1f}s)"))
                return ConversationEnd(CloseCode.NORMAL, CloseReason.IDLE)
            if self.outbox.qsize() > MAX_UNSENT:
                await self.outbox.join()
            if isinstance(message, StreamingClose):
                return ConversationEnd(CloseCode.NORMAL, CloseReason.STOPPED)
            try:
                await self._handle(message)
            except Exception as error:
                self.leave()
                self._send_error(error)
                if isinstance(error, EngineError):
                    return ConversationEnd(CloseCode.INTERNAL_ERROR, CloseReason.ENGINE)

    async def _next(self, idle: float | None) -> StreamingRequest | WireError:
        """The next message; a turn gives its slot back meanwhile after HOLD_S. Raises: TimeoutError after `idle` s."""
        now = asyncio.get_running_loop().time()
        if self._answer is not None:
            try:
                return (await self._inbox.get(now + min(HOLD_S, idle or HOLD_S))).message
            except TimeoutError:
                self.leave()
        return (await self._inbox.get(None if idle is None else now + idle)).message

    async def _handle(self, message: TurnPrefill | TurnGenerate | Stop | WireError) -> None:
        match message:
            case WireError():
                raise message
            case TurnPrefill():
                await self._prefill(message)
            case TurnGenerate():
                await self._generate(message)
            case Stop():
                self.leave()  # an answer in flight has ended; a turn without one gives its slot back

    # --- one turn ------------------------------------------------------------------------------

    async def _prefill(self, message: TurnPrefill) -> None:
        answer = await self._lease()
        messages = await answer.decode(message.messages)
        if message.clear_kv_cache or self._repeats(message.messages):
            self._turns, self._messages = [], []
        if message.voice is not None:
            self._speech = SpeechFields(enabled=True, ref_audio_data=message.voice)
        self._max_slice_nums = message.max_slice_nums or self._max_slice_nums
        check_pixels([*self._messages, *messages])
        self._turns += message.messages
        self._messages += messages
        prompt = await answer.prompt(self._messages, self._config(speak=False))
        self._send(
            TurnPrefilled(
                prompt_length=len(prompt.text), message_count=len(self._messages), input_tokens=len(prompt.ids)
            )
        )

    def _repeats(self, turns: Sequence[ChatTurn]) -> bool:
        """Whether messages are the whole conversation again, and not its continuation."""
        return len(turns) > 1 and bool(self._turns) and turns[0] == self._turns[0]

    async def _generate(self, message: TurnGenerate) -> None:
        if not self._messages:
            self._is_asked = self._is_stopped = False
            expected = "a prefill before it"
            raise WireError(ErrorCode.NOT_PREPARED, "generate", expected=expected, got="no messages")
        started, outcome = time.monotonic(), "failed"
        self._n_chunks = 0
        try:
            answer = await self._lease()
            if self._is_stopped:
                answer.stop()
            speech = self._speech.model_copy(update={"enabled": message.generate_audio})
            messages, voice = await answer.with_voice(self._messages, speech, "default")
            result = await answer.answer(messages, self._config(speak=message.generate_audio, given=message), voice)
            outcome = result.stopped
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        finally:
            self._is_asked = self._is_stopped = False
            self._metrics.chat(outcome)
            self.leave()
        self._metrics.reply(result)
        self._finish(result, time.monotonic() - started)

    def _finish(self, result: ReplyResult, seconds: float) -> None:
        self.n_units += 1
        if result.text:
            self._turns.append(ChatTurn(role="assistant", content=result.text))
            self._messages.append(ChatMessage("assistant", (result.text,)))
        n_in, n_out = result.n_prompt, len(result.tokens)
        self._send(TurnChunk(chunk_index=self._n_chunks, is_final=True))
        self._send(
            TurnAnswered(
                elapsed_ms=1000 * seconds,
                session_id=self.name,
                stopped=result.stopped == "interrupted",
                text=result.text,
                token_stats=TokenStats(input_tokens=n_in, generated_tokens=n_out, total_tokens=n_in + n_out),
            )
        )

    async def _lease(self) -> ChatAnswer:
        """The turn's answer, with a slot. Raises: SlotError without a free one within 5 s; StateError."""
        if self._answer is None:
            answer = ChatAnswer(self._service, self.name, SlotUse.STREAMING, self._on_event)
            await answer.lease()
            self._answer = answer
        return self._answer

    def _config(self, *, speak: bool, given: TurnGenerate | None = None) -> ReplyConfig:
        given = given or TurnGenerate()
        return ReplyConfig(
            max_new_tokens=given.max_new_tokens,
            length_penalty=given.length_penalty,
            speak=speak,
            max_slice_nums=self._max_slice_nums,
        )

    def _on_event(self, event: Event) -> None:
        if not isinstance(event, PartialResult):
            return
        pcm = event.pcm
        self._send(
            TurnChunk(
                chunk_index=self._n_chunks,
                text_delta=event.text or None,
                audio_data=None if pcm is None else Sound(pcm),
                duration_ms=None if pcm is None else round(1000 * len(pcm) / SOUND_RATE, 3),
            )
        )
        self._n_chunks += 1

    # --- ends ----------------------------------------------------------------------------------

    def stop(self) -> bool:
        """End an answer in flight at its next token; `done` has the text so far. Returns: whether there was one."""
        self._is_stopped = self._is_asked
        if self._is_stopped and self._answer is not None:
            self._answer.stop()
        return self._is_stopped

    def end(self, error: Error, end: ConversationEnd) -> None:
        """Send an error and set how the conversation ends."""
        self._send(error)
        self.end_if_cancelled = end

    def leave(self) -> None:
        """End the turn and free its slot."""
        answer, self._answer = self._answer, None
        if answer is not None:
            answer.leave()

    @property
    def n_rows(self) -> int:
        """Context tokens of the session."""
        return 0 if self._answer is None else self._answer.context_len

    def _send_error(self, error: Exception) -> None:
        code = code_of(error)
        if code is ErrorCode.INTERNAL:
            LOG.error("session %s: %s", self.name, error, exc_info=error)
        self._metrics.error(code)
        self._send(Error.of(error, code))

    def _send(self, message: Message) -> None:
        self.outbox.put_nowait((message, PLAIN_SPEC))
