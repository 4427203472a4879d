"""One turn-based answer: what is fed, when its text and speech leave, how it ends.

Knows the rules of an answer, alone or as a round of a half-duplex conversation. Does not know batches, tensors'
contents, nor where its messages came from.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from worker.chat.config import ReplyConfig
from worker.chat.reply import Reply
from worker.chat.rounds import Rounds
from worker.loop.duplex_job import EARLY_SPEECH_TOKENS
from worker.loop.job import Job, Layout, SpeechCall
from worker.loop.language import Language
from worker.loop.results import Event, PartialResult, Prefilled, ReplyResult
from worker.loop.voice_manager import VoiceManager
from worker.loop.window import Drop


@dataclass(eq=False)
class ReplyJob(Job):
    """An answer in flight.

    Text goes on while the speech of earlier text chunks is drawn. Text leaves token by token; in reference it leaves
    with the first sound of its text chunk.

    content: `models.stages.message_reader.Content` that is answered. n_fed: tokens of the answer in the context.
    """

    content: Any
    config: ReplyConfig
    language: Language
    voices: VoiceManager
    reply: Reply = field(init=False)
    n_fed: int = field(default=0, init=False)
    n_speech_tokens: int = field(default=0, init=False)
    _stream: Any = field(default=None, init=False)  # SpeechStream, None for an answer that is not voiced (any more)
    _writer: Any = field(default=None, init=False)  # TextStream
    _n_written: int = field(default=0, init=False)  # tokens
    _unsent: str = field(default="", init=False)
    _speech_tokens: list[int] = field(default_factory=list, init=False)  # of the running call
    _n_chunks: int = field(default=0, init=False)
    _is_broken: bool = field(default=False, init=False)

    @property
    def index(self) -> int:
        return self.session.n_units + 1

    @property
    def stopped(self) -> str:
        """Why it ended, once it has."""
        return "interrupted" if self._is_broken else self.reply.stopped

    @property
    def _waits_for_sound(self) -> bool:
        """Whether text leaves with its sound."""
        return self.session.reference and self._stream is not None

    # --- what is fed ---------------------------------------------------------------------------

    def begin(self) -> Layout:
        reference = self.session.reference
        self._stream = self.voices.begin_answer(self.session)
        # The public implementation writes special tokens out, and goes on behind the end of all text.
        self._writer = self.language.stream(skip_special=not reference)
        ends = self.language.reply_ends | (set() if reference else {self.language.special.endoftext})
        self.reply = Reply(ends, max_new_tokens=self.config.max_new_tokens, compat=reference)
        self.step = self.reply.interrupt() if self._is_broken else self.reply.start()
        return Layout(list(self.content.ids), [start for start, _ in self.content.image_bounds], [])

    def images(self) -> list[Any]:
        return list(self.content.slices)

    def other_rows(self, runner: Any) -> Iterable[tuple[int, Any]]:
        return list(self.content.sound_rows(runner, batch_padding=self.session.reference))

    def prefilled(self) -> None:
        self.session.tell(Prefilled(self.session.id, len(self.content)))

    # --- text ----------------------------------------------------------------------------------

    def chose(self, token: int) -> None:
        self.step = self.reply.interrupt() if self._is_broken else self.reply.take(token)
        self.begins_text_chunk = self.reply.begins_chunk
        chunk = self.reply.take_chunk()
        if chunk is not None and self._stream is not None and self.error is None:
            self._plan_speech(*chunk)
        if not self._waits_for_sound:
            self._write(len(self.reply.ids))

    def fed(self) -> None:
        self.n_fed += 1

    def text_done(self) -> None:
        self.is_text_done = True
        if not self._waits_for_sound:
            self.say(self._writer.flush())

    def _write(self, upto: int) -> None:
        ids, self._n_written = self.reply.ids[self._n_written : upto], upto
        self.say(self._writer.push(ids))

    def say(self, text: str = "", pcm: Any = None) -> None:
        self.text += text
        self._unsent += text
        if pcm is not None:
            self.pieces.append(pcm)
        if pcm is None and (self._waits_for_sound or not self._unsent):
            return
        text, self._unsent = self._unsent, ""
        self.session.tell(PartialResult(self.session.id, self.index, text, pcm))

    # --- speech --------------------------------------------------------------------------------

    def _plan_speech(self, ids: list[int], is_finished: bool) -> None:
        early = EARLY_SPEECH_TOKENS if self._n_chunks == 0 and not self.session.reference else 0
        stream = self._stream
        call = SpeechCall(
            ids, text_eos=is_finished, most=stream.max_speech_tokens, early=early, per_call=False, stream=stream
        )
        self.calls.append(call)
        self._n_chunks += 1

    def drew(self, call: SpeechCall, speech_tokens: list[int], over: bool, ended: bool) -> None:
        is_first = call.n_taken == len(speech_tokens)
        is_last = over and self.is_text_done and len(self.calls) == 1
        if self._waits_for_sound and is_first:
            self._write(self._n_written + len(call.ids))
        self._speech_tokens += speech_tokens
        self.n_speech_tokens += len(speech_tokens)
        if over:
            self._stream.close(self._speech_tokens, ended)
            self._speech_tokens = []
        self.windows.extend(self._windows(speech_tokens, is_last))
        if is_last:
            if self._waits_for_sound:
                self.say(self._writer.flush())
            self.voices.end_tokens(self.session)

    def _windows(self, speech_tokens: list[int], is_last: bool) -> list[Any]:
        cutter = self.session.voice.windows
        windows = cutter.push(speech_tokens)
        if windows:
            # Early sound first, then more and more at once, for a small window costs as much as a large one.
            cutter.least = min(2 * cutter.least, cutter.chunk)
        if is_last and (self.n_speech_tokens > 0 or self.session.reference):
            windows += cutter.push([], last=True)
        return windows

    def break_off(self) -> bool:
        self._is_broken = True
        if self._stream is not None:
            self._stream = None
            self.calls.clear()
            self.windows.clear()
            self.voices.cut(self.session)
        return True

    # --- outcome -------------------------------------------------------------------------------

    def result(self) -> ReplyResult:
        self._stream = None  # whatever text still waits for its sound leaves without it
        self._write(len(self.reply.ids))
        self.say(self._writer.flush())
        return ReplyResult(
            session=self.session.id,
            text=self.text,
            stopped=self.stopped,
            index=self.index,
            pcm=np.concatenate(self.pieces) if self.pieces else None,
            voice_error=self.error,
            n_prompt=len(self.content),
            n_speech_tokens=self.n_speech_tokens,
            tokens=tuple(self.reply.ids),
            times=self.times,
        )

    def fail(self, error: Exception) -> Event:
        return self.result() if error is self.error else super().fail(error)

    def close(self) -> list[Drop]:
        self.session.n_units += 1
        return []


@dataclass(eq=False)
class RoundJob(ReplyJob):
    """One round of a half-duplex conversation: its content is what the user said, and the context goes on behind it."""

    rounds: Rounds
    _n_closing: int = field(default=0, init=False)  # rows that end the round before

    def begin(self) -> Layout:
        language, stopped = self.language, self.rounds.stopped
        closing = [] if stopped is None else language.close_answer(is_complete=stopped == "stop")
        # In the public implementation they leave with the round they stand in front of.
        self._n_closing = 0 if self.session.reference else len(closing)
        before = [*closing, *language.open_user()]
        behind = language.open_answer(enable_thinking=self.config.enable_thinking)
        self.content = self.content.between(before, behind)
        return super().begin()

    def close(self) -> list[Drop]:
        super().close()
        return self.rounds.close(len(self.content) + self.n_fed, self.stopped, n_closing=self._n_closing)
