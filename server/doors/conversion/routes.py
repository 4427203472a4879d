"""`POST /v1/audio/conversions`: a sound, or given speech tokens, in another voice, in six formats."""

from dataclasses import dataclass

from fastapi import APIRouter, Request, Response
from starlette.datastructures import UploadFile

from server.access.identity import identity_of
from server.access.shares import run_shared
from server.admission import Admission
from server.doors.conversion.request import ConversionOrder, conversion_order
from server.doors.core.chat_turn import ChatTurns, TurnPath, TurnRequest
from server.doors.core.door_needs import needs_asked
from server.doors.core.sound_formats import MEDIA_TYPES
from server.doors.core.sound_response import SOUND_RESPONSES, SoundForm, sound_response
from server.doors.core.turn_voice import voice_fields
from server.doors.errors import ApiError
from server.doors.model_names import ModelNames
from server.doors.voices import VoiceNames
from worker.protocol.speech_messages import VOICE_RATE
from worker.protocol.wire import Sound

PATH = "/v1/audio/conversions"
FORM = "multipart/form-data"
MAX_FILES, MAX_FIELDS = 2, 16
# Names of the worker's fields in its errors -> names in the request.
PARAMS = {"source_data": "file", "sound": "file", "ref_audio_data": "voice_file", "ref_audio_path": "voice"}
FILE = {"type": "string", "format": "binary"}
SCHEMA = {
    "type": "object",
    "required": ["model"],
    "properties": {
        "model": {"type": "string"},
        "file": FILE,
        "speech_tokens": {"type": "array", "items": {"type": "integer"}},
        "voice": {"type": "string"},
        "voice_file": FILE,
        "response_format": {"enum": list(MEDIA_TYPES)},
        "speed": {"type": "number", "minimum": 0.25, "maximum": 4},
        "stream_format": {"enum": ["audio", "sse"]},
        "seed": {"type": "integer", "minimum": 0},
    },
}
BODY = {"required": True, "content": {FORM: {"schema": SCHEMA}}}


@dataclass(frozen=True)
class ConversionDoor:
    """What the route uses."""

    turns: ChatTurns
    names: ModelNames
    voices: VoiceNames
    admission: Admission


def conversion_routes(door: ConversionDoor) -> APIRouter:
    """The route of voice conversions."""
    router = APIRouter()

    @router.post(PATH, responses=SOUND_RESPONSES, openapi_extra={"requestBody": BODY}, response_class=Response)
    async def convert(request: Request) -> Response:
        parts, identity = await _parts_of(request), identity_of(request)
        order = await run_shared(conversion_order, parts)
        del parts
        door.names.resolve_conversion_for(order.model, identity)
        if (refusal := door.admission.refusal(request, "chat")) is not None:
            raise ApiError(403, refusal)
        turns = door.turns.at(needs_asked(request).labels)
        fields = await run_shared(_fields, door.voices, order)
        form = SoundForm(order.format, order.speed, order.stream, PARAMS)
        return sound_response(turns, TurnRequest(TurnPath.CONVERSION, fields), form, identity)

    return router


def _fields(voices: VoiceNames, order: ConversionOrder) -> dict[str, object]:
    """The worker's request. Slow: call on a thread. Raises: ApiError for an unknown voice."""
    voice = voice_fields(voices, order.voice, None)
    if order.voice_sound is not None:
        voice = {"ref_audio_data": Sound(order.voice_sound).base64(), "ref_audio_rate": VOICE_RATE}
    source = None if order.source is None else Sound(order.source).base64()
    named = {"source_data": source, "speech_tokens": order.speech_tokens, **voice, "seed": order.seed}
    return {name: value for name, value in named.items() if value is not None}


async def _parts_of(request: Request) -> dict[str, str | bytes]:
    """The parts of a form: text, and the bytes of files. Raises: ApiError for another kind of body."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != FORM:
        raise ApiError(400, f"content-type: expected {FORM}, got {kind[:60] or 'none'}", param="content-type")
    async with request.form(max_files=MAX_FILES, max_fields=MAX_FIELDS) as form:
        return {name: await part.read() if isinstance(part, UploadFile) else part for name, part in form.items()}
