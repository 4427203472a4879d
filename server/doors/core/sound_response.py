"""A turn's sound as a response: a file in one of six formats, or a stream of events with slices of it."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Literal

from fastapi import Response

from server.access.identity import Identity
from server.doors.core.chat_turn import ChatTurns, TurnFinished, TurnRequest, TurnSound
from server.doors.core.sound_formats import ENCODERS, MEDIA_TYPES, FormatName, SoundEncoder
from server.doors.core.turn_response import EVENT_STREAM, NO_CACHE, TurnResponse, base64_text, reporting_errors, sse
from server.doors.errors import ApiError, ApiErrorBody

STREAM_FORMATS = ("audio", "sse")
BINARY = {"schema": {"type": "string", "format": "binary"}}
SOUND_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "the sound",
        "content": dict.fromkeys((*MEDIA_TYPES.values(), EVENT_STREAM), BINARY),
    },
    400: {"model": ApiErrorBody, "description": "a field has an impossible value"},
    404: {"model": ApiErrorBody, "description": "the model is unknown"},
    500: {"model": ApiErrorBody, "description": "the worker was lost"},
    503: {"model": ApiErrorBody, "description": "the queue is full, or the server shuts down"},
}


@dataclass(frozen=True)
class SoundForm:
    """How the sound is sent.

    Attributes:
        format: of the file.
        speed: of the sound.
        stream: the file itself, or a stream of events with slices of it.
        params: names of the worker's fields in its errors -> names in the client's request.
    """

    format: FormatName
    speed: float
    stream: Literal["audio", "sse"]
    params: Mapping[str, str]


def sound_response(turns: ChatTurns, turn: TurnRequest, form: SoundForm, identity: Identity) -> Response:
    """The response, whose turn begins when it is sent."""
    if form.stream == "sse":
        return TurnResponse(reporting_errors(_events(turns, turn, form, identity)), EVENT_STREAM, NO_CACHE)
    return TurnResponse(_file(turns, turn, form, identity), MEDIA_TYPES[form.format])


async def _file(turns: ChatTurns, turn: TurnRequest, form: SoundForm, identity: Identity) -> AsyncGenerator[bytes]:
    """The encoded sound in parts."""
    async with aclosing(_encoded(turns, turn, form, identity)) as parts:
        async for part in parts:
            if isinstance(part, bytes):
                yield part


async def _events(turns: ChatTurns, turn: TurnRequest, form: SoundForm, identity: Identity) -> AsyncGenerator[bytes]:
    """The encoded sound as a stream of events."""
    async with aclosing(_encoded(turns, turn, form, identity)) as parts:
        async for part in parts:
            if isinstance(part, bytes):
                yield sse({"type": "speech.audio.delta", "audio": base64_text(part)})
            else:
                yield sse({"type": "speech.audio.done", "usage": usage_of(part), "finish_reason": part.stopped})


def usage_of(finished: TurnFinished) -> dict[str, int]:
    """Tokens of the text and of its speech, as the API counts them."""
    n_in, n_out = finished.usage.text_tokens, finished.usage.speech_tokens
    return {"input_tokens": n_in, "output_tokens": n_out, "total_tokens": n_in + n_out}


async def _encoded(
    turns: ChatTurns, request: TurnRequest, form: SoundForm, identity: Identity
) -> AsyncGenerator[bytes | TurnFinished]:
    """The encoded sound in parts, then the end of the turn. Raises: ApiError."""
    loop, encoder = asyncio.get_running_loop(), SoundEncoder(form.format, form.speed)
    finished: TurnFinished | None = None
    try:
        async with turns.open(request, identity) as turn:
            async for event in turn.events():
                if isinstance(event, TurnSound):
                    if data := await loop.run_in_executor(ENCODERS, encoder.push, event.pcm):
                        yield data
                elif isinstance(event, TurnFinished):
                    finished = event
    except ApiError as error:
        raise error.renamed(form.params) from None
    if data := await loop.run_in_executor(ENCODERS, encoder.finish):
        yield data
    assert finished is not None, "expected a turn that ends with its usage"
    yield finished
