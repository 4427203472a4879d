"""Routes of the registry of reference voices."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import APIRouter, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse
from pydantic import ValidationError

from models.errors import AudioError, ModelError
from server.registry.reference_sound import SoundFiles
from server.registry.sound_upload import SoundTooLargeError, decoded_sound
from server.registry.voices import (
    ReadOnlyVoiceError,
    RegistryBusyError,
    TooManyVoicesError,
    UnknownVoiceError,
    VoiceNameError,
    VoiceRegistry,
)
from server.routes.bodies import Problem
from server.routes.voice_bodies import (
    ExternalVoice,
    RefAudioChanged,
    RefAudioInfo,
    RefAudioList,
    RefAudioSound,
    VoiceUpload,
)
from worker.protocol.speech_messages import VOICE_RATE
from worker.voice_registry import RegisteredVoice

T = TypeVar("T")
PATH = "/api/assets/ref_audio"
MAX_DECODING = 2  # uploads at a time
STATUS: dict[type[Exception], int] = {
    SoundTooLargeError: 413,
    TooManyVoicesError: 413,
    AudioError: 400,
    VoiceNameError: 400,
    ReadOnlyVoiceError: 403,
    UnknownVoiceError: 404,
    RegistryBusyError: 503,
}
EXTERNAL = (
    "path: expected a sound in audio_base64 (POST /api/assets/ref_audio), got the path of a file: "
    "this server opens no files that clients name"
)


def _refused(**statuses: str) -> dict[int | str, dict[str, Any]]:
    return {int(status[1:]): {"model": Problem, "description": text} for status, text in statuses.items()}


UNKNOWN = _refused(_404="there is no such voice")
BUSY = _refused(_503="the registry is locked by another process", _507="the voice cannot be written to disk")
UPLOAD_BODY = {
    "requestBody": {"required": True, "content": {"application/json": {"schema": VoiceUpload.model_json_schema()}}}
}


def voice_routes(registry: VoiceRegistry) -> APIRouter:
    router = APIRouter()
    sounds = SoundFiles()
    decoding = asyncio.Semaphore(MAX_DECODING)

    async def on_thread(work: Callable[[], T]) -> T:
        """The result of slow work. Raises: HTTPException."""
        try:
            return await asyncio.to_thread(work)
        except ModelError as error:
            status = next((status for kind, status in STATUS.items() if isinstance(error, kind)), 500)
            raise HTTPException(status, str(error)) from None
        except OSError as error:
            raise HTTPException(507, f"voice: expected a writable folder, got {error.strerror}") from None

    @router.get(PATH)
    async def all_voices() -> RefAudioList:
        found = [_info(voice) for voice in await on_thread(registry.all)]
        return RefAudioList(total=len(found), ref_audios=found)

    @router.post(PATH, openapi_extra=UPLOAD_BODY, responses={**BUSY, 422: {"description": "a field is missing"}})
    async def upload(request: Request) -> RefAudioChanged:
        # Read here, because FastAPI would parse megabytes on the event loop.
        body = await request.body()

        def store() -> RegisteredVoice:
            given = _upload_of(body)
            return registry.add(
                given.name, decoded_sound(given.audio_base64, rate=VOICE_RATE), given.transcript, rate=VOICE_RATE
            )

        async with decoding:
            voice = await on_thread(store)
        return RefAudioChanged(id=voice.id, name=voice.name, message="Uploaded")

    @router.post(f"{PATH}/external", responses=_refused(_403="files of the server's machine cannot be registered"))
    async def register_file(_: ExternalVoice) -> JSONResponse:
        return JSONResponse({"success": False, "message": EXTERNAL, "detail": EXTERNAL}, 403)

    @router.delete(f"{PATH}/{{voice_id}}", responses={**UNKNOWN, **BUSY})
    async def delete(voice_id: str) -> RefAudioChanged:
        voice = await on_thread(lambda: registry.delete(voice_id))
        return RefAudioChanged(id=voice.id, message="Deleted")

    @router.get(f"{PATH}/{{voice_id}}/audio", responses=UNKNOWN)
    async def sound_of(voice_id: str) -> RefAudioSound:
        voice = await on_thread(lambda: registry.find(voice_id))
        try:
            sound = await sounds.read(registry.file_of(voice))
        except AudioError as error:  # damaged, or deleted meanwhile
            raise HTTPException(404, str(error)) from None
        return RefAudioSound(data=sound.data, name=voice.name, duration=sound.duration_s)

    @router.get(f"{PATH}/{{voice_id}}/audio.wav", responses=UNKNOWN, response_class=FileResponse)
    async def file_of(voice_id: str) -> FileResponse:
        voice = await on_thread(lambda: registry.find(voice_id))
        return FileResponse(registry.file_of(voice), media_type="audio/wav")

    return router


def _info(voice: RegisteredVoice) -> RefAudioInfo:
    return RefAudioInfo(**voice.model_dump())


def _upload_of(body: bytes) -> VoiceUpload:
    """Raises: RequestValidationError, which the application turns into a 422 response."""
    try:
        return VoiceUpload.model_validate_json(body)
    except ValidationError as error:
        details = error.errors(include_url=False, include_context=False, include_input=False)
        raise RequestValidationError(details) from None
