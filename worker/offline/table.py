"""A line for each unit, in columns. Torch-free. Knows outcomes and widths; does not print."""

from collections.abc import Sequence
from dataclasses import fields

from worker.loop.results import SOUND_RATE, Failure, StageTimes
from worker.offline.reply import UnitOutcome

FACTS = ("unit", "decision", "tokens", "codes", "sound_ms", "rows")
STAGES = tuple(field.name for field in fields(StageTimes) if field.name not in ("total", "first_sound"))
TIMES = ("total", *STAGES)  # in ms
MIN_WIDTH = 6
END_OF_TURN = " (end of turn)"


def header() -> str:
    return _line(FACTS, TIMES, "text")


def row(one: UnitOutcome) -> str:
    """A unit's line. Its text is written as Python would, so that nothing in it moves the cursor."""
    event, begin = one.event, [str(one.index), one.decision]
    if isinstance(event, Failure):
        empty = [""] * len(FACTS[len(begin) :])
        return _line([*begin, *empty], [""] * len(TIMES), f"{type(event.error).__name__}: {event.error}")
    counts = (event.n_tokens, event.n_speech_tokens, round(1000 * len(one.pcm) / SOUND_RATE), event.context_len)
    times = [f"{getattr(event.times, name):.1f}" for name in TIMES]
    return _line([*begin, *map(str, counts)], times, repr(event.text) + END_OF_TURN * event.end_of_turn)


def _line(facts: Sequence[str], times: Sequence[str], text: str) -> str:
    left = " ".join(cell.rjust(len(name)) for cell, name in zip(facts, FACTS, strict=True))
    right = " ".join(cell.rjust(max(len(name), MIN_WIDTH)) for cell, name in zip(times, TIMES, strict=True))
    return f"{left} | {right} | {text}"
