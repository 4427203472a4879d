"""One request and its answer, whatever the request: events of the engine, messages, the end. Contains no sockets."""

import asyncio
import logging
import time
from collections.abc import Coroutine
from typing import Any, Generic, TypeVar

from worker.engine_thread import EngineError
from worker.http.chat_answer import ChatAnswer
from worker.http.error_codes import code_of
from worker.http.metrics import WorkerMetrics
from worker.http.socket_conversation import ConversationEnd
from worker.loop.results import Event, PartialResult, Prefilled, ReplyResult
from worker.protocol.chat_messages import PrefillDone, ReplyChunk, ReplyDone, ReplyUsage
from worker.protocol.codec import Message
from worker.protocol.codes import CloseCode, CloseReason, ErrorCode
from worker.protocol.messages import PLAIN_SPEC, Error, Spec, Timeout
from worker.protocol.wire import Sound, WireError
from worker.service import Service
from worker.slots import SlotUse
from worker.status import StateError

LOG = logging.getLogger(__name__)

Request = TypeVar("Request")


class AnswerConversation(Generic[Request]):
    """A `SocketConversation` of one request. Subclasses read the request and answer it.

    Attributes:
        has_begun: whether the prompt is in the context.
        result: the answer, once it is complete.
        error: what ended the conversation without an answer.
        seconds: from the request to its end.
    """

    def __init__(self, service: Service, metrics: WorkerMetrics, name: str):
        self.name, self._service, self._metrics = name, service, metrics
        self.outbox: asyncio.Queue[tuple[Message, Spec]] = asyncio.Queue()
        self.paused = False
        self.n_units = 0
        self.end_if_cancelled = ConversationEnd(CloseCode.NORMAL, "cancelled")
        self.has_begun = False
        self.result: ReplyResult | None = None
        self.error: Exception | None = None
        self.seconds = 0.0
        self._request: asyncio.Future[Request | WireError] = asyncio.get_running_loop().create_future()
        self._is_streaming = self._is_answering = self._reports_usage = False
        self._answer = ChatAnswer(service, name, SlotUse.CHAT, self._on_event)

    async def start(self) -> None:
        """Raises: StateError for a worker that is not ready."""
        if not self._service.is_ready:
            raise StateError("worker", expected="one that is ready", got=self._service.status.state)

    def parse(self, data: str | bytes) -> Request:
        """The request in a text frame. Raises: WireError."""
        if isinstance(data, bytes):
            raise WireError(ErrorCode.BAD_MESSAGE, "message", expected="a text frame", got="a binary frame")
        return self._read(data)

    async def receive(self, message: Request | WireError, n_bytes: int, received: float) -> None:
        """Accept the request; later messages are ignored."""
        if not self._request.done():
            self._request.set_result(message)

    async def run(self) -> ConversationEnd:
        """Answer the request."""
        try:
            async with asyncio.timeout(self._service.settings.idle_timeout):
                request = await self._request
        except TimeoutError:
            self._send(Timeout(reason=f"{CloseReason.IDLE} ({self._service.settings.idle_timeout:.1f}s)"))
            return ConversationEnd(CloseCode.NORMAL, CloseReason.IDLE)
        if isinstance(request, WireError):
            return self._fail(request)
        return await self._end_after(self._respond(request))

    async def _end_after(self, answered: Coroutine[Any, Any, ReplyResult]) -> ConversationEnd:
        """Wait for the result, count and send it."""
        started, outcome = time.monotonic(), "failed"
        self._is_answering = True
        try:
            result = await answered
            outcome = result.stopped
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        except Exception as error:
            return self._fail(error)
        finally:
            self._is_answering = False
            self.seconds = time.monotonic() - started
            self._metrics.chat(outcome)
        self.n_units, self.result = 1, result
        self._metrics.reply(result)
        if result.voice_error is not None:
            LOG.error("session %s: an answer without its whole sound: %s", self.name, result.voice_error)
            self._metrics.error(code_of(result.voice_error))
        self._send(self._done(result))
        return ConversationEnd(CloseCode.NORMAL, CloseReason.DONE)

    def _done(self, result: ReplyResult) -> ReplyDone:
        """The last message."""
        return ReplyDone(
            text=result.text,
            generated_tokens=len(result.tokens),
            input_tokens=result.n_prompt,
            stopped=result.stopped,
            usage=usage_of(result) if self._reports_usage else None,
        )

    # --- defined by each kind of request -------------------------------------------------------

    def _read(self, text: str) -> Request:
        """The request. Raises: WireError."""
        raise NotImplementedError

    async def _respond(self, request: Request) -> ReplyResult:
        """The answer, made in a slot of its own. Raises: the error that ends the conversation."""
        raise NotImplementedError

    def _on_event(self, event: Event) -> None:
        if isinstance(event, Prefilled):
            self.has_begun = True
            self._send(PrefillDone(input_tokens=event.n_prompt))
        elif isinstance(event, PartialResult) and self._is_streaming:
            sound = None if event.pcm is None else Sound(event.pcm)
            self._send(ReplyChunk(text_delta=event.text or None, audio_data=sound))

    def stop(self) -> bool:
        """End an answer in flight at its next token; `done` has the text so far. Returns: whether there was one."""
        if self._is_answering:
            self._answer.stop()
        return self._is_answering

    def end(self, error: Error, end: ConversationEnd) -> None:
        """Send an error and set how the conversation ends."""
        self._send(error)
        self.end_if_cancelled = end

    def leave(self) -> None:
        """End the answer and free the slot."""
        self._answer.leave()

    @property
    def n_rows(self) -> int:
        """Context tokens of the session."""
        return self._answer.context_len

    def _fail(self, error: Exception) -> ConversationEnd:
        code = code_of(error)
        if code is ErrorCode.INTERNAL:
            LOG.error("session %s: %s", self.name, error, exc_info=error)
        self._metrics.error(code)
        self.error = error
        self._send(Error.of(error, code))
        if isinstance(error, EngineError):
            return ConversationEnd(CloseCode.INTERNAL_ERROR, CloseReason.ENGINE)
        return ConversationEnd(CloseCode.NORMAL, CloseReason.REFUSED)

    def _send(self, message: Message) -> None:
        self.outbox.put_nowait((message, PLAIN_SPEC))


def usage_of(result: ReplyResult) -> ReplyUsage:
    """Tokens of an answer by kind."""
    return ReplyUsage(
        input_tokens=result.n_prompt,
        input_image_tokens=result.n_prompt_image,
        input_audio_tokens=result.n_prompt_sound,
        text_tokens=len(result.tokens),
        speech_tokens=result.n_speech_tokens,
    )
