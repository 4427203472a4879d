"""Where sessions' speech begins and ends: code cache, windows of codes and vocoder slot, always reset together.

Knows the three resources. Does not know why a turn ends.
"""

from typing import Any

from models.stages.speech_stream import SpeechStream
from models.stages.unit_steps import UnitSteps
from models.token2wav.stream.windows import TokenWindows
from worker.loop.session import Session, SpeechProgress

MIN_SPEECH_TOKENS = 5  # new codes the vocoder takes at least, beside the look-ahead


class VoiceManager:
    """duplex: the code model's side. vocoder: sound; None for an engine that only writes."""

    def __init__(self, duplex: UnitSteps, vocoder: Any):
        self._duplex, self._vocoder = duplex, vocoder

    def lend(self, session: Session, voice: Any) -> None:
        """Give a session a voice (`models.token2wav.voice.voice.SpeechProgress`), None for none; whatever it had
        goes back.

        Raises: as `Vocoder.open`.
        """
        self.take_back(session)
        slot = None
        if voice is not None and self._vocoder is not None:
            slot = self._vocoder.open(voice, session.config.euler_steps)
        session.voice = SpeechProgress(slot, self._windows())

    def take_back(self, session: Session) -> None:
        """The session speaks no more."""
        if session.voice.slot is not None:
            self._vocoder.close(session.voice.slot)
        session.voice = SpeechProgress()

    def can_speak(self, session: Session) -> bool:
        """Whether codes are worth drawing; in reference they are drawn for nobody too."""
        able = self._duplex.speaker is not None and session.config.generate_audio
        return able and (session.reference or session.voice.slot is not None)

    def is_fresh(self, session: Session) -> bool:
        """Whether nothing of the turn has been spoken."""
        return self._duplex.speech_rows(session.slot) == 0

    def end_tokens(self, session: Session) -> None:
        """The turn's speech is drawn: the next call begins a turn."""
        self._duplex.end_turn(session.slot)
        session.voice = SpeechProgress(session.voice.slot, self._windows())

    def cut(self, session: Session, *, keep_speech_tokens: bool = False) -> None:
        """Break off: what is not voiced yet never will be. keep_codes: leave the code model in its turn (reference)."""
        if self._duplex.speaker is not None and not keep_speech_tokens:
            self._duplex.end_turn(session.slot)
        session.voice = SpeechProgress(session.voice.slot, self._windows())
        self.begin_turn(session)

    def begin_answer(self, session: Session) -> Any:
        """All of it as new for a turn-based answer. Returns: its `SpeechStream`; None if it is not spoken."""
        if not self.can_speak(session):
            return None
        self.cut(session)
        if session.reference:
            session.voice.windows = TokenWindows(lookahead=self._lookahead, compat="reference")
        return SpeechStream(self._duplex.speaker, session.slot, compat=session.config.compat)

    def begin_turn(self, session: Session) -> None:
        """The vocoder starts anew."""
        if session.voice.slot is not None:
            self._vocoder.begin_turn(session.voice.slot)

    def _windows(self) -> TokenWindows:
        return TokenWindows(lookahead=self._lookahead, min_chunk=MIN_SPEECH_TOKENS)

    @property
    def _lookahead(self) -> int:
        return 3 if self._vocoder is None else self._vocoder.lookahead
