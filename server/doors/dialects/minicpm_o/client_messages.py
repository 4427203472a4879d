"""The messages of clients of the MiniCPM-o ecosystem, in both forms, and their reading. Unknown fields are ignored."""

from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from models.errors import AudioError
from server.registry.sound_upload import decoded_sound
from worker.protocol.codec import FieldGroup, FromClient, Reader, known_fields
from worker.protocol.codes import ErrorCode
from worker.protocol.messages import SYSTEM_PROMPT, AudioChunk, Prepare
from worker.protocol.wire import Sound, WireError, picture_bytes

WAV_BEGINS = "UklGR"  # base64 of RIFF


class GivenVoice(FieldGroup):
    """Reference voices: base64 of float32 at 16 kHz, or of a sound file."""

    ref_audio: str | None = None
    tts_ref_audio: str | None = None


NO_VOICE = GivenVoice()


class InitPayload(FieldGroup):
    """The session, in the newer form. config: settings of the session."""

    system_prompt: str | None = None
    config: dict[str, Any] = Field({})
    voice: Annotated[GivenVoice, known_fields(GivenVoice)] = NO_VOICE
    max_slice_nums: int | None = Field(None, ge=1)


class UpdatedSession(FieldGroup):
    """The session, in the form of April 2026."""

    instructions: str | None = None
    ref_audio: str | None = None
    tts_ref_audio: str | None = None
    max_slice_nums: int | None = Field(None, ge=1)


NO_PAYLOAD, NO_SESSION = InitPayload(), UpdatedSession()


class ModeInit(FromClient):
    """The newer form's first message."""

    type: Literal["session.init"] = "session.init"
    payload: Annotated[InitPayload, known_fields(InitPayload)] = NO_PAYLOAD

    @property
    def voice(self) -> GivenVoice:
        return self.payload.voice

    def prepare(self) -> Prepare:
        """The message that begins the context, without a voice."""
        given = self.payload
        prompt = given.system_prompt or SYSTEM_PROMPT
        return Prepare(system_prompt=prompt, config=given.config, max_slice_nums=given.max_slice_nums)


class ModeUpdate(FromClient):
    """The first message of the form of April 2026."""

    type: Literal["session.update"] = "session.update"
    session: Annotated[UpdatedSession, known_fields(UpdatedSession)] = NO_SESSION

    @property
    def voice(self) -> GivenVoice:
        return GivenVoice(ref_audio=self.session.ref_audio, tts_ref_audio=self.session.tts_ref_audio)

    def prepare(self) -> Prepare:
        """The message that begins the context, without a voice."""
        given = self.session
        return Prepare(system_prompt=given.instructions or SYSTEM_PROMPT, max_slice_nums=given.max_slice_nums)


class InputAppend(FromClient):
    """Input in the newer form: a unit, or a conversation in chat mode."""

    type: Literal["input.append"] = "input.append"
    input: dict[str, Any]


class _Unit(FromClient):
    """One unit: a second of sound in float32 at 16 kHz, and its pictures. input_id: repeated in the answer."""

    aliases: ClassVar = {"frame_base64_list": ("video_frames",)}

    audio: str
    frame_base64_list: list[str] = Field([])
    force_listen: bool = False
    force_speak: bool = False
    max_slice_nums: int | list[int] | None = None
    input_id: str | int | None = None

    def chunk(self) -> AudioChunk:
        """The worker's message. Slow for large pictures. Raises: WireError."""
        sound = Sound(Sound(self.audio).samples("audio"))
        frames = self.frame_base64_list
        pictures: list[str | bytes] = [picture_bytes(frames[i], f"video_frames[{i}]") for i in range(len(frames))]
        return AudioChunk(
            audio_base64=sound,
            frame_base64_list=pictures,
            force_listen=self.force_listen,
            force_speak=self.force_speak,
            max_slice_nums=self.max_slice_nums,
        )


class InputUnit(_Unit):
    """The content of `input` outside chat mode."""

    type: Literal["input"] = "input"


class BufferAppend(_Unit):
    """A unit in the form of April 2026."""

    type: Literal["input_audio_buffer.append"] = "input_audio_buffer.append"


class SessionClose(FromClient):
    """The end of the session."""

    type: Literal["session.close"] = "session.close"


AnyMessage = Annotated[ModeInit | ModeUpdate | InputAppend | BufferAppend | SessionClose, Field(discriminator="type")]
MESSAGES: Reader[ModeInit | ModeUpdate | InputAppend | BufferAppend | SessionClose] = Reader(AnyMessage)
UNITS: Reader[InputUnit] = Reader(InputUnit)
ModeMessage = ModeInit | ModeUpdate | InputAppend | BufferAppend | SessionClose


def read_message(text: str) -> ModeMessage:
    """The message in a text frame. Raises: WireError."""
    return MESSAGES.read_text(text)


def read_unit(message: InputAppend | BufferAppend) -> InputUnit | BufferAppend:
    """The unit in a message. Raises: WireError."""
    if isinstance(message, BufferAppend):
        return message
    return UNITS.read({**message.input, "type": InputUnit.kind()})


def voice_sound(text: str | None, name: str) -> Sound | None:
    """The sound of a voice; None if there is none. Slow: call it on a thread.

    Args:
        text: base64 of float32 at 16 kHz, or of a sound file.
        name: of the field, for errors.
    Raises: WireError.
    """
    if not text:
        return None
    if not text.startswith((WAV_BEGINS, "data:")):
        return Sound(Sound(text).samples(name))
    try:
        samples: np.ndarray = decoded_sound(text)
    except AudioError as error:
        message = str(error).replace("audio_base64", name, 1)
        raise WireError(ErrorCode.BAD_AUDIO, name, expected="a sound file", got="another one", text=message) from None
    return Sound(samples)
