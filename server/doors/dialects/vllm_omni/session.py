"""One vLLM-Omni session: the reaction to each event, and the events that follow. Contains no socket."""

import asyncio
import secrets
from collections.abc import Callable
from typing import Any

import numpy as np

from server.doors.core.request_fields import RequestFields, item_fields
from server.doors.core.turn_voice import voice_fields
from server.doors.dialects.ends import CONTEXT_FULL
from server.doors.dialects.vllm_omni.lane import OmniLane
from server.doors.dialects.vllm_omni.responses import OmniEvents, OmniResponse, Playback
from server.doors.dialects.vllm_omni.settings import (
    OUTPUTS,
    RATES,
    OmniInput,
    OmniOutput,
    OmniSettings,
    checked_rate,
    unsupported,
)
from server.doors.errors import ApiError, invalid
from server.doors.live.door_context import LARGE_EVENT
from server.doors.live.ends import SessionOverError
from server.doors.live.sound.resample import pcm16_of
from server.doors.live.sound.unit_buffer import MAX_PICTURES
from server.doors.live.unit_lane import MAX_TEXTS
from server.doors.voices import VoiceNames
from worker.protocol.codes import ErrorCode
from worker.protocol.messages import Error, Prepare, Result
from worker.protocol.text_messages import InsertText
from worker.protocol.wire import WireError, picture_bytes

MAX_TEXT = 65_536  # characters
CAPABILITIES: dict[str, object] = {
    "implementation_level": "model_native_duplex",
    "chunk_period_ms": 1000,
    "input_modes": ["audio", "text", "video"],
    "supports_input_append": True,
    "supports_barge_in": True,
    "supports_playback_ack": True,
    "supports_multi_session": True,
    "supports_session_resume": False,
    "supports_audio_truncate": False,
}


class OmniCloseError(Exception):
    """The client has asked for the end."""


class OmniSession:
    """A session before and after its creation.

    Args:
        send: sends events.
        settings: before the client's.
        voices: registered voices.
        session_id: shown to the client.
        clock: monotonic s.
    """

    def __init__(
        self,
        send: OmniEvents,
        settings: OmniSettings,
        voices: VoiceNames,
        session_id: str,
        clock: Callable[[], float],
    ):
        self._send, self._settings, self._voices, self._id = send, settings, voices, session_id
        self.lane = OmniLane(self, clock)
        self.configured = asyncio.Event()  # the context may begin
        self._voice: dict[str, object] = {}
        self._input, self._output = OmniInput(), OmniOutput(settings.output_format)
        self._playback = Playback()
        self._response: OmniResponse | None = None
        self._is_created = self._drops_unit = False
        self._epoch = self._turn_id = 0
        self._last_item_id: str | None = None
        self.waiting_ms = 0  # these clients keep the sound that waits for its time

    def prepare(self) -> Prepare:
        """The message that begins the context."""
        return self._settings.prepare(self._voice)

    def resource(self) -> dict[str, Any]:
        """The session with its effective settings."""
        settings = self._settings
        return {
            "id": self._id,
            "session_id": self._id,
            "object": "realtime.session",
            "type": "realtime",
            "model": settings.model,
            "modalities": ["audio", "text"],
            "output_modalities": ["audio"],
            "instructions": settings.instructions,
            "voice": settings.voice,
            "input_audio_format": settings.input_format,
            "output_audio_format": settings.output_format,
            "turn_detection": None,
            "state": "open",
            "epoch": self._epoch,
            "turn_id": self._turn_id,
            "active_response_id": None if self._response is None else self._response.id,
            "overlap_policy": settings.overlap_policy,
            "playback_commit_policy": settings.playback_commit_policy,
            "playback": self._playback.shown(),
            "capabilities": CAPABILITIES,
        }

    # --- the client's events -------------------------------------------------------------------

    async def handle(self, given: RequestFields) -> None:
        """React to an event. Raises: ApiError; OmniCloseError."""
        kind = given.text("type")
        if kind in ("session.close", "close_session"):
            raise OmniCloseError
        if kind == "session.update":
            await self._update(given)
        elif kind == "session.heartbeat":
            self._send("session.heartbeat_ack")
        elif kind == "session.resume":
            text = "session.resume: expected a new session, got one to resume"
            raise ApiError(400, text, code="unsupported_session_resume")
        elif kind == "session.event_ack":
            given.whole("server_event_seq", 0)
        elif not self._is_created:
            text = f"{kind[:60]}: expected session.created before it, got none"
            raise ApiError(400, text, code="session_not_created")
        else:
            await self._use(kind, given)

    async def _use(self, kind: str, given: RequestFields) -> None:
        match kind:
            case "input_audio_buffer.append":
                await self._append(given)
            case "input_audio_buffer.commit" | "input.commit":
                self._commit(given)
            case "input_audio_buffer.clear" | "input.cancel":
                self.lane.clear_input()
                self._send("input_audio_buffer.cleared")
            case "conversation.item.create":
                self._insert(given)
            case "response.create":
                self.lane.end_input(is_speech_due=True)
            case "response.cancel":
                self._interrupt("client_cancelled")
            case "barge_in":
                self._interrupt("barge_in")
            case "output_audio_buffer.clear":
                self._interrupt("client_cancelled")
                self._send("output_audio_buffer.cleared")
            case "turn.signal":
                given.choice("event", ("barge_in",))
                self._interrupt("barge_in")
            case "playback.ack":
                played = given.number("played_ms", 0, 1e9) or 0.0
                self._playback.acknowledge(played, given.number("committed_ms", 0, 1e9))
                self._send("playback.acknowledged", playback=self._playback.shown())
            case _:
                raise unsupported(kind)

    async def _update(self, given: RequestFields) -> None:
        session = given.group("session") or given
        before = self._settings
        settings = before.merged(session)
        if settings.ref_audio != before.ref_audio or settings.voice != before.voice:
            if self.configured.is_set():
                raise invalid("voice", expected="the voice that the session began with", got="another one")
            self._voice = await asyncio.to_thread(voice_fields, self._voices, settings.voice, settings.ref_audio)
        is_changed = settings.instructions and settings.instructions != before.instructions
        if self.configured.is_set() and is_changed:
            self._insert_text(InsertText(text=settings.instructions, role="system"), self._report)
        self._settings = settings
        if settings.output_format != self._output.form:
            self._output = OmniOutput(settings.output_format)
        if not self.configured.is_set():
            self.configured.set()
            return
        if self._is_created:
            self._send("session.updated", session=self.resource())

    def _insert_text(self, message: InsertText, on_done: Callable[[Error | None], None]) -> None:
        """Insert a text before the next unit. Raises: ApiError when too many wait."""
        if (n := self.lane.n_texts) >= MAX_TEXTS:
            raise invalid("item", expected=f"at most {MAX_TEXTS} texts that wait", got=n, code="too_many_texts")
        self.lane.insert(message, is_said=False, on_done=on_done)

    async def _append(self, given: RequestFields) -> None:
        settings = self._settings
        form = given.choice("format", OUTPUTS, settings.input_format)
        default = (
            settings.input_rate if form == settings.input_format else (8000 if form.startswith("g711") else 16_000)
        )
        rate = checked_rate(given.whole("sample_rate_hz", min(RATES), max(RATES)) or default)
        frames = given.items("video_frames")
        if len(frames) > MAX_PICTURES:
            raise invalid("video_frames", expected=f"at most {MAX_PICTURES}", got=len(frames))
        slices = given.whole("max_slice_nums", 1, 16) or 1
        audio, decode = given.text("audio"), self._input.decode
        samples = (
            await asyncio.to_thread(decode, audio, form, rate)
            if len(audio) > LARGE_EVENT
            else decode(audio, form, rate)
        )
        for data in [await asyncio.to_thread(_picture, frame) for frame in frames]:
            self.lane.add_picture(data, slices)
        self.lane.append(samples)
        if given.flag("final"):
            self.lane.end_input(is_speech_due=False)

    def _commit(self, given: RequestFields) -> None:
        is_final = given.flag("final", default=True)
        is_speech_due = given.flag("response_create")
        self._turn_id += 1
        item_id = f"item_{secrets.token_hex(10)}"
        self._send("input_audio_buffer.committed", item_id=item_id, previous_item_id=self._last_item_id)
        self._last_item_id = item_id
        if is_final:
            self.lane.end_input(is_speech_due=is_speech_due)

    def _insert(self, given: RequestFields) -> None:
        group = given.group("item")
        if group is None:
            raise invalid("item", expected="an object", got="none")
        group.choice("type", ("message",))
        role = group.choice("role", ("user", "system"), "user")
        content = group.items("content")
        texts = [_text_of(part, index) for index, part in enumerate(content)]
        text = "\n".join(texts)
        if not 0 < len(text) <= MAX_TEXT:
            raise invalid("item.content", expected=f"1 to {MAX_TEXT} characters", got=len(text))
        item: dict[str, object] = {
            "id": group.text("id", f"item_{secrets.token_hex(10)}"),
            "object": "realtime.item",
            "type": "message",
        }
        item |= {"status": "completed", "role": role, "content": content}

        def done(error: Error | None) -> None:
            if error is not None:
                self._report(error)
                return
            for kind in ("conversation.item.added", "conversation.item.done"):
                self._send(kind, previous_item_id=self._last_item_id, item=item)
            self._last_item_id = str(item["id"])

        message = InsertText(text=text, role="system" if role == "system" else "user")
        self._insert_text(message, done)

    def _interrupt(self, reason: str) -> None:
        """End the open response; what of its unit is still to come is dropped."""
        self.lane.interrupt()
        if self._response is not None:
            self._drops_unit = self.lane.is_busy
            self._epoch += 1
            self._response.end("cancelled", reason)
            self._response = None

    # --- what the lane reports -----------------------------------------------------------------

    def on_ready(self, error: Error | None) -> None:
        """Tell the client that the session exists."""
        if error is not None:
            self._report(error)
        elif not self._is_created:
            self._is_created = True
            attached = {"incarnation": 1, "attachment_generation": 1, "resume_token": None}
            for kind in ("session.created", "session.updated"):
                self._send(kind, **attached, session=self.resource())

    def on_history_refused(self, error: Error) -> None:
        """Report a text of the context before that is not in the new one."""
        self._report(error)

    def on_speech(self, text: str, sound: np.ndarray) -> None:
        """Send a part of a unit. sound: [n] float32 at 24 kHz."""
        if not self._drops_unit:
            self._opened().add(text, pcm16_of(sound))

    def on_decision(self, result: Result, text: str, pcm16: bytes) -> None:
        """Send the rest of a unit, and its decision."""
        if self._drops_unit:
            return
        if result.is_listen:
            self._end()
            self._send("response.listen", metadata={"epoch": self._epoch})
            return
        self._opened().add(text, pcm16, is_last=result.end_of_turn)
        if result.end_of_turn:
            self._end()

    def on_failure(self, error: Error) -> None:
        """Report a unit without a result. Raises: SessionOverError when the context is full."""
        if error.code == ErrorCode.CONTEXT_FULL:
            raise SessionOverError(CONTEXT_FULL)
        self._report(error)

    def on_unit(self) -> None:
        """A unit is over."""
        self._drops_unit = False

    def _opened(self) -> OmniResponse:
        if self._response is None:
            self._playback = Playback()
            self._response = OmniResponse(self._send, self._output, self._playback, self._epoch)
            self._response.begin()
        return self._response

    def _end(self) -> None:
        if self._response is not None:
            self._response.end("completed")
            self._response = None

    def _report(self, error: Error | None) -> None:
        if error is not None:
            self._send.error(ApiError(400, error.error, code=str(error.code)), None)


def _picture(frame: object) -> bytes:
    """The encoded picture of base64 or a data URL. Raises: ApiError."""
    try:
        if not isinstance(frame, str):
            raise invalid("video_frames", expected="base64 text", got=type(frame).__name__)
        return picture_bytes(frame, "video_frames")
    except WireError as error:
        raise ApiError(400, str(error), param="video_frames", code="invalid_video_frames") from None


def _text_of(part: object, index: int) -> str:
    fields = item_fields(part, f"item.content[{index}]")
    fields.choice("type", ("input_text", "text"))
    return fields.text("text")
