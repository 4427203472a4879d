"""Events that a session emits: partial results while a unit runs, one result per unit, failures. Torch-free."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from worker.early.trial import EarlyOutcome

SOUND_RATE = 24_000
UNIT_MS = 1000.0
StageName = Literal["see", "hear", "prefill", "decode", "condition", "speech", "sound", "finalize"]
StopReason = Literal["stop", "length", "interrupted"]
GapCause = Literal["engine", "order", "client"]


class UnitLoad(NamedTuple):
    """Load of the engine by a unit.

    seconds: from the moment that the unit could start to its result. n_jobs: mean number of jobs in flight meanwhile,
    itself included.
    """

    seconds: float
    n_jobs: float


class PlaybackGap(NamedTuple):
    """Silence in a turn at a client whose player has nothing left.

    cause: `client`: the unit itself arrived after that; `order`: the sound waited for the first sound of others;
    `engine`: anything else.
    """

    seconds: float
    cause: GapCause


@dataclass
class StageTimes:
    """Milliseconds that a unit spent in each stage. A stage of a batch counts in full for each of its sessions.

    A stage lasts from its launch by the host until the host has its result. Stages that overlap count in parallel, so
    their sum may exceed `total`. `see` covers only the launch of the vision encoder: its run time shows in `prefill`.
    """

    wait: float = 0.0  # from arrival to the first stage
    see: float = 0.0
    hear: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0
    condition: float = 0.0
    speech: float = 0.0
    sound: float = 0.0
    finalize: float = 0.0
    total: float = 0.0  # from arrival to the result
    first_sound: float | None = None  # from arrival to the first sound that was emitted; None without sound
    first_vocoder: float | None = None  # of it: from the launch of its window at the vocoder on
    load: UnitLoad | None = None  # None for a unit that ran early, and for a reply
    gaps: list[PlaybackGap] = field(default_factory=list)  # before its sounds

    def add(self, stage: StageName, ms: float) -> None:
        """Add `ms` milliseconds to a stage."""
        setattr(self, stage, getattr(self, stage) + ms)


# Fields of `StageTimes` that are no stages.
NO_STAGES = frozenset({"total", "first_sound", "first_vocoder", "load", "gaps"})


@dataclass(frozen=True)
class PartialResult:
    """Text and sound of a job so far. unit: index as in the result. pcm: [n] float32 at 24 kHz or None."""

    session: str
    unit: int
    text: str = ""
    pcm: np.ndarray | None = None


class FedRows(NamedTuple):
    """Context rows that a unit has fed before its first token, by kind.

    text: control tokens, and text that was inserted since the last unit. image: without the delimiters.
    """

    text: int = 0
    audio: int = 0
    image: int = 0


NO_ROWS = FedRows()


class DecidedUnit(NamedTuple):
    """What a unit's context depends on besides its input: with both, a `ReplayJob` rebuilds it.

    Attributes:
        unit: units counted so far, this one included.
        seed: of the session's random numbers.
        sampled: every sampled token, also one that an interrupt has dropped.
        remembered: tokens that went into the sampler's history.
        listens: whether the engine has forced the unit to listen.
        is_interrupted: an interrupt has ended the text.
        is_silenced: an interrupt has ended the turn after the text.
        close_early: silence stands for the samples that the unit lacked.
        goes_on: a turn or a text of the side lane is open after it, so the next unit cannot be rebuilt without it.
        spoken: speech tokens that the unit has drawn for a turn whose speech goes on with the next unit.
        unvoiced: speech tokens of this turn that have no sound yet.
        drains: `spoken` are of a turn whose text has ended before the unit.
    """

    unit: int
    seed: int
    sampled: Sequence[int]
    remembered: Sequence[int]
    listens: bool = False
    is_interrupted: bool = False
    is_silenced: bool = False
    close_early: bool = False
    goes_on: bool = False
    spoken: Sequence[int] = ()
    unvoiced: Sequence[int] = ()
    drains: bool = False


@dataclass(frozen=True)
class UnitResult:
    """Result of one unit; text and sound are the sums of its partial results.

    Attributes:
        index: units counted so far, this one included.
        pcm: [n] float32 at 24 kHz, None without sound.
        n_tokens: text tokens that are spoken.
        n_speech_tokens: speech tokens drawn.
        context_len: context rows before the unit is closed.
        n_slices: image slices fed.
        n_caught_up: seconds of backlog that were fed before this unit without a decision.
        lag_s: seconds of sound that still wait.
        tokens: every id the unit adds to the conversation, terminator included.
        turn_limit: the turn ends because of `max_turn_tokens`.
        side_texts: spans of the side lane that are complete with this unit; not part of `text`.
        n_side_tokens: tokens of the side lane.
        early: the trial of a unit that might run early; None: it might not.
        is_incomplete: the sound waits for the rest of its second; nothing is decided, and no unit is counted.
        decided: what rebuilds the unit; None without a decision.
    """

    session: str
    index: int
    is_listen: bool
    text: str
    end_of_turn: bool
    pcm: np.ndarray | None = None
    n_tokens: int = 0
    n_speech_tokens: int = 0
    context_len: int = 0
    n_slices: int = 0
    n_caught_up: int = 0
    lag_s: float = 0.0
    tokens: tuple[int, ...] = ()
    turn_limit: bool = False
    side_texts: tuple[str, ...] = ()
    n_side_tokens: int = 0
    rows: FedRows = NO_ROWS
    times: StageTimes = field(default_factory=StageTimes)
    early: EarlyOutcome | None = None
    is_incomplete: bool = False
    decided: DecidedUnit | None = None


@dataclass(frozen=True)
class InsertedText:
    """An inserted text is in the context. n_rows: its context rows."""

    session: str
    n_rows: int


@dataclass(frozen=True)
class Prefilled:
    """The prompt of a turn-based reply is in the context. n_prompt: rows fed for it."""

    session: str
    n_prompt: int


@dataclass(frozen=True)
class ReplyResult:
    """One turn-based reply; text and sound are the sums of its partial results.

    Attributes:
        stopped: "stop" at a terminator, "length" at the token limit, "interrupted" by a request.
        index: replies so far, this one included.
        voice_error: exception that ended the sound early, None if none did.
        n_prompt: context rows fed for it.
        n_prompt_image, n_prompt_sound: of which rows of images and of sound.
        tokens: ids of its text.
    """

    session: str
    text: str
    stopped: StopReason
    index: int = 1
    pcm: np.ndarray | None = None
    voice_error: Exception | None = None
    n_prompt: int = 0
    n_prompt_image: int = 0
    n_prompt_sound: int = 0
    n_speech_tokens: int = 0
    context_len: int = 0
    tokens: tuple[int, ...] = ()
    times: StageTimes = field(default_factory=StageTimes)


@dataclass(frozen=True)
class Failure:
    """A unit or reply that ended without a result; the session goes on."""

    session: str
    unit: int
    error: Exception


@dataclass(frozen=True)
class VoiceState:
    """Half duplex: the user started or stopped speaking."""

    session: str
    is_speaking: bool


@dataclass(frozen=True)
class Generating:
    """Half duplex: the user's turn is over and its reply has started. speech_ms, n_pictures: of the user's turn."""

    session: str
    speech_ms: float
    n_pictures: int = 0


@dataclass(frozen=True)
class Interruption:
    """Half duplex: the user or a request has stopped an answer while it was made or played. No sound of it follows.

    Attributes:
        index: the answer's number, as in its result.
        text: its text so far.
        sound_ms: length of its sound so far.
        heard_ms: of which a player that started with the first sound has played.
    """

    session: str
    index: int
    text: str
    sound_ms: float
    heard_ms: float


Event = (
    PartialResult
    | UnitResult
    | InsertedText
    | Prefilled
    | ReplyResult
    | Failure
    | VoiceState
    | Generating
    | Interruption
)
