"""The outcomes of a conversation's units, their sound on the time line, the transcript. Torch-free.

Contains no file access and no engine.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from worker.loop.results import SOUND_RATE, Failure, UnitResult
from worker.transcript.timeline import sound_start
from worker.transcript.turns import Turn, TurnBuilder


class OfflineState(NamedTuple):
    """A session between two units.

    Attributes:
        is_live: the session has a context.
        turn_open: the model is speaking.
        draining: the text of the turn has ended and its sound has not.
    """

    is_live: bool
    turn_open: bool
    draining: bool

    @property
    def is_speaking(self) -> bool:
        return self.turn_open or self.draining


@dataclass(frozen=True)
class UnitOutcome:
    """The outcome of one unit. index: its number, from 0. before, after: the session's state around it."""

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


def starts(n_samples: Sequence[int], delay_ms: int = 0) -> list[int]:
    """The start of each unit's sound on the time line of the input, in samples at 24 kHz.

    Args:
        n_samples: the length of each unit's sound; a unit without sound takes no time.
        delay_ms: the player's delay before sound that follows silence.
    """
    delay, begins, end = delay_ms * SOUND_RATE // 1000, [], 0
    for second, n in enumerate(n_samples, start=1):
        begins.append(sound_start(second * SOUND_RATE, end, delay))
        end = begins[-1] + n if n else end
    return begins


def sound(outcomes: Sequence[UnitOutcome], delay_ms: int = 0) -> np.ndarray:
    """[n] float32 at 24 kHz: the reply on the time line of the input, to the end of the longer of the two."""
    sounds = [one.pcm for one in outcomes]
    begins = starts([len(pcm) for pcm in sounds], delay_ms)
    ends = [begin + len(pcm) for begin, pcm in zip(begins, sounds, strict=True) if len(pcm)]
    wave = np.zeros(max([len(outcomes) * SOUND_RATE, *ends]), np.float32)
    for begin, pcm in zip(begins, sounds, strict=True):
        wave[begin : begin + len(pcm)] = pcm
    return wave


def turns(outcomes: Sequence[UnitOutcome]) -> list[Turn]:
    """The model's turns."""
    builder = TurnBuilder()
    for one in outcomes:
        if one.before.draining and (one.text or one.after.turn_open):
            # This unit holds the end of the old turn's sound and the first words of a new turn.
            builder.close(one.index)
        text = one.text if one.decision == "SPEAK" else ""
        builder.add(one.index, text, belongs=one.decision == "SPEAK", goes_on=one.after.is_speaking)
    return builder.turns


def transcript(outcomes: Sequence[UnitOutcome], head: dict[str, Any], delay_ms: int = 0) -> dict[str, Any]:
    """`head`, then turns and units; equal for two runs with the same input and seed."""
    begins = starts([len(one.pcm) for one in outcomes], delay_ms)
    units = [_unit(one, begin) for one, begin in zip(outcomes, begins, strict=True)]
    return {**head, "turns": [asdict(turn) for turn in turns(outcomes)], "units": units}


def times(outcomes: Sequence[UnitOutcome]) -> list[dict[str, Any]]:
    """The stage times of each unit with a result, in ms."""
    results = [(one.index, asdict(one.event.times)) for one in outcomes if not isinstance(one.event, Failure)]
    return [
        {"index": index, **{key: ms for key, ms in held.items() if key not in ("load", "gaps")}}
        for index, held in results
    ]


def to_json(document: dict[str, Any]) -> bytes:
    """JSON with one line for each entry, and for each element of a list."""
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
    common: dict[str, Any] = {"index": one.index, "decision": one.decision}
    if isinstance(event, Failure):
        return {**common, "error": f"{type(event.error).__name__}: {event.error}"}
    n_samples = len(one.pcm)
    return {
        **common,
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
