"""What a conversation leaves behind: an outcome for each unit, its sound on the time line, a transcript. Torch-free.

Knows results and sample counts. Does not know files nor engines.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from worker.loop.results import SOUND_RATE, Failure, UnitResult

# A player waits so long before it starts: a turn's first sound is shorter than its second, and would break off.
PLAYER_DELAY_MS = 200


class OfflineState(NamedTuple):
    """A session between two units. turn_open: the model is speaking. draining: its speech goes on without text."""

    is_live: bool
    turn_open: bool
    draining: bool

    @property
    def is_speaking(self) -> bool:
        return self.turn_open or self.draining


@dataclass(frozen=True)
class UnitOutcome:
    """What came of one unit. index: the second that was heard, from 0. before, after: the session around it."""

    index: int
    event: UnitResult | Failure
    before: OfflineState
    after: OfflineState

    @property
    def decision(self) -> str:
        if isinstance(self.event, Failure):
            return "FAILED"
        return "LISTEN" if self.event.is_listen else "SPEAK"

    @property
    def text(self) -> str:
        return "" if isinstance(self.event, Failure) else self.event.text

    @property
    def pcm(self) -> np.ndarray:
        """[n] float32 at 24 kHz; n is 0 without sound."""
        pcm = None if isinstance(self.event, Failure) else self.event.pcm
        return np.zeros(0, np.float32) if pcm is None else pcm


@dataclass
class TranscriptTurn:
    """What was said in one go. start, end: its first and its last unit."""

    start: int
    end: int
    text: str


def starts(n_samples: Sequence[int], delay_ms: int = 0) -> list[int]:
    """Where each unit's sound begins on the time line of what was heard, in samples at 24 kHz.

    Unit k has been heard at second k + 1, so its sound is there then: it follows gaplessly on sound that still plays,
    or begins `delay_ms` later.

    Args: n_samples: of each unit's sound; one without any has no place of its own.
    """
    delay, begins, end = delay_ms * SOUND_RATE // 1000, [], 0
    for second, n in enumerate(n_samples, start=1):
        ready = second * SOUND_RATE
        begins.append(end if end >= ready else ready + delay)
        end = begins[-1] + n if n else end
    return begins


def sound(outcomes: Sequence[UnitOutcome], delay_ms: int = 0) -> np.ndarray:
    """[n] float32 at 24 kHz: what a listener hears from the first unit on, silence included, to the end of both."""
    pieces = [one.pcm for one in outcomes]
    begins = starts([len(piece) for piece in pieces], delay_ms)
    ends = [begin + len(piece) for begin, piece in zip(begins, pieces, strict=True) if len(piece)]
    wave = np.zeros(max([len(outcomes) * SOUND_RATE, *ends]), np.float32)
    for begin, piece in zip(begins, pieces, strict=True):
        wave[begin : begin + len(piece)] = piece
    return wave


def turns(outcomes: Sequence[UnitOutcome]) -> list[TranscriptTurn]:
    """What was said, turn by turn."""
    found: list[TranscriptTurn] = []
    current: TranscriptTurn | None = None
    for one in outcomes:
        speaks = one.decision == "SPEAK"
        if current is not None and one.before.draining and (one.text or one.after.turn_open):
            # The last of the old turn's sound, and the first words of a new one.
            current.end, current = one.index, None
        if current is None and speaks:
            current = TranscriptTurn(one.index, one.index, "")
            found.append(current)
        if current is not None and speaks:
            current.text += one.text
            current.end = one.index
        if not one.after.is_speaking:
            current = None
    return found


def transcript(outcomes: Sequence[UnitOutcome], head: dict[str, Any], delay_ms: int = 0) -> dict[str, Any]:
    """`head`, then turns and units: nothing that differs between two runs alike."""
    begins = starts([len(one.pcm) for one in outcomes], delay_ms)
    units = [_unit(one, begin) for one, begin in zip(outcomes, begins, strict=True)]
    return {**head, "turns": [asdict(turn) for turn in turns(outcomes)], "units": units}


def times(outcomes: Sequence[UnitOutcome]) -> list[dict[str, Any]]:
    """Stage times in ms of each unit that came to a result."""
    return [{"index": one.index, **asdict(one.event.times)} for one in outcomes if not isinstance(one.event, Failure)]


def to_json(document: dict[str, Any]) -> bytes:
    """A line for each entry, and for each element of a list."""
    entries = []
    for key, value in document.items():
        if isinstance(value, list) and value:
            inner = ",\n".join(f"  {_dumps(element)}" for element in value)
            entries.append(f" {_dumps(key)}: [\n{inner}\n ]")
        else:
            entries.append(f" {_dumps(key)}: {_dumps(value)}")
    return ("{\n" + ",\n".join(entries) + "\n}\n").encode()


def _unit(one: UnitOutcome, begin: int) -> dict[str, Any]:
    event = one.event
    told: dict[str, Any] = {"index": one.index, "decision": one.decision}
    if isinstance(event, Failure):
        return {**told, "error": f"{type(event.error).__name__}: {event.error}"}
    n_samples = len(one.pcm)
    return {
        **told,
        "text": event.text,
        "end_of_turn": event.end_of_turn,
        "n_tokens": event.n_tokens,
        "n_codes": event.n_speech_tokens,
        "n_samples": n_samples,
        "sound_start": begin if n_samples else None,
        "llm_rows": event.context_len,
        "tokens": list(event.tokens),
    }


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
