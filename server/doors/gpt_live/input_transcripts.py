"""What the user says, as events on the timeline of a GPT-Live session. Contains no model and no detector."""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from server.access.identity import Identity
from server.doors.core.transcriber import MAX_S, SpokenInput, Transcriber, TranscriptEnd, Transcription
from server.doors.errors import ApiError
from server.doors.gpt_live.server_events import GptLiveEventSender
from server.doors.live.sound.detector import Heard, SpeechHeard, SpeechOver
from server.doors.live.sound.recent_sound import RecentSound

LOG = logging.getLogger(__name__)
IDLE_MS = 2000  # of sound kept before the detector is certain of speech


@dataclass(eq=False)
class _SpokenTurn:
    """A turn of the user whose text is not sent. Times are on the session's timeline. text: None until it is known."""

    start_ms: int
    end_ms: int
    running: Transcription | None = None
    text: str | None = None


class InputTranscripts:
    """The transcripts of one session, in the order of the user's turns.

    Args:
        send: sends events.
        transcriber: of all sessions.
        identity: whose session it is.
        session_id: the session's id.
        on_text: called with each text that is sent.

    heard: sound that the detector hears.
    """

    def __init__(
        self,
        send: GptLiveEventSender,
        transcriber: Transcriber,
        identity: Identity,
        session_id: str,
        on_text: Callable[[str], None],
    ):
        self._send, self._transcriber, self._on_text = send, transcriber, on_text
        self._identity, self._session_id = identity, session_id
        self.heard = RecentSound(round(1000 * MAX_S), IDLE_MS)
        self.heard.keep(is_kept=transcriber.is_enabled)
        self._start_ms: int | None = None  # of the turn that is open
        self._turns: deque[_SpokenTurn] = deque()
        self._has_sent = False

    @property
    def is_enabled(self) -> bool:
        """Whether the server makes transcripts."""
        return self._transcriber.is_enabled

    def on_heard(self, heard: Heard, ahead_ms: float) -> None:
        """Transcribe a turn once it is over. ahead_ms: of the session's timeline, to the sound."""
        if not self.is_enabled:
            return
        if isinstance(heard, SpeechHeard):
            self._start_ms = heard.start_ms
            self.heard.begin(heard.start_ms)
        elif isinstance(heard, SpeechOver) and self._start_ms is not None:
            start_ms = max(0, round(self._start_ms + ahead_ms))
            turn = _SpokenTurn(start_ms, max(start_ms, round(heard.end_ms + ahead_ms)))
            self._start_ms = None
            self._turns.append(turn)
            spoken = SpokenInput(self.heard.cut(heard.end_ms))
            turn.running = self._transcriber.start(
                self._session_id, self._identity, spoken, lambda _: None, lambda end: self._finish(turn, end)
            )

    def _finish(self, turn: _SpokenTurn, end: TranscriptEnd) -> None:
        """Send the text of a turn once that of all turns before it is sent: clients join the texts as they come."""
        if isinstance(end, ApiError):
            LOG.info("session %s: a turn without a transcript: %s", self._session_id, end)
        turn.text, turn.running = "" if isinstance(end, ApiError) else end.text, None
        while self._turns and (text := self._turns[0].text) is not None:
            first = self._turns.popleft()
            if text:
                delta, self._has_sent = f" {text}" if self._has_sent else text, True
                self._send("session.input_transcript.delta", delta=delta, start_ms=first.start_ms, end_ms=first.end_ms)
                self._on_text(text)

    def stop(self) -> None:
        """End all transcriptions without events."""
        for turn in self._turns:
            if turn.running is not None:
                turn.running.cancel()
                turn.running = None
        self._turns.clear()
