"""Every message between client, gateway and worker: what it holds and how it is read and written. Torch-free.

The one definition for all of them. Knows names, types and defaults; does not know sockets, nor what becomes of a
message. Sound and pictures are decoded when they are asked for, on whatever thread asks.
"""

from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import AfterValidator, ConfigDict, Field, computed_field

from worker.protocol.codec import FieldGroup, Message, PictureField, Reader, SoundField, known, write_message
from worker.protocol.system_content import texts_and_sound
from worker.protocol.wire import ErrorCode, Form, WireError, clean, picture_bytes

PROTOCOL_VERSION = 1
SYSTEM_PROMPT = "You are a helpful assistant."
TOKENS_PER_SLICE = 64
MAX_PAUSE_S = 86_400
MAX_ERROR_CHARS = 2000

Ms = Annotated[float, AfterValidator(lambda value: round(value, 3))]


def _rounded(value: float) -> float:
    return round(value, 1)


class Spec(FieldGroup):
    """What a client may ask for beyond the plain protocol; without it every client gets the plain one."""

    version: Literal[1] = Field(PROTOCOL_VERSION, description="of this protocol")
    partial_results: bool = Field(False, description="send `partial` messages while a unit runs")
    sound_in: Form = Field("base64", description="how sound of `audio_chunk` may come beside base64")
    sound_out: Form = Field("base64", description="how sound of `result` and `partial` is sent")
    backlog: Literal["keep", "catch_up"] = Field(
        "keep",
        description="chunks that wait: `keep` decides on each in turn; `catch_up` only listens until it has caught up",
    )


PLAIN_SPEC = Spec()
SpecField = Annotated[Spec, known(Spec)]


# --- from the client ------------------------------------------------------------------------------


class FromClient(Message):
    """Client to gateway, gateway to worker."""

    sends_nulls = False


class Prepare(FromClient):
    """Start the conversation, or start it anew: new context, units are counted from 1. Answered with `prepared`."""

    aliases: ClassVar = {"system_prompt": ("prefix_system_prompt",)}

    type: Literal["prepare"] = "prepare"
    system_prompt: str = Field(
        SYSTEM_PROMPT, description="plain text, set into the model's template with the voice inside"
    )
    ref_audio_base64: SoundField | None = Field(None, description="float32 at 16 kHz: the voice named in the prompt")
    tts_ref_audio_base64: SoundField | None = Field(
        None, description="float32 at 16 kHz: the voice that speaks; null: that of `ref_audio_base64`"
    )
    ref_audio_path: str | None = Field(None, description="name of a voice on the server; wins over `ref_audio_base64`")
    config: dict[str, Any] = Field({}, description="settings of the session; those not named have their defaults")
    max_slice_nums: int | None = Field(
        None, ge=1, description="slices of a large picture, for chunks that do not say; null: that of `config`"
    )
    deferred_finalize: bool = Field(True, description="accepted: a unit is always closed behind its result")
    spec: SpecField = Field(PLAIN_SPEC, description="options beyond the plain protocol")

    @classmethod
    def adapted(cls, given: dict[str, Any]) -> dict[str, Any]:
        """An empty voice is none. `system_content` stands in for what is not given: text, and its first sound."""
        given = {key: value for key, value in given.items() if value != "" or not key.endswith("ref_audio_base64")}
        if given.get("system_content") is None:
            return given
        texts, sound = texts_and_sound(given["system_content"])
        if texts and given.get("system_prompt") is None and given.get("prefix_system_prompt") is None:
            given["system_prompt"] = "\n".join(texts)
        if sound and given.get("ref_audio_base64") is None:
            given["ref_audio_base64"] = sound
        return given

    def ref_audio(self) -> np.ndarray | None:
        """[n] float32 at 16 kHz. Raises: WireError bad_base64, bad_audio."""
        sound = self.ref_audio_base64
        return sound.samples("prepare.ref_audio_base64") if sound else None

    def tts_ref_audio(self) -> np.ndarray | None:
        """[n] float32 at 16 kHz, `ref_audio` if there is no other. Raises: WireError bad_base64, bad_audio."""
        sound = self.tts_ref_audio_base64
        return sound.samples("prepare.tts_ref_audio_base64") if sound else self.ref_audio()


class AudioChunk(FromClient):
    """One unit: a second of sound and its pictures. Answered with one `result`, or one `error`."""

    aliases: ClassVar = {"audio_base64": ("audio",), "frame_base64_list": ("video_frames",)}
    sound_field = "audio_base64"
    pictures_field = "frame_base64_list"

    type: Literal["audio_chunk"] = "audio_chunk"
    audio_base64: SoundField = Field(description="float32 at 16 kHz, nominally 16000 samples")
    frame_base64_list: list[PictureField] = Field([], description="JPEG or another common format, of this second")
    force_listen: bool = Field(False, description="this unit listens; an open turn is closed")
    max_slice_nums: int | list[int] | None = Field(
        None, description="slices of a large picture, one number or one per picture; null: that of the session"
    )

    @classmethod
    def adapted(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Raises: WireError missing_audio."""
        sounds = ("audio_base64", "audio")
        given = {key: value for key, value in given.items() if key not in sounds or value not in (None, "")}
        if not given.keys().isdisjoint(sounds):
            return given
        raise WireError(
            ErrorCode.MISSING_AUDIO,
            "audio_chunk.audio_base64",
            expected="base64 text",
            got="nothing",
            text="Missing audio_base64",
        )

    def samples(self) -> np.ndarray:
        """[n] float32 at 16 kHz, as they came: may hold NaN. Raises: WireError bad_base64, bad_audio."""
        return self.audio_base64.samples("audio_chunk.audio_base64")

    def pictures(self) -> list[bytes]:
        """Encoded pictures. Raises: WireError bad_base64, bad_image."""
        frames = self.frame_base64_list
        return [picture_bytes(frames[i], f"audio_chunk.frame_base64_list[{i}]") for i in range(len(frames))]


class VideoFrame(FromClient):
    """One picture that belongs to the next `audio_chunk`. Not answered."""

    type: Literal["video_frame"] = "video_frame"
    frame: PictureField = Field(description="JPEG or another common format")

    def picture(self) -> bytes:
        """The encoded picture. Raises: WireError bad_base64, bad_image."""
        return picture_bytes(self.frame, "video_frame.frame")


class Pause(FromClient):
    """Take no units until `resume`. Answered with `paused` once all earlier chunks are answered."""

    type: Literal["pause"] = "pause"
    timeout: float | None = Field(
        None, ge=0, le=MAX_PAUSE_S, description="seconds after which the session ends; null: the server's setting"
    )


class Resume(FromClient):
    """Take units again. Answered with `resumed`."""

    type: Literal["resume"] = "resume"


class Stop(FromClient):
    """End the session. Answered with `stopped`."""

    type: Literal["stop"] = "stop"


class Interrupt(FromClient):
    """Stop speaking, as soon as it is read. Answered with `interrupted` at its turn."""

    type: Literal["interrupt"] = "interrupt"


class ClientDiagnostic(FromClient):
    """What a client reports of itself, any fields (`model_extra`). Kept by the gateway, not answered."""

    model_config = ConfigDict(extra="allow")

    type: Literal["client_diagnostic"] = "client_diagnostic"


# --- to the client --------------------------------------------------------------------------------


class FromServer(Message):
    """Worker to gateway, gateway to client."""


class Prepared(FromServer):
    """The session is ready for units."""

    left_out = frozenset({"recording_session_id"})

    type: Literal["prepared"] = "prepared"
    prompt_length: int = Field(description="characters of the prompt, the model's template included")
    recording_session_id: str | None = Field(None, description="where the recording will be; only if there is one")
    session_id: str = Field("", description="of this session")
    protocol_version: int = Field(PROTOCOL_VERSION, description="that the server speaks")
    spec: SpecField = Field(PLAIN_SPEC, description="options in force")
    notes: list[str] = Field([], description="a sentence for each setting that was ignored")


class Result(FromServer):
    """What became of one `audio_chunk`."""

    sound_field = "audio_data"

    type: Literal["result"] = "result"
    is_listen: bool = Field(description="the unit listened; otherwise it spoke")
    text: str = Field("", description="words of this unit; those of a turn are joined until `end_of_turn`")
    audio_data: SoundField | None = Field(None, description="float32 at 24 kHz; null when listening, or sent in parts")
    end_of_turn: bool = Field(False, description="last unit of a turn")
    current_time: int = Field(description="units heard so far, this one included")
    cost_llm_ms: Ms | None = Field(None, description="choosing the text, ms")
    cost_tts_prep_ms: Ms | None = Field(None, description="turning text into a condition for speech, ms")
    cost_tts_ms: Ms | None = Field(None, description="choosing speech codes, ms")
    cost_token2wav_ms: Ms | None = Field(None, description="turning codes into sound, ms")
    cost_all_ms: Ms = Field(description="all after the unit was fed, ms; stages that overlap count in full")
    n_tokens: int = Field(0, description="text tokens of this unit")
    n_tts_tokens: int = Field(0, description="speech codes of this unit")
    server_send_ts: float = Field(description="when it was sent, Unix seconds")
    wall_clock_ms: Annotated[float, AfterValidator(_rounded)] = Field(
        description="from the chunk's turn to its result, ms, one decimal"
    )
    kv_cache_length: int = Field(description="context rows before the unit is closed")
    vision_slices: int = Field(0, description="images fed, slices of large pictures included")
    lag_ms: Ms = Field(0.0, description="how long this unit waited before it was begun, ms")
    backlog_units: int = Field(0, description="chunks that were received and not begun")
    n_caught_up: int = Field(0, description="seconds heard before this one without a decision")
    n_parts: int = Field(0, description="`partial` messages of this unit")
    stages: dict[str, Ms | None] = Field({}, description="ms by stage; `first_sound`: from arrival to the first sound")
    headroom_ms: Ms | None = Field(None, description="what is left of the second a unit may take, ms; below 0: late")

    @computed_field(description="64 for each of `vision_slices`")
    @property
    def vision_tokens(self) -> int:
        return TOKENS_PER_SLICE * self.vision_slices


class Partial(FromServer):
    """What a unit has so far; only with `partial_results`. Its parts in order make up the unit."""

    sound_field = "audio_data"

    type: Literal["partial"] = "partial"
    current_time: int = Field(description="the unit, as its result will say")
    part: int = Field(ge=1, description="counts the parts of a unit from 1")
    text: str = Field("", description="words of this part")
    audio_data: SoundField | None = Field(None, description="float32 at 24 kHz; null: no sound in this part")


class Paused(FromServer):
    """No units are taken until `resume`."""

    type: Literal["paused"] = "paused"
    timeout: float = Field(description="seconds after which the session ends")


class Resumed(FromServer):
    """Units are taken again."""

    type: Literal["resumed"] = "resumed"


class Interrupted(FromServer):
    """Speech stops at the next token."""

    type: Literal["interrupted"] = "interrupted"


class Stopped(FromServer):
    """The session is over; the connection is closed next."""

    type: Literal["stopped"] = "stopped"
    session_id: str = Field("", description="of this session")


class Timeout(FromServer):
    """The session was paused, or said nothing, for too long; the connection is closed next."""

    type: Literal["timeout"] = "timeout"
    reason: str = Field(description="such as `Pause timeout (60.0s)`")


class Error(FromServer):
    """Something was refused or went wrong."""

    type: Literal["error"] = "error"
    error: Annotated[str, AfterValidator(clean)] = Field(description="for people")
    code: ErrorCode | str = Field(ErrorCode.INTERNAL, description="for programs, one of the codes below")

    @computed_field(description="the same as `error`")
    @property
    def message(self) -> str:
        return self.error

    @classmethod
    def of(cls, error: Exception, code: ErrorCode = ErrorCode.INTERNAL) -> "Error":
        """An exception's text, cut to a sane length; a WireError brings its own code."""
        text = str(error) or type(error).__name__
        return cls(error=text[:MAX_ERROR_CHARS], code=error.code if isinstance(error, WireError) else code)


class _Waiting(FromServer):
    estimated_wait_s: Annotated[float, AfterValidator(_rounded)] = Field(description="seconds, one decimal")
    position: int = Field(ge=1, description="place in the queue, 1 is next")
    queue_length: int = Field(description="tickets that wait")

    @computed_field(description="the same as `estimated_wait_s`")
    @property
    def eta_seconds(self) -> float:
        return self.estimated_wait_s


class Queued(_Waiting):
    """All places are taken; the connection waits. From the gateway only."""

    type: Literal["queued"] = "queued"
    ticket_id: str = Field(description="`q_` and 12 hexadecimal digits")


class QueueUpdate(_Waiting):
    """Where the connection stands in the queue. From the gateway only."""

    type: Literal["queue_update"] = "queue_update"


class QueueDone(FromServer):
    """A worker has been found; sent also where nothing had to wait. From the gateway only."""

    type: Literal["queue_done"] = "queue_done"


# --- reading and writing --------------------------------------------------------------------------

ClientMessage = Annotated[
    Prepare | AudioChunk | VideoFrame | Pause | Resume | Stop | Interrupt | ClientDiagnostic,
    Field(discriminator="type"),
]
ServerMessage = Annotated[
    Prepared
    | Result
    | Partial
    | Paused
    | Resumed
    | Interrupted
    | Stopped
    | Timeout
    | Error
    | Queued
    | QueueUpdate
    | QueueDone,
    Field(discriminator="type"),
]
CLIENT = Reader(ClientMessage)
SERVER = Reader(ServerMessage)


def read_text(text: str) -> ClientMessage:
    """Raises: WireError, and nothing else whatever the text."""
    return CLIENT.read_text(text)


def read_binary(data: bytes, spec: Spec) -> ClientMessage:
    """A binary frame in the form agreed in `sound_in`. Raises: WireError, and nothing else whatever the bytes."""
    return CLIENT.read_frame(data, spec.sound_in)


def read_server(data: str | bytes, spec: Spec = PLAIN_SPEC) -> ServerMessage:
    """A server's text or binary frame, as clients and the gateway read it. Raises: WireError."""
    if isinstance(data, str):
        return SERVER.read_text(data)
    return SERVER.read_frame(data, spec.sound_out)


def write(message: Message, spec: Spec = PLAIN_SPEC) -> str | bytes:
    """Strict JSON, or a binary frame if the message carries sound and `spec` agrees on a form for its direction.

    Raises: WireError for sound that is held as text or bytes and broken; ValueError for NaN or infinity in the free
    fields of a client's message, which a server's cannot hold.
    """
    return write_message(message, spec.sound_in if isinstance(message, FromClient) else spec.sound_out)
