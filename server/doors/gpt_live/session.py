"""One GPT-Live session: the reaction to each event, and the events that follow. Contains no socket."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from server.access.identity import Identity
from server.access.shares import run_shared
from server.doors.core.event_writer import Base64Text
from server.doors.core.transcriber import Transcriber
from server.doors.errors import ApiError
from server.doors.gpt_live.client_events import (
    MAX_CONTENT,
    AnyEvent,
    AppendText,
    CloseSession,
    Delegation,
    GivenSession,
    GptLiveAppendAudio,
    GptLiveCreateItem,
    GptLiveCreateResponse,
    GptLiveSessionUpdate,
    HistoryMessage,
    Mute,
    SessionStart,
    Unmute,
)
from server.doors.gpt_live.input_transcripts import InputTranscripts
from server.doors.gpt_live.output_timeline import OutputTimeline
from server.doors.gpt_live.server_events import GptLiveEventSender
from server.doors.gpt_live.session_sound import RATES, SessionSound
from server.doors.live.context_texts import newest_texts, said_text
from server.doors.live.door_context import LARGE_EVENT
from server.doors.live.event_error import EventError, invalid_value
from server.doors.live.overlap_speech import OverlapSpeech
from server.doors.live.sound.detector import DetectorSettings, Heard, SpeechHeard
from server.doors.live.sound.detector_feed import DetectorFeed
from server.doors.live.sound.resample import pcm16_of
from server.doors.live.unit_lane import MAX_TEXTS, LiveLane
from server.doors.model_names import ModelNames
from server.doors.voices import VoiceNames
from worker.protocol.messages import SYSTEM_PROMPT, Error, Prepare
from worker.protocol.text_messages import InsertText

LOG = logging.getLogger(__name__)
TRACK_NUMBER = 1  # of the sound on a track, which never ends
USAGE_UNITS = 10  # between two reports of the usage
DEFAULT_VOICE = "marin"
MAX_REMEMBERED = 200  # texts, for a context that begins again on another worker


class GptLiveCloseError(Exception):
    """The client has asked for the end. event_id: of its event."""

    def __init__(self, event_id: str | None):
        super().__init__("close requested")
        self.event_id = event_id


class GptLiveRefusedError(Exception):
    """The worker refuses the context. error: for the client. event_id: of the event that asked for it."""

    def __init__(self, error: EventError, event_id: str | None):
        super().__init__(error.message)
        self.error, self.event_id = error, event_id


class GptLiveTrack(Protocol):
    """The outgoing sound of a call."""

    def play(self, number: int, pcm16: bytes) -> None:
        """Add sound. number: of what it belongs to. pcm16: at 24 kHz."""


class GptLiveSession:
    """A session before and after its start.

    Args:
        send: sends events.
        names: served models.
        voices: registered voices.
        identity: whose session it is.
        session_id: its id.
        expires_at: Unix s.
        clock: monotonic s.
        transcriber: of all sessions.
        barge_in_ms: speech of the client that silences the reply; 0: the model alone decides.
        track: plays the sound; None: the client gets it in events.
    Attributes:
        id: shown to the client.
    """

    def __init__(
        self,
        send: GptLiveEventSender,
        names: ModelNames,
        voices: VoiceNames,
        identity: Identity,
        session_id: str,
        expires_at: int,
        clock: Callable[[], float],
        transcriber: Transcriber,
        barge_in_ms: int = 0,
        track: GptLiveTrack | None = None,
    ):
        self._send, self._names, self._voices, self._identity = send, names, voices, identity
        self.id, self._expires_at, self._track = session_id, expires_at, track
        self.lane = LiveLane(self, clock)
        self.detector = DetectorFeed(DetectorSettings())
        self._transcripts = InputTranscripts(send, transcriber, identity, session_id, self._on_transcript)
        self.detector.keep_in(self._transcripts.heard)
        self._barge_in_ms = barge_in_ms
        self._overlap = OverlapSpeech()
        self.timeline = OutputTimeline()
        self._config: GivenSession | None = None
        self._model, self._voice = names.served, DEFAULT_VOICE
        self._registered_voice: str | None = None
        self._sound = SessionSound("audio/pcm", 24_000)
        self._start_id: str | None = None
        self._is_muted = False
        self._n_samples = 0  # of the client's sound, at 16 kHz
        self._n_units = 0
        self._is_rebuilt = False
        self._unit_end_ms: int | None = None  # on the timeline, of the unit that speaks
        self._texts: list[InsertText] = []  # what the context contains, in order
        self._spoken = ""  # by the model, since the last of them; the newest characters
        self.configured, self.started = asyncio.Event(), asyncio.Event()

    # --- state ---------------------------------------------------------------------------------

    @property
    def is_started(self) -> bool:
        return self.started.is_set()

    @property
    def waiting_ms(self) -> int:
        return self.timeline.waiting_ms

    @property
    def is_speaking(self) -> bool:
        """Whether a reply is not over, or not sent."""
        return self.lane.is_answering or self.timeline.waiting_ms > 0

    @property
    def has_barge_in(self) -> bool:
        """Whether the client's voice may silence the reply."""
        return self._barge_in_ms > 0

    def usage(self) -> dict[str, float]:
        """The seconds of sound so far."""
        return {"seconds": round(self._n_samples / 16_000, 3)}

    def resource(self) -> dict[str, Any]:
        """The session with its effective configuration."""
        config = self._config
        delegation = Delegation() if config is None or config.delegation is None else config.delegation
        form = {} if self._track is not None else {"type": self._sound.kind, "rate": self._sound.rate}
        user = None if config is None else config.safety_identifier
        return {
            "id": self.id,
            "expires_at": self._expires_at,
            "model": self._model,
            "status": "active",
            "instructions": self._instructions,
            "audio": {**({"format": form} if form else {}), "output": {"voice": self._voice}},
            "delegation": delegation.model_dump(exclude_none=True),
            "store": False,
            **({} if user is None else {"safety_identifier": user}),
        }

    def prepare(self) -> Prepare:
        """The message that begins the context."""
        config = {"force_listen_count": 0, "generate_audio": True}
        return Prepare(system_prompt=self._instructions, ref_audio_path=self._registered_voice, config=config)

    def history(self) -> list[InsertText]:
        """The texts that a context begins with: all that are given, or the newest ones on another worker."""
        self._keep_spoken()
        return newest_texts(self._texts) if self._is_rebuilt else list(self._texts)

    @property
    def _instructions(self) -> str:
        given = None if self._config is None else self._config.instructions
        return given if given and given.strip() else SYSTEM_PROMPT

    def stop(self) -> None:
        """The session is over: send nothing any more, and drop what refers to the session."""
        self.lane.detach()
        self._transcripts.stop()
        del self.lane, self._transcripts

    # --- the client's events -------------------------------------------------------------------

    async def handle(self, event: AnyEvent) -> None:
        """React to an event. Raises: EventError; GptLiveCloseError."""
        if isinstance(event, CloseSession):
            raise GptLiveCloseError(event.event_id)
        if isinstance(event, SessionStart):
            await self._start(event)
            return
        if not self.is_started:
            raise EventError("session_not_started", f"{event.type}: expected session.started before it, got none")
        match event:
            case GptLiveAppendAudio() if self._track is not None:
                raise EventError("unsupported_event", f"{event.type}: expected sound on the track, got an event")
            case GptLiveAppendAudio():
                is_large = len(event.audio) > LARGE_EVENT
                samples = await run_shared(self._decoded, event) if is_large else self._decoded(event)
                self.hear(samples)
            case Mute() | Unmute():
                self._is_muted = isinstance(event, Mute)
                kind = "muted" if self._is_muted else "unmuted"
                self._answer(f"session.input_audio.{kind}", event.event_id)
            case AppendText():
                self._append_text(event)
            case GptLiveSessionUpdate():
                self._update(event)
            case GptLiveCreateItem() | GptLiveCreateResponse():
                message = f"{event.type}: expected a task that the model has handed over, got none"
                raise EventError("no_active_delegation", message)

    def hear(self, samples: np.ndarray) -> None:
        """Add sound of the client, [n] float32 at 16 kHz. While it is muted, silence ends what it was saying."""
        if self.has_barge_in or self._transcripts.is_enabled:
            self.detector.push(np.zeros_like(samples) if self._is_muted else samples)
        if not self._is_muted:
            self._n_samples += len(samples)
            self.lane.append(samples)

    def _decoded(self, event: GptLiveAppendAudio) -> np.ndarray:
        """The event's sound, [n] float32 at 16 kHz. Raises: EventError."""
        return self._sound.decode(event.sound())

    async def _start(self, event: SessionStart) -> None:
        if self._config is not None:
            raise EventError("session_already_started", "session.start: expected once, got it again")
        config = event.session
        try:
            self._model = self._names.resolve_for(config.model, self._identity)
        except ApiError as error:
            raise EventError(error.code or "model_not_found", error.message, "session.model") from None
        output = None if config.audio is None else config.audio.output
        voice = None if output is None else output.voice
        self._voice = DEFAULT_VOICE if voice is None else voice if isinstance(voice, str) else voice.id
        try:
            self._registered_voice = await run_shared(self._voices.resolve, self._voice)
        except ApiError as error:
            raise EventError("invalid_value", error.message, "session.audio.output.voice") from None
        if config.delegation is not None:
            _check(config.delegation)
        form = None if config.audio is None else config.audio.format
        if form is not None and self._track is not None:
            raise invalid_value("session.audio.format", expected="none, as the track has its own", got=form.type)
        if form is not None:
            rate = form.rate or RATES[form.type][0]
            if rate not in RATES[form.type]:
                expected = " or ".join(str(one) for one in RATES[form.type])
                raise invalid_value("session.audio.format.rate", expected=f"{expected} for {form.type}", got=rate)
            self._sound = SessionSound(form.type, rate)
        self._config, self._start_id = config, event.event_id
        self._texts = [_history_text(message) for message in config.input or ()]
        self.configured.set()

    def _update(self, event: GptLiveSessionUpdate) -> None:
        given = event.session.delegation
        if given is not None:
            assert self._config is not None
            before = self._config.delegation or Delegation()
            if given.type != before.type:
                raise invalid_value("session.delegation.type", expected=before.type, got=given.type)
            _check(given)
            merged = {**(before.responses or {}), **(given.responses or {})} or None
            named = given.model_dump(exclude_unset=True)  # what an update leaves out stays
            kept = before.model_copy(update={**named, "responses": merged})
            self._config = self._config.model_copy(update={"delegation": kept})
        self._answer("session.updated", event.event_id, session=self.resource())

    def _append_text(self, event: AppendText) -> None:
        if event.delegation_id is not None:
            raise EventError("unknown_delegation", "delegation_id: expected null, got an unknown id", "delegation_id")
        if (n := self.lane.n_texts) >= MAX_TEXTS:
            raise EventError(
                "too_many_texts", f"content: expected at most {MAX_TEXTS} texts that wait, got {n}", "content"
            )
        start_ms = self.timeline.taken_ms
        text = InsertText(text=event.content, role="system")

        def done(error: Error | None) -> None:
            if error is not None:
                self._send.error(EventError(str(error.code), error.error, "content"), event.event_id)
                return
            self._remember(text)
            self._answer(f"{event.type}ed", event.event_id, start_ms=start_ms, end_ms=self.timeline.taken_ms)

        self.lane.insert(text, is_said=event.type == "session.commentary.append", on_done=done)

    # --- what the lane reports -----------------------------------------------------------------

    def on_ready(self, error: Error | None) -> None:
        """Send `session.started` for the first context. Raises: GptLiveRefusedError."""
        if error is not None:
            raise GptLiveRefusedError(EventError(str(error.code), error.error), self._start_id)
        if not self.is_started:
            self.started.set()
            self._answer("session.started", self._start_id, session=self.resource())

    def on_history_refused(self, error: Error) -> None:
        """Report a message of `session.input` that is not in the context."""
        if self._is_rebuilt:
            LOG.warning("a text of the context before is refused: %s", error.code)
            return
        self._send.error(EventError(str(error.code), error.error, "session.input"), self._start_id)

    def on_worker_lost(self) -> None:
        """Another context begins, with the newest texts; what was made of the reply goes on."""
        self._is_rebuilt = True
        self._unit_end_ms = None

    def on_heard(self, heard: Heard) -> None:
        """Transcribe what the client says, and silence the reply if it has spoken over it for long enough."""
        if isinstance(heard, SpeechHeard):
            self._keep_spoken()  # before the transcript of this turn
        self._transcripts.on_heard(heard, self.timeline.taken_ms - self.detector.pushed_ms)
        if not self.is_speaking:
            self._overlap.end_reply()
        if self._overlap.hear(heard) >= self._barge_in_ms and self.has_barge_in:
            self._overlap.end_reply()
            self.timeline.clear()
            self.lane.interrupt()

    def on_speech(self, text: str, sound: np.ndarray) -> None:
        """Put speech on the timeline."""
        if not self.timeline.waiting_ms:
            self._overlap.end_reply()
        self._overlap.begin_reply(self.detector.pushed_ms)
        start_ms, end_ms = self.timeline.add(sound)
        self._spoken = (self._spoken + text)[-MAX_CONTENT:]
        if self._unit_end_ms is None:
            self._unit_end_ms = start_ms + 1000
        if text:
            end_ms = max(end_ms, self._unit_end_ms)  # text comes before the sound of its unit
            self._send("session.output_transcript.delta", delta=text, start_ms=start_ms, end_ms=end_ms)

    def on_unit(self) -> None:
        """Report the usage from time to time."""
        self._unit_end_ms = None
        self._n_units += 1
        if self._n_units % USAGE_UNITS == 0:
            ratio = self.lane.context_ratio
            window = {} if ratio is None else {"context_window": {"usage_ratio": ratio}}
            self._send("session.usage.updated", usage=self.usage(), **window)

    def send_sound(self, n: int) -> None:
        """Send the next samples of the timeline. n: at 24 kHz."""
        sound = self.timeline.take(n)
        if self._track is not None:
            self._track.play(TRACK_NUMBER, pcm16_of(sound))
        else:
            data = self._sound.encode(sound)
            self._send.plain("session.output_audio.delta", delta=Base64Text.of(data))
        self.lane.wake()

    # --- texts ---------------------------------------------------------------------------------

    def _remember(self, text: InsertText) -> None:
        self._keep_spoken()
        self._texts.append(text)
        del self._texts[:-MAX_REMEMBERED]

    def _on_transcript(self, text: str) -> None:
        """Keep what the client has said, for a context that begins again."""
        self._texts.append(InsertText(text=text, role="user"))
        del self._texts[:-MAX_REMEMBERED]

    def _keep_spoken(self) -> None:
        if self._spoken:
            spoken, self._spoken = self._spoken, ""
            self._texts.append(said_text(spoken))

    def _answer(self, kind: str, client_event_id: str | None, **fields: object) -> None:
        if client_event_id is not None:
            fields["client_event_id"] = client_event_id
        self._send(kind, **fields)


def _check(delegation: Delegation) -> None:
    """Raises: EventError for settings that only another kind of delegation has."""
    if delegation.type == "client" and delegation.responses is not None:
        param = "session.delegation.responses"
        raise EventError("unknown_parameter", f"{param}: expected no such field with the type client, got one", param)


def _history_text(message: HistoryMessage) -> InsertText:
    text = message.content[0].text or " "
    if message.role == "assistant":
        return said_text(text)
    return InsertText(text=text, role="user" if message.role == "user" else "system")
