"""`POST /v1/chat/completions`: a conversation and its answer, in text or by voice, whole or as a stream."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request, Response

from server.access.identity import identity_of
from server.access.shares import run_shared
from server.admission import Admission
from server.doors.chat.audio_answers import AudioAnswers
from server.doors.chat.completions import CompletionHead, completion, completion_chunks
from server.doors.chat.messages import fetch_pictures
from server.doors.chat.parts import AnswerPart, answer_parts
from server.doors.chat.request import ChatOrder, chat_order
from server.doors.core.chat_turn import ChatTurns
from server.doors.core.door_needs import needs_asked
from server.doors.core.picture_urls import PictureUrls
from server.doors.core.turn_response import EVENT_STREAM, NO_CACHE, TurnResponse, reporting_errors, with_pings
from server.doors.core.turn_voice import voice_fields
from server.doors.errors import ApiError, ApiErrorBody
from server.doors.model_names import ModelNames
from server.doors.voices import VoiceNames

PATH = "/v1/chat/completions"
PING_S = 10.0  # without an event, such as in the queue
SCHEMA = {
    "type": "object",
    "required": ["model", "messages"],
    "properties": {
        "model": {"type": "string"},
        "messages": {"type": "array", "minItems": 1, "items": {"type": "object", "required": ["role"]}},
        "stream": {"type": "boolean"},
        "max_completion_tokens": {"type": "integer", "minimum": 1},
        "temperature": {"type": "number", "minimum": 0, "maximum": 2},
        "top_p": {"type": "number", "minimum": 0, "maximum": 1},
    },
}
BODY = {"required": True, "content": {"application/json": {"schema": SCHEMA}}}
RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "the completion, or a stream of its chunks",
        "content": {"application/json": {"schema": {"type": "object"}}, EVENT_STREAM: {"schema": {"type": "string"}}},
    },
    400: {"model": ApiErrorBody, "description": "a field has an impossible value"},
    404: {"model": ApiErrorBody, "description": "the model is unknown"},
    413: {"model": ApiErrorBody, "description": "the body or a medium in it is too long"},
    500: {"model": ApiErrorBody, "description": "the worker was lost"},
    503: {"model": ApiErrorBody, "description": "the queue is full, or the server shuts down"},
}


@dataclass(frozen=True)
class ChatDoor:
    """What the route uses."""

    turns: ChatTurns
    names: ModelNames
    voices: VoiceNames
    admission: Admission
    picture_urls: PictureUrls
    answers: AudioAnswers = field(default_factory=AudioAnswers)


def completion_routes(door: ChatDoor) -> APIRouter:
    """The route of chat completions."""
    router = APIRouter()

    @router.post(PATH, responses=RESPONSES, openapi_extra={"requestBody": BODY}, response_class=Response)
    async def complete(request: Request) -> Response:
        body, identity = await request.body(), identity_of(request)
        order = await run_shared(chat_order, body, lambda audio_id: door.answers.transcript(audio_id, identity.owner))
        del body
        model = door.names.resolve_for(order.model, identity)
        if (refusal := door.admission.refusal(request, "chat")) is not None:
            raise ApiError(403, refusal)
        turns = door.turns.at(needs_asked(request).labels)
        await fetch_pictures(order.messages, door.picture_urls)
        parts = answer_parts(turns, order, await _voice(door, order), identity)
        head = CompletionHead(model, order.audio, door.answers, identity.owner)
        if not order.stream:
            return TurnResponse(_closing(completion(parts, head), parts), "application/json")
        chunks = _closing(completion_chunks(parts, head, include_usage=order.include_usage), parts)
        return TurnResponse(reporting_errors(with_pings(chunks, PING_S)), EVENT_STREAM, NO_CACHE)

    return router


async def _voice(door: ChatDoor, order: ChatOrder) -> dict[str, object]:
    """Fields of the worker's request for the voice. Raises: ApiError."""
    if order.audio is None:
        return {}
    voice, reference = order.audio.voice, order.audio.ref_audio
    return await run_shared(voice_fields, door.voices, voice, reference, param="audio.voice")


async def _closing(chunks: AsyncGenerator[bytes], parts: AsyncGenerator[AnswerPart]) -> AsyncGenerator[bytes]:
    """The chunks; ends the turn with them."""
    async with aclosing(parts), aclosing(chunks):
        async for chunk in chunks:
            yield chunk
