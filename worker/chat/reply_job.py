"""One turn-based reply: rows to feed, when text and speech are emitted, how it ends.

Contains the rules of a reply, alone or as a round of a half-duplex conversation. Does not contain batches, tensor
values, nor the source of its messages.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from models.inputs.tokens import TextStream
from models.sampling.beams import BeamSettings, Found
from models.stages.message_reader import Content, MediaPiece
from models.stages.speech_stream import SpeechStream
from models.stages.unit_steps import UnitSteps
from models.token2wav.settings import SAMPLES_PER_TOKEN, SILENCE_TOKEN
from models.token2wav.stream.windows import Window
from worker.chat.config import ReplyConfig
from worker.chat.reply import Reply
from worker.chat.sound_end import LIMITS, SoundEnd
from worker.chat.spoken_units import SpokenUnits
from worker.chat.stop_texts import StopTexts
from worker.loop.duplex_job import DRAWN_PER_UNIT
from worker.loop.job import Job, Layout, SpeechCall
from worker.loop.language import Language
from worker.loop.results import Event, PartialResult, Prefilled, ReplyResult, StopReason
from worker.loop.rounds import Rounds
from worker.loop.unit_decoder import DecoderStep
from worker.loop.voice_manager import VoiceManager
from worker.loop.window import Drop

NO_TOKEN = -1  # in place of a sampled token
PAUSE_TOKENS = 6  # of silence between two turns of a reply that is spoken in units


@dataclass(eq=False)
class ReplyJob(Job):
    """A reply in flight.

    Text decoding continues while the speech of earlier text chunks is drawn. Text is emitted token by token; in
    reference mode it is emitted with the first sound of its text chunk. With beams the text comes from a search, whole:
    it is emitted at once, or token by token while it is fed for speech or for a later round. The tokens of a given text
    take the place of sampled ones, so its speech is that of a generated answer.

    A model that has learned to speak in units alone reads a second's text at a time, and without its hidden states,
    which are those of another kind of conversation.

    Attributes:
        content: the messages to answer.
        reply: state machine of the text; set by `begin`.
        n_fed: tokens of the reply in the context.
        n_speech_tokens: speech tokens drawn.
    """

    is_background: ClassVar[bool] = True

    content: Content
    config: ReplyConfig
    language: Language
    voices: VoiceManager
    reply: Reply = field(init=False)
    n_fed: int = field(default=0, init=False)
    n_speech_tokens: int = field(default=0, init=False)
    _stream: SpeechStream | None = field(default=None, init=False)  # None without speech, or once it was interrupted
    _writer: TextStream = field(init=False)
    _n_written: int = field(default=0, init=False)  # tokens
    _unsent: str = field(default="", init=False)
    _call_tokens: list[int] = field(default_factory=list, init=False)  # speech tokens of the running call
    _n_calls: int = field(default=0, init=False)
    _is_interrupted: bool = field(default=False, init=False)
    _ends: frozenset[int] = field(default=frozenset(), init=False)
    _found: Found | None = field(default=None, init=False)  # the text, once a search has chosen it, or a given one
    _stops: StopTexts | None = field(default=None, init=False)
    _units: SpokenUnits | None = field(default=None, init=False)  # of a reply that is spoken in units
    _n_drained: int = field(default=0, init=False)  # seconds after those of a turn's text
    _sound_end: SoundEnd = field(default_factory=SoundEnd, init=False)
    _n_cut: int = field(default=0, init=False)  # speech tokens in windows, pauses included
    _n_before_call: int = field(default=0, init=False)  # of them, those before the latest call with text
    _n_heard: int = field(default=0, init=False)  # samples that the vocoder has given

    def __post_init__(self) -> None:
        self.is_low_priority = self.config.priority == "low"

    @property
    def index(self) -> int:
        return self.session.n_units + 1

    @property
    def keeps_context(self) -> bool:
        """Whether a later reply reads the rows of this one."""
        return False

    @property
    def stopped(self) -> StopReason:
        """Why the reply ended; valid once it has."""
        if self._is_interrupted:
            return "interrupted"
        assert self.reply.stopped is not None, "stopped: expected a reply that has ended, got one that goes on"
        return self.reply.stopped

    @property
    def _waits_for_sound(self) -> bool:
        """Whether text is emitted with its sound."""
        return self.session.reference and self._stream is not None

    # --- prefill -------------------------------------------------------------------------------

    def begin(self) -> Layout:
        reference = self.session.reference
        self._stream = self.voices.begin_answer(self.session)
        if self._stream is not None and self.voices.speaks_in_units(self.session):
            self._units = SpokenUnits(self.language)
        # The public implementation decodes special tokens too, and continues after the end-of-text token.
        self._writer = self.language.stream(skip_special=not reference)
        self._ends = self.language.reply_terminators
        if not reference:
            self._ends |= {self.language.special.endoftext}
        max_new_tokens = self.config.max_new_tokens
        if (given := self.content.answer) is not None:
            self._ends, max_new_tokens = frozenset(), max(len(given), 1)
            self._found = Found(given, "stop")
        elif self.config.stop:
            self._stops = StopTexts(self.config.stop, self.language.stream())
        self.reply = Reply(self._ends, max_new_tokens=max_new_tokens, compat=reference)
        self.step = self.reply.interrupt() if self._is_interrupted else self.reply.start()
        return Layout(list(self.content.ids), [start for start, _ in self.content.image_bounds], [])

    @property
    def has_media(self) -> bool:
        return bool(self.content.slices or self.content.sounds)

    def media_pieces(self, unit_steps: UnitSteps) -> Iterator[MediaPiece]:
        return unit_steps.media_pieces(self.content, batch_padding=self.session.reference)

    def on_prefilled(self) -> None:
        self.session.send(Prefilled(self.session.id, len(self.content)))

    # --- text ----------------------------------------------------------------------------------

    @property
    def beam_settings(self) -> BeamSettings | None:
        if self.config.num_beams == 1 or self._is_interrupted:
            return None
        return self.config.beam_settings(self._ends, speaks=self._stream is not None)

    @property
    def is_search_cancelled(self) -> bool:
        return self._is_interrupted

    def on_found(self, found: Found | None) -> None:
        self._found = found
        if found is None or self._stream is not None or self.keeps_context:
            self.on_token(
                NO_TOKEN
            )  # the tokens are fed from now on: speech needs their states, later rounds their rows
            return
        while self.step.sample:
            self.step = self._next_found(found)
            self.reply.take_chunk()
        self._write(len(found.ids))

    def _next_found(self, found: Found) -> DecoderStep:
        n = len(self.reply.ids)
        return self.reply.take(found.ids[n]) if n < len(found.ids) else self.reply.end(found.stopped)

    def on_token(self, token: int) -> None:
        if self._is_interrupted:
            self.step = self.reply.interrupt()
        elif self._found is not None:
            self.step = self._next_found(self._found)  # the sampled token is not used
        elif self._stops is not None and self._stops.is_complete:
            self.step = self.reply.end("stop")
        else:
            self.step = self.reply.take(token)
            if self._stops is not None:
                self._stops.push(token)
        if self._units is not None:
            self.step = self.step._replace(place=None)
        self.begins_text_chunk = self.reply.begins_chunk
        chunk = self.reply.take_chunk()
        if chunk is not None and self._stream is not None and self.error is None:
            self._plan_speech(self._stream, *chunk)
        if not self._waits_for_sound:
            self._write(len(self.reply.ids))

    def on_fed(self) -> None:
        self.n_fed += 1

    def on_text_complete(self) -> None:
        self.is_text_done = True
        if not self._waits_for_sound:
            self.emit_partial(self._writer.flush())

    def _write(self, end: int) -> None:
        """Emit the text of the tokens up to `end`."""
        ids, self._n_written = self.reply.ids[self._n_written : end], end
        self.emit_partial(self._writer.push(ids))

    def emit_partial(self, text: str = "", pcm: np.ndarray | None = None) -> None:
        self.text += text
        self._unsent += text
        if pcm is not None:
            self.pcm_parts.append(pcm)
        if pcm is None and (self._waits_for_sound or not self._unsent):
            return
        text, self._unsent = self._unsent, ""
        self.session.send(PartialResult(self.session.id, self.index, text, pcm))

    # --- speech --------------------------------------------------------------------------------

    def _plan_speech(self, stream: SpeechStream, ids: list[int], is_finished: bool) -> None:
        if self._units is not None:
            for unit in self._units.push(ids, last=is_finished):
                least = 0 if unit.ends_turn else DRAWN_PER_UNIT
                pieces = self._first_pieces
                self._add_call(SpeechCall(unit.ids, min_tokens=least, max_tokens=DRAWN_PER_UNIT, pieces=pieces))
            return
        most = stream.max_speech_tokens
        if not self.session.reference:
            most = min(most, LIMITS.frame_cap(len(ids)))
        self._add_call(
            SpeechCall(
                ids,
                text_eos=is_finished,
                max_tokens=most,
                pieces=self._first_pieces,
                per_call=False,
                stream=stream,
            )
        )

    @property
    def _first_pieces(self) -> tuple[int, ...]:
        is_early = self._n_calls == 0 and not self.session.reference
        return self.session.config.sound_ramp[:1] if is_early else ()

    def _add_call(self, call: SpeechCall) -> None:
        self.calls.append(call)
        self._n_calls += 1

    def on_speech_tokens(self, call: SpeechCall, speech_tokens: list[int], over: bool, ended: bool) -> None:
        is_first = call.n_taken == len(speech_tokens)
        is_last = over and self.is_text_done and len(self.calls) == 1
        if is_first and speech_tokens and call.ids:
            self._n_before_call = self._n_cut
        if self._waits_for_sound and is_first:
            self._write(self._n_written + len(call.ids))
        self.n_speech_tokens += len(speech_tokens)
        if call.stream is not None:
            self._call_tokens += speech_tokens
            if over:
                call.stream.close(self._call_tokens, ended)
                self._call_tokens = []
        elif over and call.may_end:
            if self._goes_on(ended):
                self.calls.insert(1, SpeechCall([], max_tokens=DRAWN_PER_UNIT))
                is_last = False
            elif not is_last:
                self.voices.begin_spoken_turn(self.session)
                speech_tokens = speech_tokens + [SILENCE_TOKEN] * PAUSE_TOKENS
        self._n_cut += len(speech_tokens)
        self.windows.extend(self._cut(speech_tokens, is_last))
        if is_last:
            if self._waits_for_sound:
                self.emit_partial(self._writer.flush())
            self.voices.end_tokens(self.session)

    def _goes_on(self, ended: bool) -> bool:
        """Whether a further second belongs to the turn whose text has been read."""
        self._n_drained = 0 if ended or self._n_drained >= self.session.config.drain_s else self._n_drained + 1
        return self._n_drained > 0

    def _cut(self, speech_tokens: list[int], is_last: bool) -> list[Window]:
        cutter = self.session.speech.windows
        assert cutter is not None, "expected a session with windows, got one without"
        reference = self.session.reference
        windows = cutter.push(speech_tokens, last=is_last and not reference and self.n_speech_tokens > 0)
        if is_last and reference:  # a push with `last` would mark full windows as last too
            windows += cutter.push([], last=True)
        if windows:
            # The first window is small for early sound, later ones grow: a small window costs as much as a large one.
            cutter.grow()
        return windows

    def emit_sound(self, pcm: np.ndarray, launched: float, now: float) -> None:
        if not self.session.reference:
            text_is_read = self._is_at_last_text
            self._n_heard += len(pcm)
            pcm = self._sound_end.push(pcm, text_is_read=text_is_read)
        if len(pcm):
            super().emit_sound(pcm, launched, now)
        if self._sound_end.is_over:
            self._end_speech()

    @property
    def _is_at_last_text(self) -> bool:
        """Whether the sound that comes next is that of the last text: windows of earlier calls may still wait."""
        if not self.is_text_done or len(self.calls) > 1 or any(call.ids and not call.n_taken for call in self.calls):
            return False
        return self._n_heard >= self._n_before_call * SAMPLES_PER_TOKEN

    def interrupt(self) -> bool:
        self._is_interrupted = True
        self._end_speech()
        return True

    def _end_speech(self) -> None:
        if self._stream is not None:
            self._stream = None
            self.calls.clear()
            self.windows.clear()
            self.voices.cut(self.session)

    # --- outcome -------------------------------------------------------------------------------

    def result(self) -> ReplyResult:
        self._stream = None  # text that still waits for its sound is emitted without it
        self._write(len(self.reply.ids))
        self.emit_partial(self._writer.flush())
        return ReplyResult(
            session=self.session.id,
            text=self.text,
            stopped=self.stopped,
            index=self.index,
            pcm=np.concatenate(self.pcm_parts) if self.pcm_parts else None,
            voice_error=self.error,
            n_prompt=len(self.content),
            n_prompt_image=self.content.n_image_rows,
            n_prompt_sound=self.content.n_sound_rows,
            n_speech_tokens=self.n_speech_tokens,
            tokens=tuple(self.reply.ids),
            times=self.times,
        )

    def fail(self, error: Exception) -> Event:
        return self.result() if error is self.error else super().fail(error)

    def close(self) -> Sequence[Drop]:
        self.session.count_reply()
        return []


@dataclass(eq=False)
class RoundJob(ReplyJob):
    """One round of a half-duplex conversation: its content is the user's turn, appended to the session's context."""

    rounds: Rounds
    _n_closing: int = field(default=0, init=False)  # rows that close the round before

    @property
    def keeps_context(self) -> bool:
        return True

    def begin(self) -> Layout:
        language, stopped = self.language, self.rounds.stopped
        closing = [] if stopped is None else language.close_answer(is_complete=stopped == "stop")
        # In the public implementation they are evicted with the round that they precede.
        self._n_closing = 0 if self.session.reference else len(closing)
        before = [*closing, *language.open_user()]
        after = language.open_answer(enable_thinking=self.config.enable_thinking)
        self.content = self.content.between(before, after)
        return super().begin()

    def close(self) -> Sequence[Drop]:
        super().close()
        return self.rounds.close(len(self.content) + self.n_fed, self.stopped, n_closing=self._n_closing)
