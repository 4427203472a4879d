"""One text for the speech model, whole or as it arrives, and its sound. Contains no sockets, JSON or tensors."""

import asyncio
import logging
import time
from collections.abc import Callable

from models.errors import SettingsError
from models.qwen3_tts.codec.config import SAMPLE_RATE
from models.qwen3_tts.runaway import CodesEnd
from models.qwen3_tts.text import LiveText
from worker.engine_thread import EngineError
from worker.http.error_codes import code_of
from worker.http.metrics import WorkerMetrics
from worker.http.socket_conversation import ConversationEnd
from worker.protocol.chat_messages import PrefillDone, ReplyChunk, ReplyDone, ReplyUsage
from worker.protocol.codec import Message
from worker.protocol.codes import CloseCode, CloseReason, ErrorCode
from worker.protocol.messages import PLAIN_SPEC, Error, Spec, Timeout
from worker.protocol.speech_messages import MAX_LIVE_CHARS, SPEAK_CLIENT, SpeakEnd, SpeakRequest, SpeakText
from worker.protocol.wire import Sound, WireError
from worker.service import Service
from worker.speech.model import SpeechModel
from worker.speech.requests import PlannedSpeech
from worker.speech.speech_loop import SpokenSound, SpokenUtterance
from worker.status import StateError

LOG = logging.getLogger(__name__)
MAX_UNSENT = 64  # messages; a client that does not read them gets no further utterance
MAX_UNREAD = 256  # messages of the client
SAMPLES_PER_FRAME = SAMPLE_RATE * 2 // 25

Incoming = SpeakRequest | SpeakText | SpeakEnd


class SpeakConversation:
    """A `SocketConversation` of one text."""

    def __init__(self, service: Service, metrics: WorkerMetrics, name: str):
        self.name, self._service, self._metrics = name, service, metrics
        self.outbox: asyncio.Queue[tuple[Message, Spec]] = asyncio.Queue()
        self.paused = False
        self.n_units = 0
        self.end_if_cancelled = ConversationEnd(CloseCode.NORMAL, "cancelled")
        self._loop = asyncio.get_running_loop()
        self._messages: asyncio.Queue[Incoming | WireError] = asyncio.Queue(MAX_UNREAD)
        self._sounds: asyncio.Queue[SpokenSound | Exception] = asyncio.Queue()
        self._speech: SpeechModel | None = None
        self._release: Callable[[], None] | None = None
        self._utterance: SpokenUtterance | None = None
        self._has_begun = False
        self._arrived: float | None = None  # of the request, until its first sound
        self._n_prompt = self._n_text = self._n_frames = self._n_chars = 0

    async def start(self) -> None:
        """Raises: StateError for a worker that is not ready, or has no speech model."""
        if not self._service.is_ready or self._service.speech is None:
            raise StateError("worker", expected="one that is ready, with a speech model", got="another")

    def parse(self, data: str | bytes) -> Incoming:
        """The message in a text frame. Raises: WireError."""
        if isinstance(data, bytes):
            raise WireError(ErrorCode.BAD_MESSAGE, "message", expected="a text frame", got="a binary frame")
        return SPEAK_CLIENT.read_text(data)

    async def receive(self, message: Incoming | WireError, n_bytes: int, received: float) -> None:
        """Accept a message; waits while too many wait to be read."""
        await self._messages.put(message)

    async def run(self) -> ConversationEnd:
        """Speak the text."""
        outcome = "failed"
        try:
            request = await self._next()
            if not isinstance(request, SpeakRequest):
                expected = "speak, then text messages of a request that is open"
                raise WireError(ErrorCode.BAD_MESSAGE, "message.type", expected=expected, got=request.type)
            self._arrived = time.monotonic()
            self._speech, self._release = await self._service.lease_speech()
            planned = await self._speech.on_thread(self._speech.plan, request)
            end = await (self._speak_live(planned) if request.is_open else self._speak(planned))
            outcome = end.value
        except TimeoutError:
            self._send(Timeout(reason=f"{CloseReason.IDLE} ({self._service.settings.idle_timeout:.1f}s)"))
            return ConversationEnd(CloseCode.NORMAL, CloseReason.IDLE)
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        except Exception as error:
            return self._fail(error)
        finally:
            self._metrics.spoken(outcome, self._n_frames * SAMPLES_PER_FRAME / SAMPLE_RATE)
        self.n_units = 1
        usage = ReplyUsage(
            input_tokens=self._n_prompt,
            input_image_tokens=0,
            input_audio_tokens=0,
            text_tokens=self._n_text,
            speech_tokens=self._n_frames,
        )
        n_text, n_prompt = self._n_text, self._n_prompt
        self._send(ReplyDone(text="", generated_tokens=n_text, input_tokens=n_prompt, stopped=end.value, usage=usage))
        return ConversationEnd(CloseCode.NORMAL, CloseReason.DONE)

    async def _speak(self, planned: PlannedSpeech) -> CodesEnd:
        """Speak a whole text, one utterance after the other. Returns: why the last one ended."""
        speech, limit = self._model, planned.request.max_frames
        end = CodesEnd.STOP
        for number, ids in enumerate(await speech.on_thread(speech.parts_of, planned)):
            if limit is not None and self._n_frames >= limit:
                return CodesEnd.LENGTH
            self._begin(planned, ids, number)
            end = await self._finish_utterance(limit)
            if self.outbox.qsize() > MAX_UNSENT:
                await self.outbox.join()
        return end

    async def _speak_live(self, planned: PlannedSpeech) -> CodesEnd:
        """Speak a text as it arrives."""
        live, ids, is_open = LiveText(self._model.parts.tokenizer), list[int](), True
        text = planned.request.text
        while is_open:
            self._count_chars(text)
            ids = live.push(text) if text else []
            if ids:
                break
            message = await self._next()
            is_open = isinstance(message, SpeakText)
            text = message.text if isinstance(message, SpeakText) else ""
        if not is_open:
            ids = live.finish()
        if not ids:
            raise SettingsError("text", expected="text to speak", got="none")
        self._begin(planned, tuple(ids), 0, is_open=is_open)
        if not is_open:
            return await self._finish_utterance(planned.request.max_frames)
        feeding = asyncio.create_task(self._feed(live))
        try:
            speaking = asyncio.create_task(self._finish_utterance(planned.request.max_frames))
            try:
                await asyncio.wait((feeding, speaking), return_when=asyncio.FIRST_COMPLETED)
                if not speaking.done():
                    await feeding  # raises its error
                return await speaking
            finally:
                speaking.cancel()
        finally:
            feeding.cancel()

    async def _feed(self, live: LiveText) -> None:
        """Pass on text until its end. Raises: WireError; TimeoutError after `idle_timeout` without a message."""
        while True:
            message = await self._next()
            if isinstance(message, SpeakEnd):
                self._append([*live.finish(), self._model.parts.config.tts_eos_token_id], is_open=False)
                return
            if isinstance(message, SpeakRequest):
                raise WireError(ErrorCode.BAD_MESSAGE, "message.type", expected="text or end", got="speak")
            self._count_chars(message.text)
            if ids := live.push(message.text):
                self._append(ids, is_open=True)

    def _count_chars(self, text: str) -> None:
        """Count text that arrives. Raises: WireError beyond `MAX_LIVE_CHARS`."""
        self._n_chars += len(text)
        if self._n_chars > MAX_LIVE_CHARS:
            expected = f"at most {MAX_LIVE_CHARS} characters of text"
            raise WireError(ErrorCode.TOO_LARGE, "text", expected=expected, got=self._n_chars)

    def _begin(self, planned: PlannedSpeech, ids: tuple[int, ...], number: int, *, is_open: bool = False) -> None:
        request = self._model.request(planned, ids, number, is_open=is_open)
        self._n_prompt += len(request.prompt)
        self._n_text += len(ids)
        if not self._has_begun:
            self._has_begun = True
            self._send(PrefillDone(input_tokens=len(request.prompt)))
        self._utterance = self._model.begin(request, self._emit, is_open=is_open)

    def _append(self, ids: list[int], *, is_open: bool) -> None:
        assert self._utterance is not None, "expected an utterance that has begun"
        self._n_text += len(ids)
        self._model.append_text(self._utterance, ids, is_open=is_open)

    async def _finish_utterance(self, limit: int | None) -> CodesEnd:
        """Send the sound of the utterance. Raises: what ended it otherwise."""
        while True:
            sound = await self._sounds.get()
            if isinstance(sound, Exception):
                raise sound
            n = len(sound.samples)
            if limit is not None:
                n = min(n, (limit - self._n_frames) * SAMPLES_PER_FRAME)
            if n:
                self._n_frames += n // SAMPLES_PER_FRAME
                if self._arrived is not None:
                    self._metrics.spoke_first(time.monotonic() - self._arrived)
                    self._arrived = None
                self._send(ReplyChunk(audio_data=Sound(sound.samples[:n])))
            if sound.end is CodesEnd.FAILED:
                raise EngineError("speech", expected="finite numbers from the model", got="others")
            if sound.end is not None:
                self._utterance = None
                return sound.end

    def _emit(self, event: SpokenSound | Exception) -> None:
        """Called on the engine thread."""
        try:
            self._loop.call_soon_threadsafe(self._sounds.put_nowait, event)
        except RuntimeError:  # the event loop has ended
            LOG.debug("session %s: a sound after the end", self.name)

    async def _next(self) -> Incoming:
        """The next message. Raises: TimeoutError; WireError for one that could not be read."""
        async with asyncio.timeout(self._service.settings.idle_timeout):
            message = await self._messages.get()
        if isinstance(message, WireError):
            raise message
        return message

    # --- ends ----------------------------------------------------------------------------------

    def end(self, error: Error, end: ConversationEnd) -> None:
        """Send an error and set how the conversation ends."""
        self._send(error)
        self.end_if_cancelled = end

    def leave(self) -> None:
        """End the utterance; the slot is free after the step in flight."""
        speech, release, utterance = self._speech, self._release, self._utterance
        self._release = self._utterance = None
        if release is None:
            return
        if utterance is None or speech is None:
            release()
        else:
            speech.cancel(utterance, release)

    @property
    def n_rows(self) -> int:
        """Context tokens in the omni model: none."""
        return 0

    @property
    def _model(self) -> SpeechModel:
        assert self._speech is not None, "expected a slot of the speech model"
        return self._speech

    def _fail(self, error: Exception) -> ConversationEnd:
        code = code_of(error)
        if code is ErrorCode.INTERNAL:
            LOG.error("session %s: %s", self.name, error, exc_info=error)
        self._metrics.error(code)
        self._send(Error.of(error, code))
        if isinstance(error, EngineError):
            return ConversationEnd(CloseCode.INTERNAL_ERROR, CloseReason.ENGINE)
        return ConversationEnd(CloseCode.NORMAL, CloseReason.REFUSED)

    def _send(self, message: Message) -> None:
        self.outbox.put_nowait((message, PLAIN_SPEC))
