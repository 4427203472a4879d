"""What a session gets back: partial results while a unit runs, one result per unit, errors. Torch-free."""

from dataclasses import dataclass, field

import numpy as np

SOUND_RATE = 24_000
UNIT_MS = 1000.0


@dataclass
class StageTimes:
    """Where a unit's time went, in ms. A stage that served a whole batch counts in full for each of its sessions.

    A stage lasts from where the host set out on it until the host had what came of it. Those that run beside others
    count beside them, so the stages may add up to more than `total`. `see` is only what it took to set out: that
    pictures are there shows in `prefill`.
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
    first_sound: float | None = None  # from arrival to the first sound that left; None without sound

    @property
    def headroom(self) -> float:
        """What is left of the second that a unit may take; below 0 the deadline is missed."""
        return UNIT_MS - self.total


@dataclass(frozen=True)
class PartialResult:
    """Something a job has so far. unit: index as in the result. pcm: [n] float32 at 24 kHz or None."""

    session: str
    unit: int
    text: str = ""
    pcm: np.ndarray | None = None


@dataclass(frozen=True)
class UnitResult:
    """One unit's outcome; text and sound are the sums of its partial results.

    index: units heard so far, this one included. pcm: [n] float32 at 24 kHz, None without sound. n_tokens: text tokens
    that are spoken. n_codes: speech codes. llm_rows: context rows before the unit is closed. n_slices: image slices
    fed. n_caught_up: seconds of backlog that were heard before this one without a decision. lag_s: sound that still
    waits. tokens: every id the unit adds to the conversation, terminator included.
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
    times: StageTimes = field(default_factory=StageTimes)


@dataclass(frozen=True)
class Prefilled:
    """All that a turn-based answer starts from is in the context. n_prompt: rows fed for it."""

    session: str
    n_prompt: int


@dataclass(frozen=True)
class ReplyResult:
    """One turn-based answer; text and sound are the sums of its partial results.

    stopped: why it ended: "stop" by itself, "length" at its limit, "interrupted". index: answers so far, this one
    included. n_prompt: context rows fed for it. tokens: the ids of its text. voice_error: why its sound ended early,
    None if it did not.
    """

    session: str
    text: str
    stopped: str
    index: int = 1
    pcm: np.ndarray | None = None
    voice_error: Exception | None = None
    n_prompt: int = 0
    n_speech_tokens: int = 0
    context_len: int = 0
    tokens: tuple[int, ...] = ()
    times: StageTimes = field(default_factory=StageTimes)


@dataclass(frozen=True)
class Failure:
    """A unit or answer that came to nothing; the session goes on."""

    session: str
    unit: int
    error: Exception


@dataclass(frozen=True)
class VoiceState:
    """Half duplex: the user began to speak, or stopped."""

    session: str
    is_speaking: bool


@dataclass(frozen=True)
class Generating:
    """Half duplex: the user's turn is over and is being answered. speech_ms: its length."""

    session: str
    speech_ms: float


Event = PartialResult | UnitResult | Prefilled | ReplyResult | Failure | VoiceState | Generating
