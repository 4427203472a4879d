"""The voice of a turn: from what a client names or sends to the fields of the worker's request."""

from models.errors import AudioError
from server.doors.errors import ApiError
from server.doors.voices import VoiceNames
from server.registry.sound_upload import decoded_sound
from worker.protocol.content import RATE_IN
from worker.protocol.speech_messages import VOICE_RATE
from worker.protocol.wire import Sound


def speak_voice(voices: VoiceNames, name: str, ref_audio: str | None) -> dict[str, object]:
    """Voice fields of the worker's request to the speech model, which knows its own speakers. Slow: call on a thread.

    Args:
        voices: the voices of this server, of which those that the settings map to others count.
        name, ref_audio: as for `voice_fields`.
    Raises: ApiError.
    """
    rate = {} if ref_audio is None else {"ref_audio_rate": VOICE_RATE}
    return {"voice": voices.mapped(name), **rate, **_sound_field(ref_audio, VOICE_RATE)}


def voice_fields(voices: VoiceNames, name: str, ref_audio: str | None, *, param: str = "voice") -> dict[str, object]:
    """Fields of `tts` of the worker's request. Slow: call on a thread.

    Args:
        voices: the voices of this server.
        name: the voice that the client names.
        ref_audio: a sound file in base64 whose voice speaks instead.
        param: name of the voice's field, for errors.
    Raises: ApiError.
    """
    try:
        resolved = voices.resolve(name)
    except ApiError as error:
        error.param = param
        raise
    if ref_audio is not None:
        return _sound_field(ref_audio, RATE_IN)
    return {} if resolved is None else {"ref_audio_path": resolved}


def _sound_field(ref_audio: str | None, rate: int) -> dict[str, object]:
    """The sound of a voice as the worker takes it. Raises: ApiError."""
    if ref_audio is None:
        return {}
    try:
        return {"ref_audio_data": Sound(decoded_sound(ref_audio, rate=rate)).base64()}
    except AudioError as error:
        message = str(error).replace("audio_base64", "ref_audio", 1)
        raise ApiError(400, message, param="ref_audio", code="invalid_value") from None
