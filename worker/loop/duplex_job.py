"""One unit of a duplex session: what is fed, what becomes of each token, what is voiced, what the client gets.

Knows the rules of a unit and of the turn it belongs to. Does not know batches, tensors' contents nor time.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from models.errors import ImageError
from worker.loop.audio_buffer import AudioBuffer
from worker.loop.job import Job, Layout, SpeechCall
from worker.loop.language import Language
from worker.loop.results import SOUND_RATE, Event, UnitResult
from worker.loop.session import Gate, UnitInput
from worker.loop.unit_decoder import UnitDecoder
from worker.loop.voice_manager import VoiceManager
from worker.loop.window import Drop, Rebuild, UnitRecord

SPEECH_TOKENS_PER_UNIT = 25
DRAWN_PER_UNIT = SPEECH_TOKENS_PER_UNIT + 1  # the last one drawn is never voiced
# The vocoder takes five. But a turn opens with 120 ms of silence and the newest 160 ms wait for the cross-fade: of ten
# codes 120 ms of speech leave, of five none.
EARLY_SPEECH_TOKENS = 10
MAX_WAITING_FRAMES = 32
DRAIN = "drain"


@dataclass(eq=False)
class DuplexJob(Job):
    """A unit in flight; what it changes in its session it changes when its text is complete."""

    unit: UnitInput
    language: Language
    voices: VoiceManager
    talk: UnitDecoder | None = field(default=None, init=False)
    n_speech_tokens: int = field(default=0, init=False)
    _frames: list[list[Any]] = field(default_factory=list, init=False)
    _sounds: list[np.ndarray] = field(default_factory=list, init=False)
    _n_rows: int = field(default=0, init=False)  # of the unit itself, without seconds caught up
    _is_half_fed: bool = field(default=False, init=False)
    _ends_turn: bool = field(default=False, init=False)
    _voices_old_turn: bool = field(default=False, init=False)
    _is_hushed: bool = field(default=False, init=False)
    _late: list[int] = field(default_factory=list, init=False)  # ids in front of the terminator
    _before: tuple[AudioBuffer, Any] | None = field(default=None, init=False)
    _is_broken_off: bool = field(default=False, init=False)

    @property
    def index(self) -> int:
        return self.session.n_units + (0 if self.is_text_done else max(len(self._sounds), 1))

    # --- what is fed ---------------------------------------------------------------------------

    def begin(self) -> Layout | None:
        session, unit, reference = self.session, self.unit, self.session.reference
        if reference and session.gate is Gate.STOPPED:
            self._ends_turn = True
            return None
        self._before = session.audio_buffer.copy(), session.text and session.text.copy()
        if unit.sound is not None:
            session.audio_buffer.push(unit.sound)
            self._sounds = self._take_sounds()
        self._frames = [*session.frames_waiting, *unit.frames]
        too_short = unit.sound is not None and not self._sounds
        if not reference and too_short:
            # Pictures wait for the sound they belong to.
            if len(self._frames) > MAX_WAITING_FRAMES:
                expected = f"at most {MAX_WAITING_FRAMES} waiting for sound"
                raise ImageError(f"pictures of session {session.id}", expected=expected, got=len(self._frames))
            session.frames_waiting, self._frames = self._frames, []
            return None
        session.frames_waiting = []
        if unit.sound is None and not self._frames:
            return None
        if unit.sound is None:
            session.audio_buffer.mark_heard_without_sound()
        self._is_half_fed = too_short
        if not too_short:
            self.talk = self._start_talk()
            self.step = self.talk.interrupt() if self._take_break() else self.talk.start()
        return self._lay_out()

    def _take_sounds(self) -> list[np.ndarray]:
        """All whole seconds that wait; in an open turn, which speaks second by second, only one of them, unless what is
        left takes up half the room: no more could come in then, and without that the turn would never end.
        """
        audio_buffer, sounds = self.session.audio_buffer, []
        while (sound := audio_buffer.peek()) is not None:
            audio_buffer.commit()
            sounds.append(sound)
            if self.session.reference or (self._is_speaking and 2 * audio_buffer.lag_s <= audio_buffer.max_waiting_s):
                break
        return sounds

    @property
    def _is_speaking(self) -> bool:
        return self.session.turn_open or self.session.voice.draining

    def _start_talk(self) -> UnitDecoder:
        session, config = self.session, self.session.config
        behind = not session.reference and session.waiting_s >= 1 and not self._is_speaking
        return UnitDecoder(
            self.language.talk_ids,
            max_tokens=config.max_new_speak_tokens_per_chunk,
            max_chars=config.max_chars_per_chunk,
            explicit=config.ls_mode == "explicit",
            compat=session.reference,
            length=self.language.length,
            turn_open=session.turn_open,
            # Whoever is behind listens until it has caught up.
            force=behind or session.n_decided < config.force_listen_count,
            override=self.unit.force_listen,
        )

    def _take_break(self) -> bool:
        """Whether a break is due; it is spent then."""
        due = self.session.break_asked and not self.session.reference
        if due:
            self.session.break_asked = False
            self._is_broken_off = True
        return due

    def _lay_out(self) -> Layout:
        language, special = self.language, self.language.special
        ids, images, sounds = list(self.session.pending), [], []

        def place(where: list[int], n_rows: int) -> None:
            where.append(len(ids))
            ids.extend([0] * n_rows)

        for _ in self._sounds[:-1]:
            ids.append(special.unit_start)
            place(sounds, language.sound_rows)
            ids.extend(self._closing(special.listen))
        start = len(ids)
        ids.append(special.unit_start)
        marks = ((special.image_start, special.image_end), (special.slice_start, special.slice_end))
        for frame in self._frames:
            for number in range(len(frame)):
                before, behind = marks[number > 0]
                ids.append(before)
                place(images, language.image_rows)
                ids.append(behind)
        if self._sounds:
            place(sounds, language.sound_rows)
        self._n_rows = len(ids) - start
        return Layout(ids, images, sounds)

    def _closing(self, terminator: int | None) -> list[int]:
        """Ids that close a unit in the context."""
        explicit = self.session.config.ls_mode == "explicit" and terminator is not None
        return [terminator, self.language.special.unit_end] if explicit else [self.language.special.unit_end]

    def images(self) -> list[Any]:
        return [part for frame in self._frames for part in frame]

    def sounds(self) -> list[Any]:
        return self._sounds

    # --- text ----------------------------------------------------------------------------------

    def chose(self, token: int) -> None:
        self.step = self.talk.interrupt() if self._take_break() else self.talk.take(token)
        if self.step.place is not None and not self.session.reference:
            self.say(self._stream().push([self.step.feed]))

    def fed(self) -> None:
        self._n_rows += 1

    def _stream(self) -> Any:
        if self.session.text is None:
            self.session.text = self.language.stream()
        return self.session.text

    def text_done(self) -> None:
        session, talk = self.session, self.talk
        self.is_text_done = True
        session.pending = []
        if self._is_half_fed:
            session.window.add_stray(self._n_rows)
            return
        session.n_units += max(len(self._sounds), 1)
        session.n_decided += 1
        session.turn_open = talk.turn_open
        self._ends_turn = talk.end_of_turn
        if talk.end_of_turn and session.text is not None:
            self.say(session.text.flush())
        silenced = session.voice.draining and talk.is_listen and (self.unit.force_listen or talk.end_of_turn)
        if talk.forced_end or silenced:
            self._ends_turn = talk.end_of_turn or not session.reference
            self.voices.cut(session, keep_speech_tokens=session.reference)
        self._plan_speech()

    def _plan_speech(self) -> None:
        session, talk = self.session, self.talk
        if not self.voices.can_speak(session):
            return
        if session.voice.draining:
            self._voices_old_turn = True
            self.calls.append(self._drain_call())
        if not talk.is_listen:
            # Even a unit without text goes on speaking.
            self.calls.append(self._unit_call())

    def _unit_call(self) -> SpeechCall:
        fresh = self.session.voice.draining or self.voices.is_fresh(self.session)
        may_end = self.talk.end_of_turn or fresh
        return SpeechCall(
            self.talk.spoken, least=0 if may_end else DRAWN_PER_UNIT, most=DRAWN_PER_UNIT, early=self._early
        )

    def _drain_call(self) -> SpeechCall:
        return SpeechCall([], most=DRAWN_PER_UNIT, early=self._early, what=DRAIN)

    @property
    def _early(self) -> int:
        config = self.session.config
        return EARLY_SPEECH_TOKENS if config.early_sound and not self.session.reference else 0

    # --- speech --------------------------------------------------------------------------------

    def drew(self, call: SpeechCall, speech_tokens: list[int], over: bool, ended: bool) -> None:
        session, voice = self.session, self.session.voice
        voice.n_speech_tokens += len(speech_tokens)
        self.n_speech_tokens += len(speech_tokens)
        finished = False
        if over and call.what == DRAIN:
            voice.n_drained += SPEECH_TOKENS_PER_UNIT
            finished = ended or voice.n_drained >= session.config.drain_s * SPEECH_TOKENS_PER_UNIT
            if not finished and len(self.calls) > 1:
                self.calls.insert(1, self._drain_call())  # a new turn waits for the rest of the old one
        elif over and self.talk.end_of_turn:
            finished = session.reference or ended or session.config.drain_s == 0
            voice.draining = not finished
        # Of a unit that also opens a turn, the old one's end is not the end.
        ends = finished and (call.what != DRAIN or self.talk.is_listen)
        self._ends_turn = (self._ends_turn and not voice.draining) or ends
        if voice.slot is None and not session.reference:
            return
        self.windows.extend(
            voice.windows.push(speech_tokens, last=finished and (voice.n_speech_tokens > 0 or session.reference))
        )
        if finished:
            self.voices.end_tokens(session)

    def break_off(self) -> bool:
        """What is not voiced yet never will be, and the turn is over; while text is chosen, that is up to `chose`."""
        session = self.session
        if session.reference or not self.is_text_done:
            return False
        self._late = self.talk.end_turn()
        session.turn_open = False
        self._is_hushed = self._ends_turn = True
        if session.text is not None:
            self.say(session.text.flush())
        self.calls.clear()
        self.windows.clear()
        self.voices.cut(session)
        return True

    # --- outcome -------------------------------------------------------------------------------

    def fail(self, error: Exception) -> Event:
        if self._before is not None and not self.is_text_done:
            # The slot has not heard the unit either. Whole seconds and pictures that waited go with it: should it have
            # failed for their number, so would every unit from now on.
            session = self.session
            session.audio_buffer, session.text = self._before
            session.break_asked = session.break_asked or self._is_broken_off
            while not session.reference and session.audio_buffer.peek() is not None:
                session.audio_buffer.commit()
        return super().fail(error)

    def result(self) -> UnitResult:
        session, talk, reference = self.session, self.talk, self.session.reference
        heard = talk is not None
        is_listen = not heard or self._is_hushed or (talk.is_listen and not self._voices_old_turn)
        text = self.text
        if reference and heard and not talk.is_listen:
            text = self.language.text(talk.spoken)
        return UnitResult(
            session=session.id,
            index=session.n_units,
            is_listen=is_listen,
            text=text,
            end_of_turn=self._ends_turn,
            pcm=self._pcm(),
            n_tokens=len(talk.spoken) if heard else 0,
            n_speech_tokens=self.n_speech_tokens,
            n_slices=len(self.images()),
            n_caught_up=max(len(self._sounds) - 1, 0),
            lag_s=session.audio_buffer.lag_s + session.waiting_s,
            tokens=tuple(talk.all_ids) if heard else (),
            times=self.times,
        )

    def _pcm(self) -> np.ndarray | None:
        pcm = np.concatenate(self.pieces) if self.pieces else None
        if not self.session.reference or (self._ends_turn and pcm is not None):
            return pcm
        sound = np.zeros(0, np.float32) if pcm is None else pcm
        # As the public implementation fills up whatever is shorter than a second.
        return np.concatenate((np.zeros(max(SOUND_RATE - len(sound), 0), np.float32), sound))

    def rows_expected(self) -> int:
        return self.session.window.length - len(self.session.pending)

    def close(self) -> list[Drop | Rebuild]:
        session = self.session
        if not self.is_text_done or self._is_half_fed:
            return []
        evictions: list[Drop | Rebuild] = []
        listened = self._closing(self.language.special.listen)
        for _ in self._sounds[:-1]:
            n_rows = 1 + self.language.sound_rows + len(listened)
            evictions += self._register(n_rows, "audio", (), "", True)
        session.pending = [*self._late, *self._closing(self.talk.terminator)]
        kind = "omni" if self._frames and self._sounds else "vision" if self._frames else "audio"
        spoken = () if self.talk.is_listen else tuple(self.talk.spoken)
        text = self.language.text(spoken)
        n_rows = self._n_rows + len(session.pending)
        return evictions + self._register(n_rows, kind, spoken, text, self.talk.is_listen)

    def _register(
        self, n_rows: int, kind: str, ids: tuple[int, ...], text: str, is_listen: bool
    ) -> list[Drop | Rebuild]:
        session = self.session
        record = UnitRecord(session.n_unit_ids, n_rows, kind, ids, text, is_listen)
        session.n_unit_ids += 1
        return session.window.close_unit(record)
