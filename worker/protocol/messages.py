"""Every message between client, gateway and worker, and the functions that read and write them. Torch-free.

All three processes use these definitions. Sound and pictures are decoded on access, on the calling thread.
"""

from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import AfterValidator, ConfigDict, Field, computed_field

from worker.protocol.adjust_messages import Adjust, Adjusted
from worker.protocol.codec import (
    FieldGroup,
    FromClient,
    FromServer,
    Message,
    Ms,
    OneDecimal,
    PictureField,
    Reader,
    SoundField,
    known_fields,
    write_message,
)
from worker.protocol.codes import ErrorCode
from worker.protocol.gateway_messages import Decided, GatewayMessage
from worker.protocol.system_content import texts_and_sound
from worker.protocol.text_messages import InsertText, TextInserted
from worker.protocol.unit_counters import MarkField, UsageField
from worker.protocol.wire import Form, WireError, clean, picture_bytes

PROTOCOL_VERSION: Literal[1] = 1
SYSTEM_PROMPT = "You are a helpful assistant."
TOKENS_PER_SLICE = 64
MAX_PAUSE_S = 86_400
MAX_UNIT_PICTURES = 32
MAX_UNIT_PIXELS = 8192 * 8192  # of all pictures of a unit, as many as one picture may have
MAX_ERROR_CHARS = 2000


# mypy supports no decorator on a property, hence the ignores at `computed_field` (python/mypy issue 14461).
class Spec(FieldGroup):
    """Options beyond the plain protocol, which a client gets by default."""

    version: Literal[1] = Field(PROTOCOL_VERSION, description="version of this protocol")
    partial_results: bool = Field(False, description="send `partial` messages while a unit runs")
    sound_in: Form = Field("base64", description="encoding of the sound in `audio_chunk`; base64 is always accepted")
    sound_out: Form = Field("base64", description="encoding of the sound in `result` and `partial`")
    backlog: Literal["keep", "catch_up"] = Field(
        "keep",
        description="waiting chunks: `keep` gives each one a decision; `catch_up` only listens until none waits",
    )
    counters: bool = Field(False, description="add `usage` and `marks` to each result")
    resume: bool = Field(
        False, description="a gateway keeps the session after a lost connection: [Resumption](#resumption)"
    )
    trace: bool = Field(False, description="the server keeps a [trace](traces.md) of the session; needs a setting")


PLAIN_SPEC = Spec()
SpecField = Annotated[Spec, known_fields(Spec)]


# --- from the client ------------------------------------------------------------------------------


class Prepare(FromClient):
    """Start or restart the conversation with a new context; units count from 1. Answered with `prepared`."""

    aliases: ClassVar = {"system_prompt": ("prefix_system_prompt",)}

    type: Literal["prepare"] = "prepare"
    system_prompt: str = Field(
        SYSTEM_PROMPT, description="plain text, inserted into the model's template together with the voice"
    )
    ref_audio_base64: SoundField | None = Field(None, description="float32 at 16 kHz: the voice named in the prompt")
    tts_ref_audio_base64: SoundField | None = Field(
        None, description="float32 at 16 kHz: the voice of the speech; null: that of `ref_audio_base64`"
    )
    ref_audio_path: str | None = Field(None, description="name of a voice on the server; overrides `ref_audio_base64`")
    config: dict[str, Any] = Field({}, description="settings of the session; the others keep their defaults")
    max_slice_nums: int | None = Field(
        None, ge=1, description="slices of a large picture, for chunks without their own; null: that of `config`"
    )
    deferred_finalize: bool = Field(True, description="`false` has no effect and adds a note to `prepared`")
    spec: SpecField = Field(PLAIN_SPEC, description="options beyond the plain protocol")

    @classmethod
    def adapted(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Drop empty voices, and take the prompt and the voice from `system_content` where they are not given."""
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
        """[n] float32 at 16 kHz; None without a voice. Raises: WireError bad_base64, bad_audio."""
        sound = self.ref_audio_base64
        return sound.samples("prepare.ref_audio_base64") if sound else None

    def tts_ref_audio(self) -> np.ndarray | None:
        """[n] float32 at 16 kHz; `ref_audio` by default. Raises: WireError bad_base64, bad_audio."""
        sound = self.tts_ref_audio_base64
        return sound.samples("prepare.tts_ref_audio_base64") if sound else self.ref_audio()


class AudioChunk(FromClient):
    """One unit: one second of sound and its pictures, or a piece of it. Answered with one `result` or one `error`."""

    aliases: ClassVar = {"audio_base64": ("audio",), "frame_base64_list": ("video_frames",)}
    sound_field = "audio_base64"
    pictures_field = "frame_base64_list"

    type: Literal["audio_chunk"] = "audio_chunk"
    audio_base64: SoundField = Field(description="float32 at 16 kHz, nominally 16000 samples")
    frame_base64_list: list[PictureField] = Field(
        [],
        description=f"JPEG or another common format; a unit has at most {MAX_UNIT_PICTURES} pictures of "
        f"{MAX_UNIT_PIXELS} pixels in total",
    )
    force_listen: bool = Field(False, description="listen in this unit; an open turn ends")
    force_speak: bool = Field(False, description="speak in this unit, also in the first ones; not with `force_listen`")
    close_early: bool = Field(False, description="run the unit now: silence replaces the samples that it lacks")
    max_slice_nums: int | list[int] | None = Field(
        None, description="slices of a large picture, one number or one per picture; null: that of the session"
    )

    @classmethod
    def adapted(cls, given: dict[str, Any]) -> dict[str, Any]:
        """The object without empty sound fields.

        Raises: WireError missing_audio; bad_message for a unit that must both listen and speak.
        """
        if given.get("force_listen") is True and given.get("force_speak") is True:
            expected = "false with force_listen"
            raise WireError(ErrorCode.BAD_MESSAGE, "audio_chunk.force_speak", expected=expected, got="true")
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
        """[n] float32 at 16 kHz, unchecked: may contain NaN. Raises: WireError bad_base64, bad_audio."""
        return self.audio_base64.samples("audio_chunk.audio_base64")

    def pictures(self) -> list[bytes]:
        """Encoded pictures. Raises: WireError bad_base64, bad_image."""
        frames = self.frame_base64_list
        return [picture_bytes(frames[i], f"audio_chunk.frame_base64_list[{i}]") for i in range(len(frames))]


class VideoFrame(FromClient):
    """One picture for the next `audio_chunk`. Not answered."""

    type: Literal["video_frame"] = "video_frame"
    frame: PictureField = Field(description="JPEG or another common format")
    max_slice_nums: int | None = Field(None, description="slices of it; null: as the chunk says")

    def picture(self) -> bytes:
        """The encoded picture. Raises: WireError bad_base64, bad_image."""
        return picture_bytes(self.frame, "video_frame.frame")


class Pause(FromClient):
    """Refuse units until `resume`. Answered with `paused` after all earlier chunks are answered."""

    type: Literal["pause"] = "pause"
    timeout: float | None = Field(
        None, ge=0, le=MAX_PAUSE_S, description="seconds after which the session ends; null: the server's setting"
    )


class Resume(FromClient):
    """Accept units again. Answered with `resumed`."""

    type: Literal["resume"] = "resume"


class Stop(FromClient):
    """End the session. Answered with `stopped`."""

    type: Literal["stop"] = "stop"


class Interrupt(FromClient):
    """Stop speaking, effective when the message is read. Answered with `interrupted` after all earlier messages."""

    type: Literal["interrupt"] = "interrupt"


class ClientDiagnostic(FromClient):
    """A client's report with arbitrary fields (`model_extra`). Stored by the gateway, not answered."""

    model_config = ConfigDict(extra="allow")

    type: Literal["client_diagnostic"] = "client_diagnostic"


# --- to the client --------------------------------------------------------------------------------


class Prepared(FromServer):
    """The session is ready for units."""

    left_out = frozenset({"recording_session_id", "start_after_ms", "resume_token", "resume_grace_s"})

    type: Literal["prepared"] = "prepared"
    prompt_length: int = Field(description="characters of the prompt, the model's template included")
    recording_session_id: str | None = Field(None, description="id of the recording, if the session is recorded")
    session_id: str = Field("", description="the session's id")
    protocol_version: int = Field(PROTOCOL_VERSION, description="protocol version of the server")
    spec: SpecField = Field(PLAIN_SPEC, description="options in force")
    notes: list[str] = Field([], description="one sentence for each ignored setting")
    start_after_ms: Ms | None = Field(None, description="best time to begin the first unit's second, in ms from now")
    resume_token: str | None = Field(None, description="secret that continues the session over another connection")
    resume_grace_s: float | None = Field(None, description="seconds that a session without a connection is kept")


class Result(FromServer):
    """The outcome of one `audio_chunk`."""

    sound_field = "audio_data"
    left_out = frozenset({"turn_limit", "usage", "marks", "side_texts", "early", "shift_ms", "incomplete"})

    type: Literal["result"] = "result"
    is_listen: bool = Field(description="the unit listened; otherwise it spoke")
    text: str = Field("", description="text of this unit; the texts up to `end_of_turn` concatenate to the turn's")
    audio_data: SoundField | None = Field(
        None, description="float32 at 24 kHz; null when listening, or if sent in parts"
    )
    end_of_turn: bool = Field(False, description="last unit of a turn")
    current_time: int = Field(description="units since `prepare`, including this one if it is complete")
    cost_llm_ms: Ms | None = Field(None, description="decoding the text tokens, ms")
    cost_tts_prep_ms: Ms | None = Field(None, description="computing the speech condition from the text, ms")
    cost_tts_ms: Ms | None = Field(None, description="decoding the speech tokens, ms")
    cost_token2wav_ms: Ms | None = Field(None, description="synthesizing sound from the speech tokens, ms")
    cost_all_ms: Ms = Field(description="sum of all stages after prefill, ms; overlapping stages count in full")
    n_tokens: int = Field(0, description="text tokens of this unit")
    n_tts_tokens: int = Field(0, description="speech tokens of this unit")
    server_send_ts: float = Field(description="time of sending, Unix seconds")
    wall_clock_ms: OneDecimal = Field(description="from the start of the unit to its result, ms, one decimal")
    kv_cache_length: int = Field(description="KV cache length in tokens, before the unit is finalized")
    vision_slices: int = Field(0, description="encoded images, slices of large pictures included")
    lag_ms: Ms = Field(0.0, description="time the chunk waited before its unit started, ms")
    backlog_units: int = Field(0, description="chunks received but not started")
    n_caught_up: int = Field(0, description="seconds of sound before this unit that got no decision of their own")
    n_parts: int = Field(0, description="number of `partial` messages of this unit")
    stages: dict[str, Ms | None] = Field(
        {}, description="ms by stage; `first_sound`: from arrival to the first sound; `first_vocoder`: its vocoder"
    )
    headroom_ms: Ms | None = Field(None, description="time left of the unit's second, ms; negative: late")
    turn_limit: bool | None = Field(None, description="true: `max_turn_tokens` has ended the turn's text")
    side_texts: list[str] | None = Field(
        None, description="complete texts of the side lane, which are not spoken: calls of functions"
    )
    early: bool | None = Field(None, description="true: the unit ran at a pause, before its second was full")
    shift_ms: Ms | None = Field(
        None,
        description="silence in an early unit for the rest of its second, ms: later units end so much sooner",
    )
    incomplete: bool | None = Field(
        None, description="true: the sound waits for the rest of its second; nothing is decided, and a turn goes on"
    )
    usage: UsageField | None = Field(None, description="what the unit has cost; only with `counters`")
    marks: list[MarkField] | None = Field(None, description="the turn's text and sound so far; only with `counters`")

    @computed_field(description="64 per slice in `vision_slices`")  # type: ignore[prop-decorator]
    @property
    def vision_tokens(self) -> int:
        return TOKENS_PER_SLICE * self.vision_slices


class Partial(FromServer):
    """A part of a unit's text and sound, sent before its result; only with `partial_results`."""

    sound_field = "audio_data"

    type: Literal["partial"] = "partial"
    current_time: int = Field(description="number of the unit, as in its result")
    part: int = Field(ge=1, description="number of the part within its unit, counted from 1")
    text: str = Field("", description="text of this part")
    audio_data: SoundField | None = Field(None, description="float32 at 24 kHz; null: no sound in this part")


class Paused(FromServer):
    """Units are refused until `resume`."""

    type: Literal["paused"] = "paused"
    timeout: float = Field(description="seconds after which the session ends")


class Resumed(FromServer):
    """Units are accepted again."""

    type: Literal["resumed"] = "resumed"


class Interrupted(FromServer):
    """Speech stops at the next token."""

    type: Literal["interrupted"] = "interrupted"


class Stopped(FromServer):
    """The session has ended; the connection closes next."""

    type: Literal["stopped"] = "stopped"
    session_id: str = Field("", description="the session's id")


class Timeout(FromServer):
    """The session was paused or idle for too long; the connection closes next."""

    type: Literal["timeout"] = "timeout"
    reason: str = Field(description="for example `Pause timeout (60.0s)`")


class Error(FromServer):
    """A request was refused, or failed."""

    type: Literal["error"] = "error"
    error: Annotated[str, AfterValidator(clean)] = Field(description="text for people")
    code: ErrorCode | str = Field(ErrorCode.INTERNAL, description="code for programs; see [Errors](#errors)")

    @computed_field(description="the same as `error`")  # type: ignore[prop-decorator]
    @property
    def message(self) -> str:
        return self.error

    @classmethod
    def of(cls, error: Exception, code: ErrorCode = ErrorCode.INTERNAL) -> "Error":
        """The message for an exception: its text, truncated, and a WireError's own code."""
        text = str(error) or type(error).__name__
        return cls(error=text[:MAX_ERROR_CHARS], code=error.code if isinstance(error, WireError) else code)


# --- reading and writing --------------------------------------------------------------------------

FlowMessage = Pause | Resume | Stop | Interrupt
ClientMessage = Annotated[
    Prepare | AudioChunk | VideoFrame | InsertText | Adjust | FlowMessage | ClientDiagnostic | Decided,
    Field(discriminator="type"),
]
ServerMessage = Annotated[
    Prepared
    | Result
    | Partial
    | TextInserted
    | Adjusted
    | Paused
    | Resumed
    | Interrupted
    | Stopped
    | Timeout
    | Error
    | GatewayMessage,
    Field(discriminator="type"),
]
CLIENT: Reader[ClientMessage] = Reader(ClientMessage)
SERVER: Reader[ServerMessage] = Reader(ServerMessage)


def read_text(text: str) -> ClientMessage:
    """A client's text frame. Raises: WireError, and no other exception for any text."""
    return CLIENT.read_text(text)


def read_binary(data: bytes, spec: Spec) -> ClientMessage:
    """A client's binary frame with sound encoded as `spec.sound_in`. Raises: WireError, and no other exception."""
    return CLIENT.read_frame(data, spec.sound_in)


def read_server(data: str | bytes, spec: Spec = PLAIN_SPEC) -> ServerMessage:
    """A server's text or binary frame, for clients and the gateway. Raises: WireError."""
    if isinstance(data, str):
        return SERVER.read_text(data)
    return SERVER.read_frame(data, spec.sound_out)


def write(message: Message, spec: Spec = PLAIN_SPEC) -> str | bytes:
    """A message as strict JSON, or as a binary frame if it carries sound and `spec` has a binary encoding for it.

    Raises:
        WireError: for invalid sound that is held as text or bytes.
        ValueError: for NaN or infinity in the free fields of a client's message.
    """
    return write_message(message, spec.sound_in if isinstance(message, FromClient) else spec.sound_out)
