"""One unit of a duplex session: rows to feed, effect of each token, speech calls, result.

Contains the rules of a unit and of the turn it belongs to. Does not contain batches, tensor values or time.
"""

from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np

from models.errors import ImageError
from models.inputs.image import ImagePatches
from models.inputs.tokens import TextStream
from worker.config.session import SIDE_SET
from worker.loop.audio_buffer import AudioBuffer
from worker.loop.job import Job, Layout, SpeechCall
from worker.loop.language import Language
from worker.loop.results import SOUND_RATE, DecidedUnit, Event, FedRows, UnitResult
from worker.loop.session import Gate, UnitInput
from worker.loop.unit_decoder import DecoderStep, SideState, TurnCap, UnitDecoder
from worker.loop.voice_manager import VoiceManager
from worker.loop.window import Drop, Rebuild

SPEECH_TOKENS_PER_UNIT = 25
DRAWN_PER_UNIT = SPEECH_TOKENS_PER_UNIT + 1  # the last one drawn is never voiced
MAX_WAITING_FRAMES = 32


@dataclass(eq=False)
class DuplexJob(Job):
    """A unit in flight. It changes its session when its text is complete.

    Attributes:
        decoder: state machine of the unit's text; None if the unit reaches no decision.
        n_speech_tokens: speech tokens drawn.
        samples: sampled tokens.
    """

    unit: UnitInput
    language: Language
    voices: VoiceManager
    decoder: UnitDecoder | None = field(default=None, init=False)
    n_speech_tokens: int = field(default=0, init=False)
    _frames: list[list[ImagePatches]] = field(default_factory=list, init=False)
    _audio: list[np.ndarray] = field(default_factory=list, init=False)
    _n_rows: int = field(default=0, init=False)  # of the unit itself, without backlog fed before it
    _is_half_fed: bool = field(default=False, init=False)
    _ends_turn: bool = field(default=False, init=False)
    _voices_old_turn: bool = field(default=False, init=False)
    _is_silenced: bool = field(default=False, init=False)
    _is_listening: bool = field(default=False, init=False)
    _is_interrupted: bool = field(default=False, init=False)
    samples: list[int] = field(default_factory=list, init=False)
    _remembered: list[int] = field(default_factory=list, init=False)
    _late_ids: list[int] = field(default_factory=list, init=False)  # fed in front of the terminator
    _before: tuple[AudioBuffer, TextStream | None] | None = field(default=None, init=False)
    _has_taken_interrupt: bool = field(default=False, init=False)
    _n_inserted: int = field(default=0, init=False)  # rows of texts inserted before the unit

    @property
    def index(self) -> int:
        return self.session.n_units + (0 if self.is_text_done else max(len(self._audio), 1))

    # --- prefill -------------------------------------------------------------------------------

    def begin(self) -> Layout | None:
        session, unit, reference = self.session, self.unit, self.session.reference
        if reference and session.gate is Gate.STOPPED:
            self._ends_turn = True
            return None
        session.audio_buffer.extend(unit.earlier)
        self._before = session.audio_buffer.copy(), session.text_stream and session.text_stream.copy()
        if unit.sound is not None:
            session.audio_buffer.push(unit.sound)
            if unit.close_early:
                session.audio_buffer.complete()
            self._audio = self._take_audio()
        self._frames = [*session.frames_waiting, *unit.frames]
        too_short = unit.sound is not None and not self._audio
        if not reference and too_short:  # images wait for the sound of their unit
            if len(self._frames) > MAX_WAITING_FRAMES:
                expected = f"at most {MAX_WAITING_FRAMES} waiting for sound"
                raise ImageError(f"images of session {session.id}", expected=expected, got=len(self._frames))
            session.hold_frames(self._frames)
            self._frames = []
            return None
        session.hold_frames([])
        if unit.sound is None and not self._frames:
            return None
        if unit.sound is None:
            session.audio_buffer.skip_unit()
        self._is_half_fed = too_short
        if not too_short:
            self.decoder = self._make_decoder()
            self.step = self._first_step(self.decoder)
        return self._lay_out()

    def _take_audio(self) -> list[np.ndarray]:
        """Take all whole units that wait.

        While a turn is open, which speaks second by second, take only one, unless the rest fills more than half of the
        buffer: it would overflow then, and the turn would never end.
        """
        audio_buffer, units = self.session.audio_buffer, []
        while (unit := audio_buffer.peek()) is not None:
            audio_buffer.commit()
            units.append(unit)
            has_room = 2 * audio_buffer.lag_s <= audio_buffer.max_waiting_s
            if self.session.reference or (self.session.is_speaking and has_room):
                break
        return units

    def _listens(self) -> bool:
        """Whether the unit must listen, unless it is forced to speak."""
        session = self.session
        # A session with a backlog listens until it has caught up.
        has_backlog = not session.reference and session.waiting_s >= 1 and not session.is_speaking
        # The speech of a turn that its limit has ended is spoken to its end before another turn.
        ends_limited = session.is_turn_limited and session.speech.draining
        return has_backlog or ends_limited or session.n_decided < session.config.force_listen_count

    def _make_decoder(self) -> UnitDecoder:
        session, config = self.session, self.session.config
        self._is_listening = self._listens()
        return UnitDecoder(
            self.language.control_tokens,
            max_tokens=config.max_new_speak_tokens_per_chunk,
            max_chars=config.max_chars_per_chunk,
            explicit=config.ls_mode == "explicit",
            compat=session.reference,
            length=self.language.length,
            turn_open=session.turn_open,
            force=self._is_listening and not self.unit.force_speak,
            override=self.unit.force_listen,
            cap=TurnCap(session.n_turn_tokens, config.max_turn_tokens),
            side=self._side_state(),
        )

    def _side_state(self) -> SideState | None:
        lane, session = self.language.side_lane, self.session
        if lane is None or not (session.config.wants_side_lane or session.side_ids is not None):
            return None
        return SideState(lane, session.side_ids, session.config.max_side_tokens_per_chunk)

    @property
    def token_set(self) -> int | None:
        decoder = self.decoder
        if decoder is None:
            return None
        if decoder.is_beside:
            return SIDE_SET
        return self.session.config.speak_set if self.unit.force_speak and decoder.is_undecided else None

    def _take_interrupt(self) -> bool:
        """Whether an interrupt is requested; the request is cleared."""
        if self.session.reference or not self.session.take_interrupt():
            return False
        self._has_taken_interrupt = True
        return True

    def _first_step(self, decoder: UnitDecoder) -> DecoderStep:
        self._is_interrupted = self._take_interrupt()
        return decoder.interrupt() if self._is_interrupted else decoder.start()

    def _next_step(self, decoder: UnitDecoder, token: int) -> DecoderStep:
        self.samples.append(token)
        self._is_interrupted = self._take_interrupt()
        return decoder.interrupt() if self._is_interrupted else decoder.take(token)

    def _lay_out(self) -> Layout:
        language, special = self.language, self.language.special
        ids = list(self.session.pending)
        image_starts: list[int] = []
        audio_starts: list[int] = []

        def place(starts: list[int], n_rows: int) -> None:
            starts.append(len(ids))
            ids.extend([0] * n_rows)

        for _ in self._audio[:-1]:
            ids.append(special.unit_start)
            place(audio_starts, language.audio_rows)
            ids.extend(self._closing_ids(special.listen))
        first = len(ids)
        ids.append(special.unit_start)
        language.add_images(ids, image_starts, self._frames)
        if self._audio:
            place(audio_starts, language.audio_rows)
        self._n_rows = len(ids) - first
        return Layout(ids, image_starts, audio_starts)

    def _closing_ids(self, terminator: int | None) -> list[int]:
        """Ids that close a unit in the context."""
        if self.session.config.ls_mode == "explicit" and terminator is not None:
            return [terminator, self.language.special.unit_end]
        return [self.language.special.unit_end]

    def images(self) -> list[ImagePatches]:
        return [part for frame in self._frames for part in frame]

    def audio_units(self) -> list[np.ndarray]:
        return self._audio

    # --- text ----------------------------------------------------------------------------------

    @property
    def _decided(self) -> UnitDecoder:
        """The decoder of a unit that reaches a decision."""
        assert self.decoder is not None, "expected a unit with a decision, got one without"
        return self.decoder

    def on_token(self, token: int) -> None:
        self.step = self._next_step(self._decided, token)
        if self.step.feed is not None and self.step.place is not None and not self.session.reference:
            stream = self.session.text_stream or self.session.open_text_stream(self.language.stream())
            self.emit_partial(stream.push([self.step.feed]))

    def on_remembered(self, token: int) -> None:
        self._remembered.append(token)

    def on_fed(self) -> None:
        self._n_rows += 1

    def on_text_complete(self) -> None:
        session = self.session
        self.is_text_done = True
        session.set_pending([])
        self._n_inserted = session.take_inserted()
        if self._is_half_fed:
            session.window.add_stray(self._n_rows)
            return
        decoder = self._decided
        session.count_units(max(len(self._audio), 1), decoder.turn_open, decoder.n_turn_tokens)
        session.keep_side(decoder.side_ids)
        if decoder.turn_limited or not decoder.is_listen or decoder.forced_end:
            session.set_turn_limited(decoder.turn_limited)
        self._ends_turn = decoder.end_of_turn
        if decoder.end_of_turn:
            self._flush_text()
        is_drain_cut = session.speech.draining and decoder.is_listen and (self.unit.force_listen or decoder.end_of_turn)
        if decoder.forced_end or is_drain_cut:
            self._ends_turn = decoder.end_of_turn or not session.reference
            self.voices.cut(session, keep_speech_tokens=session.reference)
        self._plan_speech()

    def _flush_text(self) -> None:
        if self.session.text_stream is not None:
            self.emit_partial(self.session.text_stream.flush())

    def _plan_speech(self) -> None:
        if not self.voices.can_speak(self.session):
            return
        self.session.speech.begin_unit()
        if self.session.speech.draining:
            self._voices_old_turn = True
            self.calls.append(self._drain_call())
        if not self._decided.is_listen:
            # A unit without text continues the turn's speech too.
            self.calls.append(self._unit_call())

    def _unit_call(self) -> SpeechCall:
        is_first = self.session.speech.draining or self.voices.is_fresh(self.session)
        may_end = self._decided.end_of_turn or is_first
        return SpeechCall(
            self._decided.spoken,
            min_tokens=0 if may_end else DRAWN_PER_UNIT,
            max_tokens=DRAWN_PER_UNIT,
            pieces=self._sound_pieces,
        )

    def _drain_call(self) -> SpeechCall:
        return SpeechCall([], max_tokens=DRAWN_PER_UNIT, pieces=self._sound_pieces, is_drain=True)

    @property
    def _sound_pieces(self) -> tuple[int, ...]:
        is_cut = self.session.config.early_sound and not self.session.reference
        # A piece with all tokens of a unit would leave nothing but the lookahead to the last window of a turn.
        return tuple(n for n in accumulate(self.session.config.sound_ramp) if is_cut and n < SPEECH_TOKENS_PER_UNIT)

    # --- speech --------------------------------------------------------------------------------

    def on_speech_tokens(self, call: SpeechCall, speech_tokens: list[int], over: bool, ended: bool) -> None:
        session, speech, decoder = self.session, self.session.speech, self._decided
        speech.add(speech_tokens)
        self.n_speech_tokens += len(speech_tokens)
        finished = False
        if over and call.is_drain:
            speech.count_drained(SPEECH_TOKENS_PER_UNIT)
            finished = ended or speech.n_drained >= session.config.drain_s * SPEECH_TOKENS_PER_UNIT
            if not finished and len(self.calls) > 1:
                self.calls.insert(1, self._drain_call())  # a new turn waits for the rest of the old one
        elif over and decoder.end_of_turn:
            finished = session.reference or ended or session.config.drain_s == 0
            speech.set_draining(not finished)
        # In a unit that also opens a turn, the end of the drained turn does not end the open one.
        ends = finished and (not call.is_drain or decoder.is_listen)
        self._ends_turn = (self._ends_turn and not speech.draining) or ends
        if speech.windows is None or (speech.vocoder_slot is None and not session.reference):
            return
        self.windows.extend(
            speech.windows.push(speech_tokens, last=finished and (speech.n_speech_tokens > 0 or session.reference))
        )
        if finished:
            self.voices.end_tokens(session)

    def interrupt(self) -> bool:
        """Drop the speech that is not voiced yet and end the turn. While text is decoded, `on_token` handles it."""
        session = self.session
        if session.reference or not self.is_text_done:
            return False
        self._late_ids = self._decided.end_turn()
        session.close_turn()
        self._is_silenced = self._ends_turn = True
        self._flush_text()
        self.calls.clear()
        self.windows.clear()
        self.voices.cut(session)
        return True

    # --- outcome -------------------------------------------------------------------------------

    def fail(self, error: Exception) -> Event:
        if self._before is not None and not self.is_text_done:
            # The slot has been rewound too. Whole units and images that waited are dropped with the unit: if their
            # number was the cause, every later unit would fail as well.
            session = self.session
            session.restore(*self._before)
            if self._has_taken_interrupt:
                session.request_interrupt()
            while not session.reference and session.audio_buffer.peek() is not None:
                session.audio_buffer.commit()
        return super().fail(error)

    def result(self) -> UnitResult:
        session, decoder = self.session, self.decoder
        is_listen, text = True, self.text
        if decoder is not None:
            is_listen = self._is_silenced or (decoder.is_listen and not self._voices_old_turn)
            if session.reference and not decoder.is_listen:
                text = self.language.text(decoder.spoken)
        return UnitResult(
            session=session.id,
            index=session.n_units,
            is_listen=is_listen,
            text=text,
            end_of_turn=self._ends_turn,
            pcm=self._pcm(),
            n_tokens=0 if decoder is None else len(decoder.spoken),
            n_speech_tokens=self.n_speech_tokens,
            n_slices=len(self.images()),
            n_caught_up=max(len(self._audio) - 1, 0),
            lag_s=session.audio_buffer.lag_s + session.waiting_s,
            tokens=() if decoder is None else tuple(decoder.all_ids),
            turn_limit=self._ends_turn and session.is_turn_limited,
            side_texts=() if decoder is None else tuple(map(self.language.text, decoder.side_spans)),
            n_side_tokens=0 if decoder is None else decoder.n_side,
            rows=self._fed_rows(),
            times=self.times,
            early=None if self.unit.early is None else self.unit.early.outcome,
            is_incomplete=decoder is None and not self._ends_turn,
            decided=None if decoder is None else self._outcome(),
        )

    def _outcome(self) -> DecidedUnit:
        session, goes_on = self.session, self.session.turn_open or self.session.side_ids is not None
        marks = self._is_listening, self._is_interrupted, self._is_silenced, self.unit.close_early, goes_on
        spoken, unvoiced = self.voices.left_to_speak(session)
        speech = spoken, unvoiced, bool(spoken) and self._decided.is_listen
        return DecidedUnit(session.n_units, session.seed, self.samples, self._remembered, *marks, *speech)

    def _fed_rows(self) -> FedRows:
        audio, image = self.language.audio_rows * len(self._audio), self.language.image_rows * len(self.images())
        return FedRows(len(self.layout.ids) - audio - image + self._n_inserted, audio, image)

    def _pcm(self) -> np.ndarray | None:
        pcm = np.concatenate(self.pcm_parts) if self.pcm_parts else None
        if not self.session.reference or (self._ends_turn and pcm is not None):
            return pcm
        sound = np.zeros(0, np.float32) if pcm is None else pcm
        # The public implementation pads sound shorter than a second with leading zeros.
        return np.concatenate((np.zeros(max(SOUND_RATE - len(sound), 0), np.float32), sound))

    def expected_context_len(self) -> int:
        return self.session.window.length - len(self.session.pending) + self.session.n_early_rows

    def close(self) -> list[Drop | Rebuild]:
        session = self.session
        if not self.is_text_done or self._is_half_fed:
            return []
        evictions: list[Drop | Rebuild] = []
        decoder, listen_ids = self._decided, self._closing_ids(self.language.special.listen)
        for _ in self._audio[:-1]:
            n_rows = 1 + self.language.audio_rows + len(listen_ids)
            evictions += session.register_unit(n_rows, "audio", (), "", True)
        session.set_pending([*self._late_ids, *self._closing_ids(decoder.terminator)])
        kind = "omni" if self._frames and self._audio else "vision" if self._frames else "audio"
        spoken = () if decoder.is_listen else tuple(decoder.spoken)
        n_rows = self._n_rows + len(session.pending)
        text = self.language.text(spoken)
        return evictions + session.register_unit(n_rows, kind, spoken, text, decoder.is_listen)
