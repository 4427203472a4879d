"""Responses that a chat answers: those of the turn lane, and those out of band beside any lane."""

import asyncio
import logging
from collections.abc import Callable, Iterable

from server.access.identity import Identity
from server.access.shares import run_shared
from server.doors.core.chat_turn import ChatTurns, TurnFinished, TurnRequest, TurnSound, TurnText
from server.doors.core.tool_calls import FoundCall, ToolCallReader
from server.doors.errors import ApiError
from server.doors.live.sound.resample import pcm16_of
from server.doors.live.sound.wire_sound import SoundOutput
from server.doors.realtime.items import ConversationItem
from server.doors.realtime.responses import (
    COMPLETED,
    TOO_LONG,
    CancelReason,
    RealtimeResponse,
    ResponseEnd,
    cancelled,
    failed,
    out_of_room,
)
from server.doors.realtime.session_config import RealtimeConfig
from server.doors.realtime.turn_request import answer_start, turn_request, voicing_request, without_oldest
from server.doors.realtime.turns.unit_timer import send_at
from server.doors.realtime.usage import AnswerUsage

LOG = logging.getLogger(__name__)
MAX_ANSWERS = 4  # of one session at the same time


class TurnAnswers:
    """The running chats of one session.

    Args:
        turns: chats of all doors.
        identity: whose session it is.
        on_end: called with each response and its end, once.
        clock: monotonic s.
    """

    def __init__(
        self,
        turns: ChatTurns,
        identity: Identity,
        on_end: Callable[[RealtimeResponse, ResponseEnd], None],
        clock: Callable[[], float],
    ):
        self._turns, self._identity, self._on_end, self._clock = turns, identity, on_end, clock
        self._running: dict[str, tuple[RealtimeResponse, asyncio.Task[None]]] = {}

    @property
    def is_full(self) -> bool:
        return len(self._running) >= MAX_ANSWERS

    def start(
        self,
        response: RealtimeResponse,
        config: RealtimeConfig,
        voice: str | None,
        items: Iterable[ConversationItem],
    ) -> None:
        """Answer a conversation.

        Args:
            response: is open.
            config: settings of the response.
            voice: registered voice; None: the server's default.
            items: the conversation; read now.
        """
        running = self._run(response, config, voice, list(items))
        task = asyncio.create_task(running, name=f"answer {response.id}")
        self._running[response.id] = (response, task)

    def cancel(self, response_id: str, reason: CancelReason) -> bool:
        """End a response now. Returns: whether it was running."""
        if response_id not in self._running:
            return False
        response, task = self._running.pop(response_id)
        task.cancel()
        self._on_end(response, cancelled(reason))
        return True

    def stop(self) -> None:
        """End all chats without events."""
        for _, task in self._running.values():
            task.cancel()
        self._running.clear()

    async def _run(
        self, response: RealtimeResponse, config: RealtimeConfig, voice: str | None, items: list[ConversationItem]
    ) -> None:
        try:
            end = await self._answer_shortened(response, config, voice, items)
        except ApiError as error:
            fields = error.fields()
            end = failed(str(fields["code"]), str(fields["message"]))
        except Exception:
            LOG.exception("response %s", response.id)
            end = failed("internal_error", "Internal server error")
        if self._running.pop(response.id, None) is not None:
            self._on_end(response, end)

    async def _answer_shortened(
        self, response: RealtimeResponse, config: RealtimeConfig, voice: str | None, items: list[ConversationItem]
    ) -> ResponseEnd:
        """Answer the items, without the oldest ones if they are too long and may be truncated. Raises: ApiError."""
        while True:
            try:
                return await self._answer(response, config, voice, items)
            except ApiError as error:
                if error.code != "context_length_exceeded":
                    raise
                if config.truncation.mode == "disabled":
                    return out_of_room()
                shorter = without_oldest(items, config.truncation.ratio)
                if len(shorter) == len(items):
                    raise
                items = shorter

    async def _answer(
        self, response: RealtimeResponse, config: RealtimeConfig, voice: str | None, items: list[ConversationItem]
    ) -> ResponseEnd:
        request = await run_shared(turn_request, config, voice, items)
        if "tools" not in request.fields:
            return await self._speak(response, config, request)
        end, text = await self._call(response, config, request)
        if config.modality == "audio" and text.strip():
            voicing = voicing_request(request, text, voice)
            return await self._speak(response, config, voicing, counts_input=False)
        response.add_text(text)
        return end

    async def _call(
        self, response: RealtimeResponse, config: RealtimeConfig, request: TurnRequest
    ) -> tuple[ResponseEnd, str]:
        """Send the calls of an answer. Returns: how it ended, and its text if it calls no function."""
        reader, said, n_calls, end = ToolCallReader(), "", 0, COMPLETED
        used = AnswerUsage(response.usage)
        parts = list(reader.push(answer_start(config)))
        async with self._turns.open(request, self._identity) as turn:
            async for event in turn.events():
                used.record(event)
                if isinstance(event, TurnText):
                    parts += reader.push(event.text)
                elif isinstance(event, TurnFinished):
                    parts += reader.finish()
                    end = TOO_LONG if event.stopped == "length" else COMPLETED
                for part in parts:
                    if isinstance(part, FoundCall):
                        n_calls += 1
                        response.add_call(part)
                    else:
                        said += part
                parts.clear()
        return (COMPLETED, "") if n_calls else (end, said)

    async def _speak(
        self, response: RealtimeResponse, config: RealtimeConfig, request: TurnRequest, *, counts_input: bool = True
    ) -> ResponseEnd:
        """Send the text and the sound of a turn. counts_input: false if its text and its input were counted before."""
        output = SoundOutput(config.output_format, config.speed)
        used = AnswerUsage(response.usage, counts_input=counts_input)
        async with self._turns.open(request, self._identity) as turn:
            async for event in turn.events():
                used.record(event)
                if isinstance(event, TurnText):
                    response.add_text(event.text)
                elif isinstance(event, TurnSound):
                    await self._wait_for_playback(response)
                    response.add_sound(output.push(pcm16_of(event.pcm)))
                    response.mark_evenly()
                elif isinstance(event, TurnFinished):
                    response.add_sound(output.finish())
                    response.mark_evenly()
                    return TOO_LONG if event.stopped == "length" else COMPLETED
        return COMPLETED

    async def _wait_for_playback(self, response: RealtimeResponse) -> None:
        """Wait until the client holds less than a second of sound."""
        now = self._clock()
        if response.first_sound_at is None:
            response.first_sound_at = now
        await asyncio.sleep(send_at(response.first_sound_at, response.sent_ms, now) - now)
