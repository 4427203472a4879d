"""Where a session's speech starts and ends: speech cache, token windows and vocoder slot are always reset together.

Contains the three resources. Does not contain why a turn ends.
"""

from models.stages.speech_stream import SpeechStream
from models.stages.unit_steps import UnitSteps
from models.token2wav.settings import FRAMES_PER_TOKEN, MEL_RATE, SILENCE_TOKEN
from models.token2wav.stream.vocode import TAIL_FRAMES
from models.token2wav.stream.vocoder import Vocoder
from models.token2wav.stream.windows import TokenWindows
from models.token2wav.voice.voice import Voice
from worker.loop.session import Session, SpeechProgress

MIN_SPEECH_TOKENS = 5  # new tokens the vocoder takes at least, lookahead excluded
DEFAULT_LOOKAHEAD = 3  # without a vocoder
# Tokens whose sound the vocoder holds back for the cross-fade with the next window.
HELD_TOKENS = TAIL_FRAMES // FRAMES_PER_TOKEN


class VoiceManager:
    """Leases vocoder slots to sessions and starts their turns."""

    def __init__(self, unit_steps: UnitSteps, vocoder: Vocoder | None):
        """vocoder: None for an engine without sound."""
        self._unit_steps, self._vocoder = unit_steps, vocoder
        self._voices: dict[int, Voice] = {}  # by slot, also of sessions that do not speak now

    @property
    def max_voice_s(self) -> float:
        """Seconds of the longest voice; infinite without a vocoder."""
        return float("inf") if self._vocoder is None else self._vocoder.sizes.max_prompt / MEL_RATE

    def lend(self, session: Session, voice: Voice | None) -> None:
        """Replace the session's voice. It is leased when the settings ask for sound. voice: None for none.

        Raises: as `Vocoder.open`.
        """
        self.take_back(session)
        if voice is not None:
            self._voices[session.slot] = voice
        slot = self._open(session) if session.config.generate_audio else None
        session.start_speech(self._progress(session, slot))

    def _open(self, session: Session, voice: Voice | None = None) -> int | None:
        voice = voice or self._voices.get(session.slot)
        if voice is None or self._vocoder is None:
            return None
        return self._vocoder.open(voice, session.config.euler_steps)

    def adjust(self, session: Session, *, speaks: bool, voice: Voice | None = None) -> list[str]:
        """Start or end the speech of a session between two units, or change its voice.

        A turn that is spoken is spoken to its end in its voice. Otherwise a new voice needs `begin_unspoken`.

        Args:
            speaks: the setting `generate_audio` from now on.
            voice: None: unchanged.
        Returns: one sentence for each change that takes effect later, or not at all.
        Raises: as `Vocoder.open`; nothing has changed then.
        """
        speech, notes = session.speech, []
        slot, is_spoken = speech.vocoder_slot, speech.is_on and session.is_speaking
        if slot is None and speaks:
            slot = self._open(session, voice)
        elif slot is not None and voice is not None and self._vocoder is not None:
            self._vocoder.change_voice(slot, voice)
        if voice is not None:
            self._voices[session.slot] = voice
            if self._vocoder is None or not speaks:
                notes.append("another voice has no effect while the session does not speak")
            elif speech.n_speech_tokens:
                notes.append("another voice takes effect when the turn has ended")
        if speaks and slot is None and not session.config.generate_audio:
            notes.append("setting generate_audio has no effect: the session has no voice")
        if not speaks and is_spoken:
            notes.append("setting generate_audio takes effect when the turn has ended")
        elif speaks != speech.is_on or slot != speech.vocoder_slot:
            session.start_speech(SpeechProgress(slot, self._windows(session), speaks))
        return notes

    def begin_unspoken(self, session: Session) -> None:
        """Reset the vocoder's state of a session unless a turn has been spoken in part: a new voice takes effect."""
        if not session.speech.n_speech_tokens:
            self.begin_turn(session)

    def take_back(self, session: Session) -> None:
        """Release the session's voice."""
        if self._vocoder is not None and session.speech.vocoder_slot is not None:
            self._vocoder.close(session.speech.vocoder_slot)
        self._voices.pop(session.slot, None)
        session.start_speech(SpeechProgress())

    def can_speak(self, session: Session) -> bool:
        """Whether speech tokens are drawn; reference mode draws them without a voice too."""
        able = self._unit_steps.speaker is not None and session.speech.is_on
        return able and (session.reference or session.speech.vocoder_slot is not None)

    def speaks_in_units(self, session: Session) -> bool:
        """Whether turn-based replies of the session are spoken in calls of one second, as turns of duplex sessions."""
        return self._unit_steps.runner.model.config.talker and not session.reference

    def is_fresh(self, session: Session) -> bool:
        """Whether no speech of the turn has been drawn."""
        return self._unit_steps.speech_rows(session.slot) == 0

    def left_to_speak(self, session: Session) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Speech tokens of the last unit, and those without sound, if the speech of a turn goes on; otherwise none."""
        speech = session.speech
        if not session.is_speaking or speech.windows is None or self.is_fresh(session):
            return (), ()
        tokens, waiting = tuple(speech.unit_tokens), speech.windows.waiting
        n_voiced = len(tokens) - len(waiting)
        if n_voiced < 0:  # all tokens of the turn wait
            return tokens, waiting
        return tokens, ((SILENCE_TOKEN,) * HELD_TOKENS + tokens[:n_voiced])[-HELD_TOKENS:] + waiting

    def begin_spoken_turn(self, session: Session) -> None:
        """Let the next call begin a turn whose sound continues that of the last one."""
        self._unit_steps.end_turn(session.slot)

    def end_tokens(self, session: Session) -> None:
        """End the turn's speech tokens: the next call begins a turn."""
        self._unit_steps.end_turn(session.slot)
        session.start_speech(self._progress(session, session.speech.vocoder_slot))

    def cut(self, session: Session, *, keep_speech_tokens: bool = False) -> None:
        """Drop the speech that is not voiced yet. keep_speech_tokens: keep the speech cache of the turn (reference)."""
        if self._unit_steps.speaker is not None and not keep_speech_tokens:
            self._unit_steps.end_turn(session.slot)
        session.start_speech(self._progress(session, session.speech.vocoder_slot))
        self.begin_turn(session)

    def begin_answer(self, session: Session) -> SpeechStream | None:
        """Reset the speech for a turn-based reply. Returns: its stream; None if the reply is not spoken."""
        speaker = self._unit_steps.speaker
        if speaker is None or not self.can_speak(session):
            return None
        self.cut(session)
        if session.reference:
            windows = TokenWindows(lookahead=self._lookahead, compat="reference")
            session.start_speech(SpeechProgress(session.speech.vocoder_slot, windows, session.speech.is_on))
        return SpeechStream(speaker, session.slot, compat=session.config.compat)

    def begin_turn(self, session: Session) -> None:
        """Reset the vocoder's state of the session: its next sound is the first one of a turn."""
        session.unplayed.begin_turn()
        if self._vocoder is not None and session.speech.vocoder_slot is not None:
            self._vocoder.begin_turn(session.speech.vocoder_slot)

    def _progress(self, session: Session, vocoder_slot: int | None) -> SpeechProgress:
        """The speech of a turn that begins."""
        speaks = session.config.generate_audio
        return SpeechProgress(vocoder_slot, self._windows(session) if speaks else None, speaks)

    def _windows(self, session: Session) -> TokenWindows:
        joins_end = not session.reference
        return TokenWindows(lookahead=self._lookahead, min_chunk=MIN_SPEECH_TOKENS, joins_end=joins_end)

    @property
    def _lookahead(self) -> int:
        return DEFAULT_LOOKAHEAD if self._vocoder is None else self._vocoder.lookahead
