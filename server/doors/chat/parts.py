"""The parts of an answer, from the events of one turn, or of two for a spoken answer that may call functions."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass

import numpy as np

from server.access.identity import Identity
from server.access.shares import run_shared
from server.doors.chat.request import ChatOrder
from server.doors.chat.stop_filter import StopFilter
from server.doors.core.chat_turn import ChatTurns, TurnEvent, TurnFinished, TurnPath, TurnRequest, TurnSound, TurnText
from server.doors.core.tool_calls import FoundCall, ToolCallReader
from server.doors.errors import ApiError
from worker.protocol.chat_messages import ReplyUsage

# Names of the worker's fields in its errors -> names in the request.
PARAMS = {"conversation": "messages", "ref_audio_path": "audio.voice", "tts.ref_audio_data": "audio.ref_audio"}


@dataclass(frozen=True)
class AnswerEnd:
    """The last part. reason: `stop`, `length` or `tool_calls`."""

    reason: str
    usage: ReplyUsage


# Text, a call, sound [n] float32 at 24 kHz, the end.
AnswerPart = str | FoundCall | np.ndarray | AnswerEnd


def language_of(order: ChatOrder) -> str:
    """Language of the inserted system message: Chinese if the last text has Chinese characters."""
    for message in reversed(order.messages):
        content = message["content"]
        text = content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
        if text:
            return "zh" if any("\u4e00" <= character <= "\u9fff" for character in text) else "en"
    return "en"


async def answer_parts(
    turns: ChatTurns, order: ChatOrder, tts: Mapping[str, object], identity: Identity
) -> AsyncGenerator[AnswerPart]:
    """The parts of an answer.

    Args:
        tts: fields of the voice; of no effect for an answer without sound.
    Raises: ApiError.
    """
    try:
        async with aclosing(_parts(turns, order, tts, identity)) as parts:
            async for part in parts:
                yield part
    except ApiError as error:
        raise error.renamed(PARAMS) from None


async def _parts(
    turns: ChatTurns, order: ChatOrder, tts: Mapping[str, object], identity: Identity
) -> AsyncGenerator[AnswerPart]:
    speaks = order.audio is not None
    if not (speaks and order.tools):
        async with aclosing(_generated(turns, order, tts, identity, speaks=speaks)) as parts:
            async for part in parts:
                yield part
        return
    # Speech suppresses characters that JSON needs: the text comes first, and is voiced if it calls no function.
    text, called = "", False
    async with aclosing(_generated(turns, order, tts, identity, speaks=False)) as parts:
        async for part in parts:
            if isinstance(part, str):
                text += part
            if isinstance(part, FoundCall):
                called = True
                yield part
            elif isinstance(part, AnswerEnd):
                end = part
    if called or not text.strip():
        if text:
            yield text
        yield end
        return
    fields = {"text": text, "messages": order.messages, "tts": dict(tts), "seed": order.generation.get("seed")}
    async with turns.open(TurnRequest(TurnPath.SPEECH, fields), identity) as turn:
        async for event in turn.events():
            if isinstance(event, TurnText):
                yield event.text
            elif isinstance(event, TurnSound):
                yield event.pcm
            elif isinstance(event, TurnFinished):
                n_speech = event.usage.speech_tokens
                yield AnswerEnd(end.reason, end.usage.model_copy(update={"speech_tokens": n_speech}))


async def _generated(
    turns: ChatTurns, order: ChatOrder, tts: Mapping[str, object], identity: Identity, *, speaks: bool
) -> AsyncGenerator[AnswerPart]:
    fields: dict[str, object] = {
        "messages": order.messages,
        "generation": order.generation,
        "streaming": True,
        "report_usage": True,
        "tools": order.tools,
        "answer_start": order.answer_start,
    }
    if order.max_slices is not None:
        fields["image"] = {"max_slice_nums": order.max_slices}
    if speaks:
        fields |= {"introduces_voice": True, "tts": {**tts, "enabled": True, "language": language_of(order)}}
    splitter = AnswerSplitter(order)
    async with turns.open(TurnRequest(TurnPath.CHAT, fields), identity) as turn:
        async for event in turn.events():
            for part in splitter.parts_of(event):
                yield part


class AnswerSplitter:
    """Turns the events of one turn into parts: cuts the text at stop texts, and finds calls."""

    def __init__(self, order: ChatOrder):
        self._filter = StopFilter(order.stop)
        self._calls = ToolCallReader() if order.tools else None
        self._n_calls = 0
        self._start = order.answer_start

    def parts_of(self, event: TurnEvent) -> list[AnswerPart]:
        """The parts that an event completes."""
        if isinstance(event, TurnText):
            return self._text(self._filter.push(event.text))
        if isinstance(event, TurnSound):
            return [event.pcm]
        if not isinstance(event, TurnFinished):
            return []
        parts = self._text(self._filter.finish())
        if self._calls is not None:
            parts += self._counted(list(self._calls.finish()))
        reason = "length" if event.stopped == "length" else "stop"
        return [*parts, AnswerEnd("tool_calls" if self._n_calls else reason, event.usage)]

    def _text(self, text: str) -> list[AnswerPart]:
        if self._calls is None:
            return [text] if text else []
        start, self._start = self._start, ""
        return self._counted(list(self._calls.push(start + text)))

    def _counted(self, parts: list[str | FoundCall]) -> list[AnswerPart]:
        self._n_calls += sum(isinstance(part, FoundCall) for part in parts)
        return list(parts)


async def joined_sound(parts: list[np.ndarray]) -> np.ndarray:
    """All sound of an answer, [n] float32 at 24 kHz."""
    return await run_shared(np.concatenate, parts) if parts else np.zeros(0, np.float32)
