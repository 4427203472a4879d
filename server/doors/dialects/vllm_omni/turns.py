"""The user's turns of a vLLM-Omni session, and what the user's voice does to an open response.

A session with `turn_detection` commits the user's turns by itself. Speech over a response ends it, or is reported, as
the policy says. The voice comes from the detector, or from `is_speech` of a client that has a detector of its own.
"""

from typing import Protocol

import numpy as np

from server.doors.core.request_fields import RequestFields
from server.doors.dialects.vllm_omni.events import OmniEvents
from server.doors.dialects.vllm_omni.items import new_item_id
from server.doors.dialects.vllm_omni.settings import LONG_OVERLAP_MS, SHORT_ACK_MS, OmniSettings
from server.doors.dialects.vllm_omni.transcripts import OmniTranscripts
from server.doors.live.overlap_speech import OverlapSpeech
from server.doors.live.sound.detector import CERTAIN_MS, RATE_MS, DetectorSettings, Heard, SpeechHeard, SpeechOver
from server.doors.live.sound.detector_feed import DetectorFeed

BARGE_IN = frozenset({"barge_in", "interrupt", "cancel"})
LISTEN = frozenset({"listen", "continue", "continue_output", "ack"})
DROP = frozenset({"drop", "ignore", "silence"})


class TurnHost(Protocol):
    """The session whose turns these are."""

    @property
    def has_response(self) -> bool:
        """Whether a response is open."""

    @property
    def epoch(self) -> int:
        """Number of interruptions so far."""

    def commit(self, item_id: str, end_ms: float, *, is_speech_due: bool) -> None:
        """The user's turn is over. end_ms: of its sound. is_speech_due: the model speaks next."""

    def interrupt(self, reason: str) -> None:
        """End the open response."""

    def listen_while(self, is_user_speaking: bool) -> None:
        """Let units listen while the user speaks."""


class OmniTurns:
    """One session's turns.

    Args:
        send: sends events.
        host: the session.
        settings: in force.
        transcripts: of the user's turns.
    """

    def __init__(self, send: OmniEvents, host: TurnHost, settings: OmniSettings, transcripts: OmniTranscripts):
        self._send, self._host, self._settings, self._transcripts = send, host, settings, transcripts
        self.detector = DetectorFeed(DetectorSettings())
        self.detector.keep_in(transcripts.heard)
        self._overlap = OverlapSpeech()
        self._overlap_ms = 0.0  # of speech over the open response
        self._start_ms = 0
        self._item_id: str | None = None  # of the user's open turn
        self._has_hints = False  # the client says what is speech
        self._reported: tuple[str, str] | None = None  # action and reason of the last decision about this overlap

    def configure(self, settings: OmniSettings) -> None:
        """Change the settings from the next sound on."""
        if settings.detection is None and self._settings.detection is not None:
            self._end_turn()
        self._settings = settings
        self.detector.configure(DetectorSettings() if settings.detection is None else settings.detection.settings())
        self.begin_span()

    def begin_span(self) -> None:
        """What the client commits next begins now, unless the detector says where."""
        if self._settings.detection is None:
            self._transcripts.heard.begin(self.detector.pushed_ms)

    def begin_response(self) -> None:
        """A response is opened."""
        self._forget_overlap()
        self._overlap.begin_reply(self.detector.pushed_ms)

    def end_response(self) -> None:
        """The open response is over."""
        self._overlap.end_reply()
        self._forget_overlap()

    # --- the client's sound --------------------------------------------------------------------

    def append(self, samples: np.ndarray, given: RequestFields) -> bool:
        """Follow new sound. given: the event with it. Returns: False if the client has the sound dropped."""
        ms = len(samples) / RATE_MS
        is_kept = not self._host.has_response or self._obey(given, ms)
        if not is_kept:
            return False
        if given.has("is_speech") and self._settings.detection is None:
            self._has_hints = True
            self._follow_hint(ms, is_speech=given.flag("is_speech"))
        if self._needs_detector:
            self.detector.push(samples)
        return True

    @property
    def _needs_detector(self) -> bool:
        settings = self._settings
        if settings.detection is not None or self._transcripts.is_wanted:
            return True
        return settings.overlap_policy != "listen_only" and not self._has_hints

    def _obey(self, given: RequestFields, ms: float) -> bool:
        """Do to the open response what the client demands. Returns: False if the sound is dropped."""
        wanted = given.text("overlap_action", given.text("overlap", "")).strip().lower()
        if wanted in BARGE_IN or given.flag("force_barge_in"):
            reason = "client_overlap_action" if wanted in BARGE_IN else "client_force_barge_in"
            self._decide("barge_in", reason, ms)
        elif wanted in LISTEN or wanted in DROP:
            self._overlap_ms = 0.0
            self._decide("drop" if wanted in DROP else "listen", "client_overlap_action", ms)
        return wanted not in DROP

    def _follow_hint(self, ms: float, *, is_speech: bool) -> None:
        if not self._host.has_response:
            return
        if is_speech:
            self._overlap_ms += ms
            self._apply_policy(ms)
        else:
            self._end_overlap()

    # --- what the detector hears ---------------------------------------------------------------

    def on_heard(self, heard: Heard) -> None:
        """Follow the user's speech."""
        overlap_ms = self._overlap.hear(heard)
        detection = self._settings.detection
        if isinstance(heard, SpeechOver):
            self._end_overlap()
            if self._item_id is not None and detection is not None:
                item_id = self._item_id
                self._send("input_audio_buffer.speech_stopped", audio_end_ms=heard.end_ms, item_id=item_id)
                self._end_turn()
                self._host.commit(item_id, heard.end_ms, is_speech_due=detection.create_response)
            return
        if isinstance(heard, SpeechHeard):
            self._start_ms = heard.start_ms
            if detection is not None:
                self._transcripts.heard.begin(heard.start_ms)
        if detection is not None and self._item_id is None and heard.speech_ms >= detection.min_speech_duration_ms:
            self._item_id = new_item_id()
            self._send("input_audio_buffer.speech_started", audio_start_ms=self._start_ms, item_id=self._item_id)
            self._host.listen_while(is_user_speaking=True)
        if overlap_ms > 0 and self._host.has_response and not self._has_hints:
            added, self._overlap_ms = overlap_ms - self._overlap_ms, overlap_ms
            self._apply_policy(max(0.0, added))

    def _end_turn(self) -> None:
        self._item_id = None
        self._host.listen_while(is_user_speaking=False)

    # --- speech over a response ----------------------------------------------------------------

    def _apply_policy(self, ms: float) -> None:
        policy, detection = self._settings.overlap_policy, self._settings.detection
        if policy == "listen_only":
            self._decide("listen", "policy_listen_only", ms)
        elif policy == "auto":
            is_long = self._overlap_ms >= LONG_OVERLAP_MS
            reason = "long_overlap_speech" if is_long else "accumulating_overlap_speech"
            self._decide("barge_in" if is_long else "listen", reason, ms)
        elif detection is not None:
            if self._overlap_ms >= max(CERTAIN_MS, detection.min_speech_duration_ms):
                self._decide("barge_in", "server_vad_speech_started", ms, "turn_detected")
        elif self._has_hints or self._overlap_ms >= CERTAIN_MS:
            self._decide("barge_in", "barge_in_on_speech", ms)

    def _end_overlap(self) -> None:
        if self._settings.overlap_policy == "auto" and 0 < self._overlap_ms <= SHORT_ACK_MS and self._host.has_response:
            self._decide("listen", "short_ack", 0.0)
        self._forget_overlap()

    def _forget_overlap(self) -> None:
        self._overlap_ms, self._reported = 0.0, None

    def _decide(self, action: str, reason: str, ms: float, cancel_reason: str = "barge_in") -> None:
        """Report a decision, once for each overlap, and carry it out."""
        if self._reported == (action, reason):
            return
        self._reported = action, reason
        metadata = {"duration_ms": round(ms), "overlap_speech_ms": round(self._overlap_ms)}
        policy = self._settings.overlap_policy
        fields = {"epoch": self._host.epoch, "policy": policy, "action": action, "reason": reason}
        self._send("overlap.decision", **fields, metadata=metadata)
        if action == "barge_in":
            self._host.interrupt(cancel_reason)
