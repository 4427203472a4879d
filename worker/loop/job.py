"""Base classes of what the unit loop runs: one unit or one reply of a session, split into stages that share batches.

A job states what each stage has to do for it and receives the results. It holds no reference to other jobs. The loop
groups jobs by phase and does not contain the rules of decisions, turns or chunks; subclasses do.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import ClassVar, NamedTuple

import numpy as np
from torch import Tensor

from models.inputs.image import ImagePatches
from models.sampling.beams import BeamSettings, Found
from models.stages.beam_steps import BeamSearch
from models.stages.message_reader import MediaPiece
from models.stages.runner import Rows
from models.stages.speech_stream import SpeechStream
from models.stages.step_types import Counters
from models.stages.unit_steps import UnitSteps
from models.token2wav.stream.windows import Window
from worker.loop.results import Event, Failure, PartialResult, StageTimes
from worker.loop.session import Session
from worker.loop.unit_decoder import DecoderStep
from worker.loop.window import Drop, Rebuild

SPEECH_TOKENS_PER_POLL = 25  # a call without a known end is polled once per second of speech


class JobPhase(Enum):
    """The next stage of a job's text. Phases only move forward; a job that has nothing to feed skips to SPEECH.

    Speech runs beside the phase, from the queues `Job.calls` and `Job.windows`, also while a reply still decodes.
    """

    START = auto()  # `begin` has not been called
    PREFILL = auto()  # rows of the layout remain to be fed
    SEARCH = auto()  # a beam search chooses the text; only for jobs with `beam_settings`
    DECODE = auto()  # the loop feeds `step` and samples the next token
    SPEECH = auto()  # no text is left to feed; the job is complete when both speech queues are empty


class Layout(NamedTuple):
    """Rows that a prefill feeds.

    ids: token ids, 0 where media rows stand. image_starts, audio_starts: first row of each image slice and audio unit.
    """

    ids: list[int]
    image_starts: list[int]
    audio_starts: list[int]


EMPTY_LAYOUT = Layout([], [], [])
NO_STEP = DecoderStep(None, None, False)


@dataclass(eq=False)
class SpeechCall:
    """One call of the speech token loop.

    Args:
        ids: spoken text tokens whose hidden states wait in the slot.
        text_eos: the text ends with them.
        min_tokens: speech tokens to draw before the end token is allowed.
        max_tokens: speech tokens to draw at most.
        pieces: counts of drawn tokens at which it is polled before it is over, so that sound can leave.
        per_call: duplex: the repetition penalty covers this call's tokens only, and the last token of a full call is
            neither fed nor voiced.
        stream: the turn this call belongs to; None in duplex.
        is_drain: duplex: the call draws the rest of a turn whose text has ended.

    Attributes set by the loop:
        rows: [n, D] conditioning rows.
        start: the slot's counters before the call.
        n_drawn: speech tokens drawn at most.
        n_taken: speech tokens that the job has received.
        polled_at: clock reading of the last poll.
    """

    ids: Sequence[int]
    text_eos: bool = False
    min_tokens: int = 0
    max_tokens: int = 26
    pieces: tuple[int, ...] = ()
    per_call: bool = True
    stream: SpeechStream | None = None
    is_drain: bool = False
    rows: Tensor | None = None
    start: Counters | None = None
    n_drawn: int = 0
    n_taken: int = 0
    polled_at: float = 0.0

    @property
    def is_begun(self) -> bool:
        return self.start is not None

    @property
    def may_end(self) -> bool:
        """Whether an end token may come before `max_tokens`."""
        return self.min_tokens < self.max_tokens

    @property
    def next_poll(self) -> int:
        """Number of drawn speech tokens at which the next poll is due."""
        end = self.max_tokens if self.stream is None else min(self.n_drawn + SPEECH_TOKENS_PER_POLL, self.max_tokens)
        return next((n for n in self.pieces if n > self.n_drawn), end)

    @property
    def n_until_poll(self) -> int:
        """Speech tokens to draw until the next poll, at least 1."""
        return max(1, self.next_poll - self.n_drawn)

    @property
    def is_due(self) -> bool:
        """Whether a poll of the tokens drawn so far can yield sound or an end."""
        return (
            any(self.n_taken < n <= self.n_drawn for n in self.pieces)
            or self.n_drawn >= self.max_tokens
            or self.n_drawn > self.min_tokens
        )

    def prepare(self, rows: Tensor) -> None:
        """Set the conditioning rows [n, D]."""
        self.rows = rows

    def begin(self, start: Counters) -> None:
        """Record the slot's counters before the call."""
        self.start = start

    def set_drawn(self, n: int) -> None:
        """Set the number of drawn speech tokens."""
        self.n_drawn = n

    def take(self, speech_tokens: list[int], end: int) -> list[int]:
        """Mark tokens up to `end` as received. Returns: those not received before."""
        new, self.n_taken = speech_tokens[self.n_taken : end], end
        return new

    def mark_polled(self, now: float) -> None:
        self.polled_at = now

    def cuts(self, n_speech_tokens: int, over: bool) -> list[int]:
        """Token counts at which speech tokens are handed to the job; the last one is `n_speech_tokens` if `over`.

        They do not depend on when the loop polled: sound is cut the same way whichever sessions share its batches.
        """
        step = SPEECH_TOKENS_PER_POLL
        seconds = () if self.stream is None else range(step, n_speech_tokens + 1, step)
        cuts = [n for n in sorted({*self.pieces, *seconds}) if self.n_taken < n <= n_speech_tokens]
        return cuts if not over or n_speech_tokens in cuts else [*cuts, n_speech_tokens]


@dataclass(eq=False)
class Job:
    """One unit or reply in flight.

    Attributes:
        times: time spent per stage.
        phase: next stage of the text.
        start: the slot's counters before the job, to rewind to.
        layout: rows of the prefill; empty until the job has begun.
        rows: encoded rows that are not fed yet; None before encoding and after the last one is fed.
        search: in SEARCH the beam search.
        step: in DECODE the token to feed and whether to sample another.
        is_text_done: the text is counted in the session and stays, even if the speech fails.
        begins_text_chunk: the sampler starts a new text chunk with the next token.
        error: exception that ended the speech; None while it works.
        calls: speech calls, the running one first.
        windows: speech tokens for the vocoder, one window per entry.
        text, pcm_parts: text and sound that were emitted.
        n_parts: parts of a background job that were encoded or fed.
        is_low_priority: a background job whose text yields to all other jobs.
    """

    is_background: ClassVar[bool] = False  # prefilled in parts, mostly between other jobs' steps: it has no deadline
    gathers: ClassVar[bool] = True  # a unit whose prefill may wait for others (`worker.loop.order.gathering`)
    session: Session
    arrived: float
    times: StageTimes = field(default_factory=StageTimes, kw_only=True)
    phase: JobPhase = field(default=JobPhase.START, init=False)
    start: Counters | None = field(default=None, init=False)
    layout: Layout = field(default=EMPTY_LAYOUT, init=False)
    rows: Rows | None = field(default=None, init=False)
    search: BeamSearch | None = field(default=None, init=False)
    step: DecoderStep = field(default=NO_STEP, init=False)
    is_text_done: bool = field(default=False, init=False)
    begins_text_chunk: bool = field(default=False, init=False)
    error: Exception | None = field(default=None, init=False)
    calls: deque[SpeechCall] = field(default_factory=deque, init=False)
    windows: deque[Window] = field(default_factory=deque, init=False)
    text: str = field(default="", init=False)
    pcm_parts: list[np.ndarray] = field(default_factory=list, init=False)
    n_parts: int = field(default=0, init=False)
    is_low_priority: bool = field(default=False, init=False)
    _pieces: Iterator[MediaPiece] = field(default_factory=lambda: iter(()), init=False)
    _encoded: list[MediaPiece] = field(default_factory=list, init=False)

    @property
    def slot(self) -> int:
        return self.session.slot

    @property
    def index(self) -> int:
        """Unit index for the job's events."""
        return self.session.n_units

    @property
    def has_text_left(self) -> bool:
        """Whether the loop still has to prefill or decode for this job; a search yields to all other work."""
        return self.phase not in (JobPhase.SEARCH, JobPhase.SPEECH)

    @property
    def is_complete(self) -> bool:
        """Whether only the result is left."""
        return self.phase is JobPhase.SPEECH and not self.calls and not self.windows

    # --- called by the loop --------------------------------------------------------------------

    def open_media(self, unit_steps: UnitSteps) -> None:
        """Begin to encode the media of a background job."""
        self._pieces, self._encoded = self.media_pieces(unit_steps), []

    def encode_piece(self) -> MediaPiece | None:
        """Encode the next piece. Returns: None after the last one."""
        self.n_parts += 1
        piece = next(self._pieces, None)
        if piece is not None:
            self._encoded.append(piece)
        return piece

    def encoded_rows(self) -> tuple[list[Tensor], Rows]:
        """Rows [n, D] of the image slices, and the rows of the layout with all encoded media."""
        images = [rows for piece in self._encoded if piece.kind == "image" for _, rows in piece.rows]
        media = [placed for piece in self._encoded for placed in piece.rows]
        self._encoded = []
        return images, Rows.mixed(self.layout.ids, media)

    def count_part(self) -> None:
        """Count a part that is fed."""
        self.n_parts += 1

    def admit(self, start: Counters, now: float) -> None:
        """Enter the loop: `start` is the slot's state to rewind to."""
        self.start = start
        self.times.wait = 1000 * (now - self.arrived)

    def lay_out(self) -> bool:
        """Call `begin` and leave START. Returns: whether rows have to be encoded and fed."""
        self.phase = JobPhase.PREFILL
        layout = self.begin()
        if layout is None:
            self.phase = JobPhase.SPEECH
            return False
        self.layout = layout
        return True

    def move_start(self, start: Counters) -> None:
        """Replace the counters to rewind to."""
        self.start = start

    def set_rows(self, rows: Rows) -> None:
        """Set the encoded rows of the layout."""
        self.rows = rows

    def drop_fed_rows(self, n_fed: int) -> bool:
        """Remove the first `n_fed` rows. Returns: whether the whole layout is fed; the phase is DECODE then."""
        assert self.rows is not None
        n_rows = len(self.rows)
        self.rows = self.rows.cut(n_fed, n_rows) if n_fed < n_rows else None
        if self.rows is None:
            self.phase = JobPhase.DECODE
        return self.rows is None

    def begin_search(self, search: BeamSearch) -> None:
        """Leave DECODE for the search that chooses the text."""
        self.search, self.phase = search, JobPhase.SEARCH

    def end_search(self) -> None:
        """Leave SEARCH, with its result unless it is cancelled."""
        assert self.search is not None, "end_search: expected a job that searches"
        found = None if self.is_search_cancelled else self.search.found
        self.search, self.phase = None, JobPhase.DECODE
        self.on_found(found)

    def finish_text(self) -> None:
        """Leave DECODE: every token is fed."""
        self.phase = JobPhase.SPEECH
        self.on_text_complete()

    def mark_finished(self, now: float) -> None:
        """Record the time from arrival to the result."""
        self.times.total = 1000 * (now - self.arrived)

    def disable_speech(self, error: Exception) -> None:
        """Drop the speech that is left and record why."""
        self.error = error
        self.calls.clear()
        self.windows.clear()

    def emit_partial(self, text: str = "", pcm: np.ndarray | None = None) -> None:
        """Append to the result and emit it as a partial result. pcm: [n] float32 at 24 kHz."""
        self.text += text
        if pcm is not None:
            self.pcm_parts.append(pcm)
        if (text or pcm is not None) and not self.session.reference:
            self.session.send(PartialResult(self.session.id, self.index, text, pcm))

    def emit_sound(self, pcm: np.ndarray, launched: float, now: float) -> None:
        """Emit one window's sound, [n] float32 at 24 kHz, n > 0. launched: when the vocoder got the window."""
        if self.times.first_sound is None:
            self.times.first_sound, self.times.first_vocoder = 1000 * (now - self.arrived), 1000 * (now - launched)
        self.emit_partial(pcm=pcm)

    # --- defined by each kind of job -----------------------------------------------------------

    def begin(self) -> Layout | None:
        """Read the session's input, set `step` and lay out the prefill. Returns: None if nothing is fed."""
        raise NotImplementedError

    def images(self) -> list[ImagePatches]:
        """Image slices to encode, in the layout's order."""
        return []

    def audio_units(self) -> list[np.ndarray]:
        """Audio units to encode, [n] float32 at 16 kHz each, in order."""
        return []

    @property
    def has_media(self) -> bool:
        """Whether a background job has `media_pieces`."""
        return False

    def media_pieces(self, unit_steps: UnitSteps) -> Iterator[MediaPiece]:
        """The media of a background job, which the loop encodes piece by piece."""
        return iter(())

    def on_prefilled(self) -> None:
        """The layout is in the context."""

    @property
    def token_set(self) -> int | None:
        """Index of the token set that the next token is from; None: that of the slot's settings."""
        return None

    @property
    def beam_settings(self) -> BeamSettings | None:
        """Settings of the search for the text, valid once the job has begun; None samples it token by token."""
        return None

    @property
    def is_search_cancelled(self) -> bool:
        """Whether the search is to end without a result."""
        return False

    def on_found(self, found: Found | None) -> None:
        """The search has ended: set `step`. found: its result; None if it was cancelled."""
        raise NotImplementedError

    def on_remembered(self, token: int) -> None:
        """A token went into the sampler's history."""

    def on_token(self, token: int) -> None:
        """A token was sampled: set `step`."""
        raise NotImplementedError

    def on_fed(self) -> None:
        """The step's token is in the context."""

    def on_text_complete(self) -> None:
        """Every token is sampled and fed: update the session and queue the speech calls."""
        raise NotImplementedError

    def on_speech_tokens(self, call: SpeechCall, speech_tokens: list[int], over: bool, ended: bool) -> None:
        """New speech tokens of the running call. over: the call is done. ended: its end token was drawn."""
        raise NotImplementedError

    def interrupt(self) -> bool:
        """Stop speaking between two stages. Returns: False if the job cannot stop now."""
        return False

    def fail(self, error: Exception) -> Event:
        """Undo the job's changes to its session. Returns: the event that replaces the result."""
        return Failure(self.session.id, self.index, error)

    def result(self) -> Event:
        """The event that the session receives when text, speech tokens and sound are complete."""
        raise NotImplementedError

    def expected_context_len(self) -> int | None:
        """Context rows that the slot must hold after `close`; None if the job does not count them."""
        return None

    def close(self) -> Sequence[Drop | Rebuild]:
        """Register the fed rows with the window. Returns: evictions to apply, in order."""
        return []
