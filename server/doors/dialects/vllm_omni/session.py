"""One vLLM-Omni session: the reaction to each event, and the events that follow. Contains no socket."""

import asyncio
import hashlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from server.access.connection_pace import pace_pixels
from server.access.shares import run_shared
from server.doors.core.request_fields import RequestFields
from server.doors.core.turn_voice import voice_fields
from server.doors.dialects.ends import CONTEXT_FULL, refused_context
from server.doors.dialects.vllm_omni.conversation import OmniConversation
from server.doors.dialects.vllm_omni.events import OmniEvents
from server.doors.dialects.vllm_omni.items import OmniItem, new_item_id
from server.doors.dialects.vllm_omni.lane import OmniLane
from server.doors.dialects.vllm_omni.responses import OmniResponse
from server.doors.dialects.vllm_omni.settings import (
    RATES,
    OmniInput,
    OmniOutput,
    OmniSettings,
    checked_rate,
    form_of,
    unsupported,
)
from server.doors.dialects.vllm_omni.transcripts import OmniTranscripts
from server.doors.dialects.vllm_omni.turns import OmniTurns
from server.doors.dialects.vllm_omni.vocabulary import ALIASES, CAPABILITIES, SIGNALS, TURN_STATES
from server.doors.errors import ApiError, invalid
from server.doors.live.door_context import LARGE_EVENT
from server.doors.live.ends import SessionOverError
from server.doors.live.sound.resample import pcm16_of
from server.doors.live.sound.unit_buffer import MAX_PICTURES
from server.doors.voices import VoiceNames
from server.live.picture_pace import picture_pixels
from worker.protocol.codes import ErrorCode
from worker.protocol.messages import Error, Prepare, Result
from worker.protocol.text_messages import InsertText
from worker.protocol.wire import WireError, picture_bytes


class OmniCloseError(Exception):
    """The client has asked for the end."""


class OmniSession:
    """A session before and after its creation.

    Args:
        send: sends events.
        settings: before the client's.
        voices: registered voices.
        check_model: the served model of a name. Raises: ApiError.
        session_id: shown to the client.
        clock: monotonic s.
        transcripts: of what the user says.
    """

    def __init__(
        self,
        send: OmniEvents,
        settings: OmniSettings,
        voices: VoiceNames,
        check_model: Callable[[str], str],
        session_id: str,
        clock: Callable[[], float],
        transcripts: OmniTranscripts,
    ):
        self._send, self._settings, self._voices, self._id = send, settings, voices, session_id
        self._check_model = check_model
        self.lane = OmniLane(self, clock)
        self._transcripts = transcripts
        self.turns = OmniTurns(send, self, settings, transcripts)
        self._conversation = OmniConversation(send, self.lane, transcripts.cancel)
        self.configured = asyncio.Event()  # the context may begin
        self._voice: dict[str, object] = {}
        self._input, self._output = OmniInput(), OmniOutput(settings.output_format, settings.output_rate)
        self._response: OmniResponse | None = None
        self._credentials: dict[str, object] = {}
        self._is_created = self._has_input = False
        self.epoch = self._turn_id = 0
        self.waiting_ms = 0  # these clients keep the sound that waits for its time
        self._handlers: dict[str, Callable[[RequestFields], None]] = {
            "input_audio_buffer.commit": self._commit_input,
            "input_audio_buffer.clear": lambda _: self._clear_input(),
            "input.cancel": lambda _: self._cancel_input(),
            "input.text.append": self._conversation.append_text,
            "conversation.item.create": self._conversation.create,
            "conversation.item.retrieve": self._conversation.retrieve,
            "conversation.item.delete": self._conversation.delete,
            "conversation.item.truncate": self._conversation.truncate,
            "response.create": lambda _: self._ask(),
            "response.cancel": self._cancel,
            "barge_in": lambda _: self.interrupt("barge_in"),
            "output_audio_buffer.clear": lambda _: self._clear_output(),
            "playback.ack": lambda given: self._conversation.acknowledge(given, self.epoch),
        }

    # --- state ---------------------------------------------------------------------------------

    @property
    def has_response(self) -> bool:
        return self._response is not None

    @property
    def idle_s(self) -> float | None:
        """Limit of the time without an event; None: the server's."""
        return self._settings.idle_s

    def grant(self, **credentials: object) -> None:
        """Set the fields of `session.created` that resumption needs."""
        self._credentials = credentials

    def prepare(self) -> Prepare:
        """The message that begins the context."""
        return self._settings.prepare(self._voice)

    def history(self) -> list[InsertText]:
        """The texts that a context begins with, on the first worker or on another one."""
        first = self._settings.initial_text
        is_heard_only = self._settings.playback_commit_policy == "ack_only"
        texts = self._conversation.items.history(is_heard_only=is_heard_only)
        return [InsertText(text=first, role="user"), *texts] if first else texts

    def resource(self) -> dict[str, Any]:
        """The session with its effective settings."""
        response_id = None if self._response is None else self._response.id
        spoken = self._conversation.items.find_spoken(None, None)
        playback = {} if spoken is None else spoken.playback.shown()
        return {
            "id": self._id,
            "session_id": self._id,
            "object": "realtime.session",
            "type": "realtime",
            **self._settings.shown(),
            "state": "open",
            "turn_state": "idle" if response_id is None else "assistant_generating",
            "epoch": self.epoch,
            "turn_id": self._turn_id,
            "active_response_id": response_id,
            "playback": {"generated_ms": 0, "sent_ms": 0, "played_ms": 0, "committed_ms": 0} | playback,
            "capabilities": CAPABILITIES,
        }

    # --- the client's events -------------------------------------------------------------------

    async def handle(self, given: RequestFields) -> None:
        """React to an event. Raises: ApiError; OmniCloseError."""
        kind = given.text("type")
        kind = ALIASES.get(kind, kind)
        if kind == "session.close":
            raise OmniCloseError
        if kind == "session.update":
            await self._update(given)
        elif kind == "session.heartbeat":
            self._send("session.heartbeat_ack")
        elif not self._is_created:
            text = f"{kind[:60]}: expected session.created before it, got none"
            raise ApiError(400, text, code="session_not_created")
        elif kind == "turn.signal":
            await self._signal(given)
        elif kind == "input_audio_buffer.append":
            await self._append(given)
        elif kind in self._handlers:
            self._handlers[kind](given)
        else:
            raise unsupported(kind)

    async def _signal(self, given: RequestFields) -> None:
        """React to an event in another one."""
        name = given.choice("event", (*SIGNALS, *TURN_STATES))
        if name in TURN_STATES:
            self._send("turn.event", event=name, turn_state=TURN_STATES[name], epoch=self.epoch)
            return
        payload = given.group("payload")
        fields = {**given.given, **(payload.given if payload is not None else {}), "type": name}
        await self.handle(RequestFields(fields))

    async def _update(self, given: RequestFields) -> None:
        session = given.group("session") or given
        before = self._settings
        settings = before.merged(session)
        self._check_model(session.text("model", before.model))
        sound, mark = settings.ref_audio, before.ref_audio
        if sound is not None and sound != before.ref_audio:
            mark = await run_shared(_fingerprint, sound)
        if mark != before.ref_audio or settings.voice != before.voice:
            if self.configured.is_set():
                raise invalid("voice", expected="the voice that the session began with", got="another one")
            self._voice = await run_shared(voice_fields, self._voices, settings.voice, sound)
        settings = replace(settings, ref_audio=mark)
        is_changed = settings.instructions and settings.instructions != before.instructions
        if self.configured.is_set() and is_changed:
            text = InsertText(text=settings.instructions, role="system")
            self._conversation.insert_text(text, self._conversation.report)
        settings = replace(settings, transcription=self._transcripts.configure(settings.transcription))
        self._settings = settings
        if (settings.output_format, settings.output_rate) != (self._output.form, self._output.rate):
            self._output = OmniOutput(settings.output_format, settings.output_rate)
        self.turns.configure(settings)
        self.lane.speaks_unasked = settings.auto_response
        self.configured.set()
        if self._is_created:
            self._send("session.updated", session=self.resource())

    async def _append(self, given: RequestFields) -> None:
        settings = self._settings
        form = form_of(given, "format", form_of(given, "input_audio_format", settings.input_format))
        default = (
            settings.input_rate if form == settings.input_format else (8000 if form.startswith("g711") else 16_000)
        )
        rate = checked_rate(given.whole("sample_rate_hz", min(RATES), max(RATES)) or default)
        frames = given.items("video_frames")
        if len(frames) > MAX_PICTURES:
            raise invalid("video_frames", expected=f"at most {MAX_PICTURES}", got=len(frames))
        slices = given.whole("max_slice_nums", 1, 16) or 1
        audio, decode = given.text("audio", "" if frames else None), self._input.decode
        is_large = len(audio) > LARGE_EVENT
        samples = await run_shared(decode, audio, form, rate) if is_large else decode(audio, form, rate)
        pictures = [await run_shared(_picture, frame) for frame in frames]
        for data in pictures:
            await pace_pixels(await run_shared(picture_pixels, data))
        if not self.turns.append(samples, given):
            return
        for data in pictures:
            self.lane.add_picture(data, slices)
        self._has_input = self._has_input or len(samples) > 0
        if given.flag("force_listen"):
            self.lane.listen_next()
        self.lane.append(samples)
        if given.flag("final"):
            self.lane.end_input(is_speech_due=False)

    def _commit_input(self, given: RequestFields) -> None:
        if not self._has_input:
            text = "input_audio_buffer: expected sound since the last commit, got none"
            raise ApiError(400, text, code="input_audio_buffer_empty")
        is_asked = given.flag("response_create", default=given.flag("create_response"))
        if not given.flag("is_speech", default=True):
            self.lane.listen_next()
            is_asked = False
        is_final = given.flag("final", default=True)
        self._commit(new_item_id(), None, is_final=is_final, is_speech_due=is_asked)

    def commit(self, item_id: str, end_ms: float, *, is_speech_due: bool) -> None:
        """End the user's turn, as the detector says."""
        self._commit(item_id, end_ms, is_final=True, is_speech_due=is_speech_due)

    def _commit(self, item_id: str, end_ms: float | None, *, is_final: bool, is_speech_due: bool) -> None:
        self._turn_id += 1
        self._has_input = False
        item = OmniItem(item_id, "user", [{"type": "input_audio", "transcript": None}])
        before = self._conversation.items.add(item)
        self._send("conversation.item.added", previous_item_id=before, item=item.shown())
        details = {"type": "input.committed", "turn_id": self._turn_id, "epoch": self.epoch}
        fields = {"item_id": item_id, "previous_item_id": before}
        self._send("input_audio_buffer.committed", **fields, event={**details, "realtime_item_id": item_id})
        self._send("conversation.item.done", previous_item_id=before, item=item.shown())
        self._transcripts.start(item, end_ms)
        self.turns.begin_span()
        if is_final:
            self.lane.end_input(is_speech_due=is_speech_due)

    def _clear_input(self) -> None:
        self._has_input = False
        self._transcripts.heard.clear()
        self.lane.clear_input()
        self._send("input_audio_buffer.cleared")

    def _cancel_input(self) -> None:
        self.epoch += 1
        self._clear_input()

    def _ask(self) -> None:
        """Let the next unit speak. A response that the model has opened by itself is the answer."""
        if self._response is None:
            self.lane.end_input(is_speech_due=True)

    def _cancel(self, given: RequestFields) -> None:
        wanted = given.text("response_id", "")
        if wanted and (self._response is None or self._response.id != wanted):
            text = f"response_id: expected the open response, got {wanted[:60]}"
            raise ApiError(400, text, param="response_id", code="response_not_active")
        self.interrupt("client_cancelled")

    def _clear_output(self) -> None:
        response_id = None if self._response is None else self._response.id
        self.interrupt("client_cancelled")
        self._send("output_audio_buffer.cleared", response_id=response_id)

    def interrupt(self, reason: str) -> None:
        """End the open response; what of its unit is still to come is dropped."""
        self.lane.interrupt()
        if self._response is not None:
            self.epoch += 1
            self._end("cancelled", reason)

    def listen_while(self, is_user_speaking: bool) -> None:
        self.lane.is_user_speaking = is_user_speaking

    # --- what the lane reports -----------------------------------------------------------------

    def on_ready(self, error: Error | None) -> None:
        """Send `session.created` for the first context. Raises: SessionOverError for a refused one."""
        if error is not None:
            raise SessionOverError(refused_context(error))
        if not self._is_created:
            self._is_created = True
            for kind in ("session.created", "session.updated"):
                self._send(kind, **self._credentials, session=self.resource())

    def on_history_refused(self, error: Error) -> None:
        """Report a text of the context before that is not in the new one."""
        self._conversation.report(error)

    def on_worker_lost(self) -> None:
        """Fail the open response; another context begins."""
        self._end("failed", "worker_lost")

    def finish(self) -> None:
        """The session is over: end the open response, and all transcriptions."""
        self._transcripts.stop()
        self._end("cancelled", "session_closed")

    def release(self) -> None:
        """Drop what refers to the session, once nothing uses it any more."""
        del self.lane, self.turns, self._conversation, self._handlers

    def on_speech(self, text: str, sound: np.ndarray) -> None:
        """Send a part of a unit. sound: [n] float32 at 24 kHz."""
        self._opened().add(text, pcm16_of(sound))

    def on_decision(self, result: Result, text: str, pcm16: bytes) -> None:
        """Send the rest of a unit, and its decision."""
        if result.is_listen:
            self._end("completed")
            metadata = {"epoch": self.epoch, "reason": "model_listen"}
            response = {"object": "realtime.response", "status": "listening", "metadata": metadata}
            self._send("response.listen", epoch=self.epoch, response=response, metadata=metadata)
            return
        self._opened().add(text, pcm16, is_last=result.end_of_turn)
        if result.end_of_turn:
            self._end("completed")

    def on_failure(self, error: Error) -> None:
        """Report a unit without a result. Raises: SessionOverError when the context is full."""
        if error.code == ErrorCode.CONTEXT_FULL:
            raise SessionOverError(CONTEXT_FULL)
        self._conversation.report(error)

    def on_unit(self) -> None:
        """Nothing depends on the end of a unit."""

    def _opened(self) -> OmniResponse:
        if self._response is None:
            items = self._conversation.items
            self._response = OmniResponse(self._send, items, self._output, self.epoch, self._turn_id)
            self.turns.begin_response()
            self._response.begin()
        return self._response

    def _end(self, status: str, reason: str | None = None) -> None:
        response, self._response = self._response, None
        if response is not None:
            self.turns.end_response()
            if self._settings.playback_commit_policy == "commit_all_on_done" and status == "completed":
                response.item.playback.acknowledge(0.0, response.item.playback.sent_ms)
            response.end(status, reason)


def _fingerprint(sound: str) -> str:
    """A digest that replaces a voice's sound file once it is read: the file may be large."""
    return f"sha256 {hashlib.sha256(sound.encode()).hexdigest()}"


def _picture(frame: object) -> bytes:
    """The encoded picture of base64 or a data URL. Raises: ApiError."""
    try:
        if not isinstance(frame, str):
            raise invalid("video_frames", expected="base64 text", got=type(frame).__name__)
        return picture_bytes(frame, "video_frames")
    except WireError as error:
        raise ApiError(400, str(error), param="video_frames", code="invalid_video_frames") from None
