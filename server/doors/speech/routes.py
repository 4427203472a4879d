"""`POST /v1/audio/speech`: a text as sound, in six formats, as a file or as a stream of events."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request, Response

from server.access.identity import Identity, identity_of
from server.access.shares import run_shared
from server.admission import Admission
from server.doors.core.chat_turn import ChatTurns, TurnFinished, TurnPath, TurnRequest, TurnSound
from server.doors.core.sound_formats import ENCODERS, MEDIA_TYPES, SoundEncoder
from server.doors.core.turn_response import EVENT_STREAM, NO_CACHE, TurnResponse, base64_text, reporting_errors, sse
from server.doors.core.turn_voice import voice_fields
from server.doors.errors import ApiError, ApiErrorBody
from server.doors.model_names import ModelNames
from server.doors.speech.request import SpeechOrder, speech_order
from server.doors.voices import VoiceNames
from worker.protocol.chat_messages import ReplyUsage

PATH = "/v1/audio/speech"
# Names of the worker's fields in its errors -> names in the request.
PARAMS = {"text": "input", "conversation": "input", "tts.ref_audio_data": "ref_audio", "ref_audio_path": "voice"}
SCHEMA = {
    "type": "object",
    "required": ["model", "input"],
    "properties": {
        "model": {"type": "string"},
        "input": {"type": "string", "minLength": 1, "maxLength": 4096},
        "voice": {"type": "string"},
        "response_format": {"enum": list(MEDIA_TYPES)},
        "speed": {"type": "number", "minimum": 0.25, "maximum": 4},
        "stream_format": {"enum": ["audio", "sse"]},
    },
}
BODY = {"required": True, "content": {"application/json": {"schema": SCHEMA}}}
BINARY = {"schema": {"type": "string", "format": "binary"}}
RESPONSES: dict[int | str, dict[str, Any]] = {
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
class SpeechDoor:
    """What the route uses."""

    turns: ChatTurns
    names: ModelNames
    voices: VoiceNames
    admission: Admission


def speech_routes(door: SpeechDoor) -> APIRouter:
    """The route of spoken texts."""
    router = APIRouter()

    @router.post(PATH, responses=RESPONSES, openapi_extra={"requestBody": BODY}, response_class=Response)
    async def speech(request: Request) -> Response:
        body, identity = await request.body(), identity_of(request)
        order = await run_shared(speech_order, body)
        door.names.resolve_for(order.model, identity)
        if (refusal := door.admission.refusal(request, "chat")) is not None:
            raise ApiError(403, refusal)
        tts = await run_shared(voice_fields, door.voices, order.voice, order.ref_audio)
        fields: dict[str, object] = {"text": order.text, "tts": tts, "seed": order.seed}
        turn = TurnRequest(TurnPath.SPEECH, fields)
        if order.stream == "sse":
            events = reporting_errors(_events(door.turns, turn, order, identity))
            return TurnResponse(events, EVENT_STREAM, NO_CACHE)
        return TurnResponse(_file(door.turns, turn, order, identity), MEDIA_TYPES[order.format])

    return router


async def _file(
    turns: ChatTurns, request: TurnRequest, order: SpeechOrder, identity: Identity
) -> AsyncGenerator[bytes]:
    """The encoded sound in parts."""
    async with aclosing(_encoded(turns, request, order, identity)) as parts:
        async for part in parts:
            if isinstance(part, bytes):
                yield part


async def _events(
    turns: ChatTurns, request: TurnRequest, order: SpeechOrder, identity: Identity
) -> AsyncGenerator[bytes]:
    """The encoded sound as a stream of events."""
    async with aclosing(_encoded(turns, request, order, identity)) as parts:
        async for part in parts:
            if isinstance(part, bytes):
                yield sse({"type": "speech.audio.delta", "audio": base64_text(part)})
            else:
                n_in, n_out = part.text_tokens, part.speech_tokens
                usage = {"input_tokens": n_in, "output_tokens": n_out, "total_tokens": n_in + n_out}
                yield sse({"type": "speech.audio.done", "usage": usage})


async def _encoded(
    turns: ChatTurns, request: TurnRequest, order: SpeechOrder, identity: Identity
) -> AsyncGenerator[bytes | ReplyUsage]:
    """The encoded sound in parts, then the usage. Raises: ApiError."""
    loop, encoder = asyncio.get_running_loop(), SoundEncoder(order.format, order.speed)
    usage: ReplyUsage | None = None
    try:
        async with turns.open(request, identity) as turn:
            async for event in turn.events():
                if isinstance(event, TurnSound):
                    if data := await loop.run_in_executor(ENCODERS, encoder.push, event.pcm):
                        yield data
                elif isinstance(event, TurnFinished):
                    usage = event.usage
    except ApiError as error:
        raise error.renamed(PARAMS) from None
    if data := await loop.run_in_executor(ENCODERS, encoder.finish):
        yield data
    assert usage is not None, "expected a turn that ends with its usage"
    yield usage
