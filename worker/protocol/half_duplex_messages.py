"""Every message of a half-duplex conversation, and the functions that read them. Torch-free.

`stop`, `interrupt`, `stopped` and `error` are those of the duplex protocol.
"""

from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from worker.describe import TypeWords
from worker.protocol.codec import (
    FieldGroup,
    FromClient,
    FromServer,
    OneDecimal,
    PictureField,
    Reader,
    SoundField,
    known_fields,
)
from worker.protocol.gateway_messages import Queued, QueueDone, QueueUpdate
from worker.protocol.messages import (
    MAX_UNIT_PICTURES,
    MAX_UNIT_PIXELS,
    SYSTEM_PROMPT,
    Error,
    Interrupt,
    Stop,
    Stopped,
)
from worker.protocol.system_content import known_items
from worker.protocol.wire import SOUND_RATE, picture_bytes

TIMEOUT_S = 300.0


# --- from the client ------------------------------------------------------------------------------


class SystemText(FieldGroup):
    """A text of the system message."""

    type: Literal["text"] = "text"
    text: str = Field(description="the text")


class SystemSound(FieldGroup):
    """A sound of the system message."""

    type: Literal["audio"] = "audio"
    data: SoundField = Field(description="float32 at 16 kHz")


SystemItem = Annotated[SystemText | SystemSound, Field(discriminator="type")]


class VadFields(FieldGroup):
    """When sound counts as speech."""

    threshold: float = Field(0.7, ge=0.05, le=1, description="probability of speech at which a segment begins")
    min_speech_duration_ms: int = Field(128, ge=0, le=10_000, description="segments with less speech are ignored")
    min_silence_duration_ms: int = Field(500, ge=100, le=10_000, description="silence that ends the user's turn")
    speech_pad_ms: int = Field(30, ge=0, le=1000, description="sound before the first speech that belongs to the turn")
    barge_in: bool = Field(
        False, description="speech during an answer interrupts it; `false`: sound during an answer is ignored"
    )
    barge_in_ms: int = Field(200, ge=0, le=10_000, description="speech after which an answer is interrupted")


class AnswerFields(FieldGroup):
    """How the text of an answer is generated."""

    max_new_tokens: int = Field(256, ge=1, le=4096, description="tokens at most")
    length_penalty: float = Field(1.1, ge=0.1, le=5, description="above 1: the end of the answer is less likely")
    temperature: float = Field(0.7, ge=0, le=2, description="of text tokens; 0: the most likely one")
    top_k: int = Field(100, ge=0, le=2**31 - 1, description="number of most likely tokens to draw from; 0: all")
    top_p: float = Field(0.8, ge=0, le=1, description="probability mass to draw from; 0 and 1: all")
    seed: int | None = Field(None, ge=0, le=2**64 - 1, description="of all random draws; null: drawn by the server")


class SpokenFields(FieldGroup):
    """The speech of an answer."""

    enabled: bool = Field(True, description="voice the answers; `false`: text only")


class LengthFields(FieldGroup):
    """The length of the conversation."""

    timeout_s: float = Field(TIMEOUT_S, ge=1, le=86_400, description="seconds after which the conversation ends")


class VisionFields(FieldGroup):
    """The pictures of the user's turns."""

    frame_interval_s: float = Field(1.0, ge=0.1, le=60, description="seconds between two pictures of a turn")
    max_slice_nums: int = Field(1, ge=1, le=9, description="slices of a large picture")


class HalfDuplexSettings(FieldGroup):
    """The `config` of `prepare`. Unknown keys are ignored."""

    vad: Annotated[VadFields, known_fields(VadFields)] = Field(VadFields(), description="when sound counts as speech")
    generation: Annotated[AnswerFields, known_fields(AnswerFields)] = Field(
        AnswerFields(), description="how the text of an answer is generated"
    )
    tts: Annotated[SpokenFields, known_fields(SpokenFields)] = Field(
        SpokenFields(), description="the speech of an answer"
    )
    vision: Annotated[VisionFields, known_fields(VisionFields)] = Field(
        VisionFields(), description="the pictures of the user's turns"
    )
    session: Annotated[LengthFields, known_fields(LengthFields)] = Field(
        LengthFields(), description="the length of the conversation"
    )


DEFAULTS = HalfDuplexSettings()


class HalfDuplexPrepare(FromClient):
    """Start or restart the conversation with a new context. Answered with `prepared`.

    `system_prompt` and `ref_audio_base64` are used where `system_content` is missing.
    """

    type: Literal["prepare"] = "prepare"
    system_content: Annotated[list[SystemItem], TypeWords("list of items")] | None = Field(
        None,
        description="the system message: items `{type: text, text}` and `{type: audio, data}`; the first sound "
        "is also the voice of the answers",
    )
    system_prompt: str = Field(SYSTEM_PROMPT, description="the text of the system message")
    ref_audio_base64: SoundField | None = Field(
        None, description="float32 at 16 kHz: a sound in the system message, and the voice of the answers"
    )
    config: Annotated[HalfDuplexSettings, known_fields(HalfDuplexSettings)] = Field(
        DEFAULTS, description="settings of the conversation; the others keep their defaults"
    )

    @classmethod
    def adapted(cls, given: dict[str, Any]) -> dict[str, Any]:
        """The object with known items of `system_content` only, and without an empty voice. Raises: WireError."""
        given = {key: value for key, value in given.items() if key != "ref_audio_base64" or value != ""}
        if given.get("system_content") is not None:
            given["system_content"] = known_items(given["system_content"])
        return given

    def system(self) -> list[str | np.ndarray]:
        """Texts and sounds ([n] float32 at 16 kHz) of the system message. Raises: WireError bad_base64, bad_audio."""
        if self.system_content is None:
            voice = self.ref_audio_base64
            return [self.system_prompt, *([voice.samples("prepare.ref_audio_base64")] if voice else [])]
        parts: list[str | np.ndarray] = []
        for i, item in enumerate(self.system_content):
            if isinstance(item, SystemText):
                parts.append(item.text)
            else:
                parts.append(item.data.samples(f"prepare.system_content[{i}].data"))
        return parts or [SYSTEM_PROMPT]


class SpeechChunk(FromClient):
    """Any length of the user's sound, and what the user saw meanwhile. Not answered by itself."""

    aliases: ClassVar = {"audio_base64": ("audio",), "frame_base64_list": ("video_frames",)}
    sound_field = "audio_base64"
    pictures_field = "frame_base64_list"

    type: Literal["audio_chunk"] = "audio_chunk"
    audio_base64: SoundField | None = Field(None, description="float32 at 16 kHz; without sound the message is ignored")

    frame_base64_list: list[PictureField] = Field(
        [],
        description=f"JPEG or another common format, at most {MAX_UNIT_PICTURES} of {MAX_UNIT_PIXELS} pixels in total",
    )

    def samples(self) -> np.ndarray | None:
        """[n] float32 at 16 kHz, unchecked: may contain NaN; None without sound. Raises: WireError."""
        return self.audio_base64.samples("audio_chunk.audio_base64") if self.audio_base64 else None

    def pictures(self) -> list[bytes]:
        """Encoded pictures. Raises: WireError bad_base64, bad_image."""
        frames = self.frame_base64_list
        return [picture_bytes(frames[i], f"audio_chunk.frame_base64_list[{i}]") for i in range(len(frames))]


# --- to the client --------------------------------------------------------------------------------


class TurnPrepared(FromServer):
    """The conversation is ready for sound. Sound of the first half second is ignored."""

    left_out = frozenset({"recording_session_id"})

    type: Literal["prepared"] = "prepared"
    session_id: str = Field(description="the session's id")
    timeout_s: float = Field(description="seconds after which the conversation ends")
    recording_session_id: str | None = Field(None, description="id of the recording, if the session is recorded")


class VadState(FromServer):
    """The user started or stopped speaking. Sent on changes only."""

    type: Literal["vad_state"] = "vad_state"
    speaking: bool = Field(description="the user speaks")


class TurnHeard(FromServer):
    """The user's turn is over, and its answer is made."""

    left_out = frozenset({"video_frames"})

    type: Literal["generating"] = "generating"
    speech_duration_ms: int = Field(description="length of the user's turn, ms")
    video_frames: int | None = Field(None, description="number of its pictures, if it has any")


class TurnChunk(FromServer):
    """A part of an answer. The last one, with `is_final`, has neither text nor sound."""

    sound_field = "audio_data"

    type: Literal["chunk"] = "chunk"
    chunk_index: int = Field(ge=0, description="number of the part within its answer, from 0")
    text_delta: str | None = Field(None, description="further text; null: none")
    audio_data: SoundField | None = Field(None, description="float32 at 24 kHz; null: no sound in this part")
    audio_sample_rate: int = Field(SOUND_RATE, description="of the sound, Hz")
    is_final: bool = Field(False, description="the answer is complete")
    duration_ms: float | None = Field(None, description="length of the sound, ms; null without sound")


class TurnDone(FromServer):
    """An answer is over, after its last `chunk`."""

    type: Literal["turn_done"] = "turn_done"
    turn_index: int = Field(ge=1, description="number of the turn since `prepare`, from 1")
    text: str = Field(description="the whole text of the answer")
    stopped: str = Field("stop", description="`stop` at its end, `length` at the limit, `interrupted`")


class AnswerInterrupted(FromServer):
    """The answer is stopped, by speech or by a request: a player drops the sound that it holds.

    If the answer was not complete, a text that was on its way, the last `chunk` and `turn_done` follow, without sound.
    """

    type: Literal["interrupted"] = "interrupted"
    turn_index: int | None = Field(None, description="number of the turn; null: there was no answer to stop")
    text: str = Field("", description="text of the answer that was sent before")
    audio_ms: OneDecimal = Field(0.0, description="length of its sound that was sent before, ms")
    heard_ms: OneDecimal = Field(0.0, description="of which a player that began with the first sound has played, ms")


class TurnTimeout(FromServer):
    """The conversation has lasted `timeout_s`, or no message came for too long; the connection closes next."""

    type: Literal["timeout"] = "timeout"
    elapsed_s: OneDecimal = Field(description="seconds since `prepare`, or since the connection before it")
    reason: str = Field("", description="for example `Session timeout (300.0s)`")


# --- reading --------------------------------------------------------------------------------------

HalfDuplexRequest = Annotated[HalfDuplexPrepare | SpeechChunk | Stop | Interrupt, Field(discriminator="type")]
HalfDuplexAnswer = Annotated[
    TurnPrepared
    | VadState
    | TurnHeard
    | TurnChunk
    | TurnDone
    | AnswerInterrupted
    | Stopped
    | TurnTimeout
    | Error
    | Queued
    | QueueUpdate
    | QueueDone,
    Field(discriminator="type"),
]
HALF_DUPLEX_CLIENT: Reader[HalfDuplexRequest] = Reader(HalfDuplexRequest, unknown="Unknown type")
HALF_DUPLEX_SERVER: Reader[HalfDuplexAnswer] = Reader(HalfDuplexAnswer)
