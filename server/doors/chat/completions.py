"""Chat completions from the parts of an answer: one object, or a stream of chunks."""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

import numpy as np

from server.doors.chat.audio_answers import AudioAnswers
from server.doors.chat.parts import AnswerEnd, AnswerPart, joined_sound
from server.doors.chat.request import AudioOrder
from server.doors.core.sound_formats import ENCODERS, encoded
from server.doors.core.tool_calls import FoundCall
from server.doors.core.turn_response import DONE, base64_text, sse
from worker.protocol.chat_messages import ReplyUsage
from worker.protocol.wire import Sound


@dataclass
class CompletionHead:
    """What every object of one completion has.

    Attributes:
        model: the served name.
        audio: None for text alone.
        answers: keeps the transcript of a spoken answer.
        owner: whose answer it is.
    """

    model: str
    audio: AudioOrder | None
    answers: AudioAnswers
    owner: str
    id: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(16)}")
    created: int = field(default_factory=lambda: int(time.time()))

    def fields(self, kind: str) -> dict[str, object]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


async def completion(parts: AsyncGenerator[AnswerPart], head: CompletionHead) -> AsyncGenerator[bytes]:
    """The whole answer as one JSON object."""
    text, sounds, calls, end = "", list[np.ndarray](), list[FoundCall](), None
    async for part in parts:
        if isinstance(part, str):
            text += part
        elif isinstance(part, FoundCall):
            calls.append(part)
        elif isinstance(part, AnswerEnd):
            end = part
        else:
            sounds.append(part)
    assert end is not None, "expected an answer with an end"
    message: dict[str, object] = {"role": "assistant", "content": text or None, "refusal": None}
    if calls:
        message["tool_calls"] = [call.fields() for call in calls]
    else:
        message["content"] = text
    if head.audio is not None and not calls:
        pcm, name, loop = await joined_sound(sounds), head.audio.format, asyncio.get_running_loop()
        data = await loop.run_in_executor(ENCODERS, lambda: base64_text(encoded(pcm, name)))
        audio_id, expires_at = head.answers.new_id(), head.answers.expires_at()
        head.answers.keep(audio_id, text, head.owner)
        message["content"] = None
        message["audio"] = {"id": audio_id, "data": data, "expires_at": expires_at, "transcript": text}
    choice = {"index": 0, "message": message, "finish_reason": end.reason, "logprobs": None}
    whole = {**head.fields("chat.completion"), "choices": [choice], "usage": usage_fields(end.usage)}
    yield json.dumps(whole, ensure_ascii=False, separators=(",", ":")).encode()


async def completion_chunks(
    parts: AsyncGenerator[AnswerPart], head: CompletionHead, *, include_usage: bool
) -> AsyncGenerator[bytes]:
    """The answer as a stream of events."""
    with_usage: dict[str, object] = {"usage": None} if include_usage else {}
    audio_id = head.answers.new_id() if head.audio is not None else None
    transcript, n_calls, has_begun = "", 0, False

    def chunk(delta: dict[str, object], reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": reason, "logprobs": None}
        return sse({**head.fields("chat.completion.chunk"), "choices": [choice], **with_usage})

    async for part in parts:
        if not has_begun:
            has_begun = True
            yield chunk({"role": "assistant", "content": None if audio_id else "", "refusal": None})
        if isinstance(part, FoundCall):
            yield chunk({"tool_calls": [{"index": n_calls, **part.fields()}]})
            n_calls += 1
        elif isinstance(part, AnswerEnd):
            if audio_id is not None and not n_calls:
                head.answers.keep(audio_id, transcript, head.owner)
                yield chunk({"audio": {"id": audio_id, "expires_at": head.answers.expires_at()}})
            yield chunk({}, part.reason)
            if include_usage:
                fields = head.fields("chat.completion.chunk")
                yield sse({**fields, "choices": [], "usage": usage_fields(part.usage)})
        elif isinstance(part, str) and audio_id is None:
            yield chunk({"content": part})
        elif isinstance(part, str):
            transcript += part
            yield chunk({"audio": {"id": audio_id, "transcript": part}})
        else:
            data = base64_text(Sound(part).packed("pcm16"))
            yield chunk({"audio": {"id": audio_id, "data": data}})
    yield DONE


def usage_fields(usage: ReplyUsage) -> dict[str, object]:
    """Tokens as the API counts them: those of sound and pictures are part of the sums."""
    n_in, n_out = usage.input_tokens, usage.text_tokens + usage.speech_tokens
    return {
        "prompt_tokens": n_in,
        "completion_tokens": n_out,
        "total_tokens": n_in + n_out,
        "prompt_tokens_details": {
            "audio_tokens": usage.input_audio_tokens,
            "cached_tokens": 0,
            "image_tokens": usage.input_image_tokens,
            "text_tokens": n_in - usage.input_audio_tokens - usage.input_image_tokens,
        },
        "completion_tokens_details": {
            "audio_tokens": usage.speech_tokens,
            "text_tokens": usage.text_tokens,
            "reasoning_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }
