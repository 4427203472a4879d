"""One turn-based answer, from the request to the result: slot, decoded messages, voice, the engine's events.

Contains no messages to the client.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext

from models.inputs.messages import ChatMessage
from models.inputs.prompts import Prompt
from models.token2wav.voice.voice import Voice
from worker.chat.config import ReplyConfig
from worker.chat.media_parts import MediaDecoder
from worker.chat.requests import with_voice_message
from worker.loop.command_queue import ignore_result
from worker.loop.results import Event, Failure, ReplyResult
from worker.loop.session_handle import SessionHandle
from worker.protocol.chat_messages import SpeechFields, VoiceMode
from worker.protocol.content import RATE_IN, ChatTurn, TextContent, VideoContent
from worker.service import Service
from worker.slots import SlotLease, SlotUse

SAMPLES_PER_MS = RATE_IN // 1000


class ChatAnswer:
    """One answer in a slot of its own. For one event loop.

    Args:
        service: the worker's service.
        name: the client's session id.
        use: what the slot is leased for.
        on_event: receives the engine's events before the outcome, on the event loop.
    """

    def __init__(self, service: Service, name: str, use: SlotUse, on_event: Callable[[Event], None]):
        self._service, self._name, self._use, self._on_event = service, name, use, on_event
        self._loop = asyncio.get_running_loop()
        self._decoder, self._has_media = MediaDecoder(), False
        self._lease: SlotLease | None = None
        self._session: SessionHandle | None = None
        self._outcome: asyncio.Future[ReplyResult] = self._loop.create_future()
        self._is_stopped = False

    @property
    def context_len(self) -> int:
        """Context rows of the session; 0 without one."""
        return 0 if self._session is None else self._session.context_len

    async def lease(self) -> None:
        """Lease the slot. Raises: SlotError without a free slot within 5 s; StateError."""
        self._lease = await self._service.lease(self._name, self._use)

    async def decode(self, turns: Sequence[ChatTurn]) -> list[ChatMessage]:
        """The messages with decoded media.

        Raises: as `MediaDecoder.decode`; ContextOverflowError for much too long text.
        """
        service = self._service
        service.omni.check_prompt("".join(turn.text for turn in turns), "text of messages")
        items = [item for turn in turns if not isinstance(turn.content, str) for item in turn.content]
        self._has_media = self._has_media or not all(isinstance(item, TextContent) for item in items)
        has_video = any(isinstance(item, VideoContent) for item in items)
        async with service.decoding_videos if has_video else self._decoding():
            return await asyncio.to_thread(self._decoder.decode, turns, service.omni.context_rows)

    def _decoding(self) -> AbstractAsyncContextManager[None]:
        """What to hold while media are decoded or cut."""
        return self._service.decoding if self._has_media else nullcontext()

    async def with_voice(
        self, messages: list[ChatMessage], speech: SpeechFields, mode: VoiceMode
    ) -> tuple[list[ChatMessage], Voice | None]:
        """The voice of the answer, and the conversation with a system message that introduces it.

        Args:
            messages: the conversation.
            speech: the request's settings of the speech.
            mode: system message that is inserted where the conversation has none; "default": none.
        Raises: as `Service.reference`; WireError.
        """
        if not speech.enabled:
            return messages, None
        async with self._service.preparing:
            return await asyncio.to_thread(self._with_voice, messages, speech, mode)

    def _with_voice(
        self, messages: list[ChatMessage], speech: SpeechFields, mode: VoiceMode
    ) -> tuple[list[ChatMessage], Voice | None]:
        """Slow: call on a thread."""
        service, samples = self._service, None
        if speech.ref_audio_data:
            samples = speech.ref_audio_data.samples("tts.ref_audio_data")
            if speech.ref_audio_max_ms is not None:
                samples = samples[: speech.ref_audio_max_ms * SAMPLES_PER_MS]
        named = None if speech.ref_audio_path is None else service.reference(named=speech.ref_audio_path)
        given = service.reference(samples=samples) if samples is not None or named is None else named
        if given is None:
            return messages, None
        heard = given.audio_16k if named is None else named.audio_16k
        return with_voice_message(messages, mode, speech.language, heard), given.voice

    async def answer(self, messages: list[ChatMessage], config: ReplyConfig, voice: Voice | None) -> ReplyResult:
        """Answer the conversation in the leased slot.

        Raises: as `Engine.chat`; the error of a `Failure`.
        """
        assert self._lease is not None, "answer: expected a leased slot, got none"
        async with self._decoding():  # cuts the pictures, on a thread
            self._session = await self._lease.chat(messages, config, self._emit, voice=voice)
        if self._is_stopped:
            self._interrupt(self._session)
        return await self._outcome

    async def prompt(self, messages: list[ChatMessage], config: ReplyConfig) -> Prompt:
        """The prompt of the conversation. Raises: as `Engine.prompt`."""
        assert self._lease is not None, "prompt: expected a leased slot, got none"
        async with self._decoding():
            return await self._lease.prompt(messages, config)

    def stop(self) -> None:
        """End the answer at its next token; its result has the text so far."""
        self._is_stopped = True
        if self._session is not None:
            self._interrupt(self._session)

    def leave(self) -> None:
        """End the answer and free the slot; later events are ignored. Later calls have no effect."""
        self._decoder.cancel()
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.close()

    def _interrupt(self, session: SessionHandle) -> None:
        # The answer may end before the request arrives: its error is retrieved, so that it is not logged.
        ignore_result(session.break_speech())

    def _emit(self, event: Event) -> None:
        """Accept an event of the engine, on the engine's thread."""
        self._loop.call_soon_threadsafe(self._take, event)

    def _take(self, event: Event) -> None:
        if self._lease is None or self._outcome.done():
            return
        if isinstance(event, Failure):
            self._outcome.set_exception(event.error)
        elif isinstance(event, ReplyResult):
            self._outcome.set_result(event)
        else:
            self._on_event(event)
