"""`POST /v1/audio/speech`: a text as sound, in six formats, as a file or as a stream of events."""

import asyncio
from dataclasses import dataclass

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from server.access.identity import identity_of
from server.access.shares import run_shared
from server.admission import Admission
from server.dispatch.workers import Workers
from server.doors.core.chat_turn import ChatTurns, TurnPath, TurnRequest
from server.doors.core.door_needs import needs_asked
from server.doors.core.sound_formats import MEDIA_TYPES
from server.doors.core.sound_response import SOUND_RESPONSES, SoundForm, sound_response
from server.doors.core.turn_voice import speak_voice, voice_fields
from server.doors.errors import ApiError
from server.doors.model_names import ModelNames
from server.doors.speech.request import SpeechOrder, speech_order
from server.doors.voices import VoiceNames
from worker.protocol.speech_messages import SpeakRequest

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


@dataclass(frozen=True)
class SpeechDoor:
    """What the route uses."""

    turns: ChatTurns
    names: ModelNames
    voices: VoiceNames
    admission: Admission


class VoiceList(BaseModel):
    """Names that `voice` takes."""

    voices: list[str]


def speech_routes(door: SpeechDoor, workers: Workers) -> APIRouter:
    """The routes of spoken texts and their voices. workers: with the speakers of speech models."""
    router = APIRouter()

    @router.get("/v1/audio/voices")
    async def voices() -> VoiceList:
        known = await asyncio.to_thread(door.voices.all)
        found = [worker.about("speech").get("speakers") for worker in workers.all]
        speakers = [str(name) for names in found if isinstance(names, list) for name in names]
        return VoiceList(voices=list(dict.fromkeys([*speakers, *known])))

    @router.post(PATH, responses=SOUND_RESPONSES, openapi_extra={"requestBody": BODY}, response_class=Response)
    async def speech(request: Request) -> Response:
        body, identity = await request.body(), identity_of(request)
        order = await run_shared(speech_order, body)
        model = door.names.resolve_speech_for(order.model, identity)
        if (refusal := door.admission.refusal(request, "chat")) is not None:
            raise ApiError(403, refusal)
        make = speak_turn if model == door.names.speech else speech_turn
        turns = door.turns.at(needs_asked(request).labels)
        turn = await run_shared(make, door.voices, order)
        form = SoundForm(order.format, order.speed, order.stream, PARAMS)
        return sound_response(turns, turn, form, identity)

    return router


def speech_turn(voices: VoiceNames, order: SpeechOrder) -> TurnRequest:
    """The request to the omni model, which speaks with its own voice. Slow: call on a thread. Raises: ApiError."""
    tts = voice_fields(voices, order.voice, order.ref_audio)
    return TurnRequest(TurnPath.SPEECH, {"text": order.text, "tts": tts, "seed": order.seed})


def speak_turn(voices: VoiceNames, order: SpeechOrder, *, is_open: bool = False) -> TurnRequest:
    """The request to the speech model. Slow: call on a thread. Raises: ApiError.

    is_open: the text follows in further messages.
    """
    voice = speak_voice(voices, order.voice, order.ref_audio)
    fields = {**order.speak, **voice, "seed": order.seed, "is_open": is_open}
    return TurnRequest(TurnPath.SPEAK, {"type": SpeakRequest.kind(), "text": order.text, **fields})
