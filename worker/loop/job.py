"""What the unit loop runs: one unit or one answer of a session, seen as stages that share batches. Torch-free.

A job says what it wants next and is told what came of it. The loop groups jobs by what they want; it knows nothing of
decisions, turns or chunks, and a job knows nothing of its neighbours.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from worker.loop.results import Event, Failure, PartialResult, StageTimes
from worker.loop.session import Session
from worker.loop.unit_decoder import DecoderStep

SPEECH_TOKENS_PER_POLL = 25  # a call without a known end is looked at once a second of speech


class Layout(NamedTuple):
    """What a prefill feeds. ids: 0 where media rows stand. images, sounds: first row of each slice and each unit."""

    ids: list[int]
    images: list[int]
    sounds: list[int]


@dataclass(eq=False)
class SpeechCall:
    """One call of the code loop.

    Args:
        ids: spoken tokens whose states wait in the slot. text_eos: the text ends with them.
        least: codes that must come before the end code. most: codes to draw at most.
        early: look at the codes as soon as there are so many; 0: when the call is over.
        per_call: duplex: the repetition penalty looks at this call's codes only, and the last code that a full call
            draws is neither fed nor voiced.
        stream: `models.stages.speech_stream.SpeechStream` of the turn this call belongs to; None in duplex.
        what: the job's own mark.
    Set by the loop:
        rows: [n, D] conditioning rows. at: the slot's counters when it began. n_drawn: codes drawn at most.
        n_taken: codes the job has been given. seen_at: when somebody has last looked at them.
    """

    ids: list[int]
    text_eos: bool = False
    least: int = 0
    most: int = 26
    early: int = 0
    per_call: bool = True
    stream: Any = None
    what: str = ""
    rows: Any = None
    at: Any = None
    n_drawn: int = 0
    n_taken: int = 0
    seen_at: float = 0.0

    @property
    def is_begun(self) -> bool:
        return self.at is not None

    @property
    def may_end(self) -> bool:
        """Whether it may be over before all its codes are drawn."""
        return self.least < self.most

    @property
    def next_look(self) -> int:
        """Codes drawn when somebody has to look at them again."""
        if self.n_drawn < self.early:
            return self.early
        return self.most if self.stream is None else min(self.n_drawn + SPEECH_TOKENS_PER_POLL, self.most)

    @property
    def is_due(self) -> bool:
        """Whether the codes drawn matter now: there may be sound in them, or an end."""
        return self.n_taken < self.early <= self.n_drawn or self.n_drawn >= self.most or self.n_drawn > self.least

    def cuts(self, n_speech_tokens: int, over: bool) -> list[int]:
        """Counts up to which codes go on, those that went before left out; the last one is `n_speech_tokens` if `over`.

        They do not hang on when somebody looked, which is a matter of who else speaks: sound is cut alike then.
        """
        seconds = (
            () if self.stream is None else range(SPEECH_TOKENS_PER_POLL, n_speech_tokens + 1, SPEECH_TOKENS_PER_POLL)
        )
        cuts = [n for n in sorted({self.early, *seconds}) if self.n_taken < n <= n_speech_tokens]
        return cuts if not over or n_speech_tokens in cuts else [*cuts, n_speech_tokens]


@dataclass(eq=False)
class Job:
    """One unit or answer in flight.

    layout: what its prefill feeds. rows: what of that is encoded and not fed yet. step: what its text wants next; None
    when nothing is wanted. is_text_done: what was fed stays, whatever becomes of the speech. calls: speech to come, the
    first one running. windows: codes for the vocoder. text, pieces: what has left. at: counters to go back to. error:
    why there is no voice.
    """

    session: Session
    arrived: float
    times: StageTimes = field(default_factory=StageTimes, kw_only=True)
    at: Any = field(default=None, init=False)
    layout: Layout | None = field(default=None, init=False)
    is_begun: bool = field(default=False, init=False)
    rows: Any = field(default=None, init=False)
    is_prefilled: bool = field(default=False, init=False)
    step: DecoderStep | None = field(default=None, init=False)
    is_text_done: bool = field(default=False, init=False)
    begins_text_chunk: bool = field(default=False, init=False)
    error: Exception | None = field(default=None, init=False)
    calls: deque[SpeechCall] = field(default_factory=deque, init=False)
    windows: deque[Any] = field(default_factory=deque, init=False)
    text: str = field(default="", init=False)
    pieces: list[Any] = field(default_factory=list, init=False)

    @property
    def slot(self) -> int:
        return self.session.slot

    def say(self, text: str = "", pcm: Any = None) -> None:
        """Let something leave at once."""
        self.text += text
        if pcm is not None:
            self.pieces.append(pcm)
        if (text or pcm is not None) and not self.session.reference:
            self.session.tell(PartialResult(self.session.id, self.index, text, pcm))

    def fail(self, error: Exception) -> Event:
        """What the session gets instead of a result."""
        return Failure(self.session.id, self.index, error)

    @property
    def index(self) -> int:
        """The unit as its result will count it."""
        return self.session.n_units

    # --- what each kind of job defines ---------------------------------------------------------

    def begin(self) -> Layout | None:
        """Look at what the session has; decide what is fed and set `step`. None: nothing is, the job is over."""
        raise NotImplementedError

    def images(self) -> list[Any]:
        """Image slices to encode, in the layout's order."""
        return []

    def sounds(self) -> list[Any]:
        """Units of sound to hear, one after the other."""
        return []

    def other_rows(self, runner: Any) -> Iterable[tuple[int, Any]]:
        """Media rows that only this job can have encoded: where they begin in the layout, and the rows [n, D]."""
        return ()

    def prefilled(self) -> None:
        """The layout is in the context."""

    def break_off(self) -> bool:
        """Somebody wants quiet, between two stages. Returns: whether this job has seen to it."""
        return False

    def chose(self, token: int) -> None:
        """A token has been chosen: set `step`."""
        raise NotImplementedError

    def fed(self) -> None:
        """The step's token went into the context."""

    def text_done(self) -> None:
        """Nothing more will be chosen and everything is fed: count it in the session, say what is spoken."""
        raise NotImplementedError

    def drew(self, call: SpeechCall, speech_tokens: list[int], over: bool, ended: bool) -> None:
        """New codes of the running call. over: it is done; ended: by its end code."""
        raise NotImplementedError

    def result(self) -> Event:
        """What the session gets when text, codes and sound are through."""
        raise NotImplementedError

    def rows_expected(self) -> int | None:
        """Context rows the session should hold now that the job is closed; None if nobody counts them."""
        return None

    def close(self) -> list[Any]:
        """Register what was fed. Returns: what the window lets go (`worker.loop.window`)."""
        return []
