"""The table of an offline run: one line per unit. Torch-free; formats text and does not print."""

from dataclasses import fields

from worker.loop.results import NO_STAGES, SOUND_RATE, Failure, StageTimes
from worker.offline.reply import UnitOutcome
from worker.transcript.table import Columns, quoted

FACTS = Columns(("unit", "decision", "tokens", "codes", "sound_ms", "rows"))
STAGES = tuple(field.name for field in fields(StageTimes) if field.name not in NO_STAGES)
TIMES = Columns(("total", *STAGES), min_width=6)  # in ms


def header() -> str:
    """The names of the columns."""
    return f"{FACTS.line(FACTS.names)} | {TIMES.line(TIMES.names)} | text"


def row(one: UnitOutcome) -> str:
    """The line of a unit."""
    event, facts = one.event, [str(one.index), one.decision]
    if isinstance(event, Failure):
        facts += [""] * (len(FACTS.names) - len(facts))
        times, text = [""] * len(TIMES.names), f"{type(event.error).__name__}: {event.error}"
    else:
        sound_ms = round(1000 * len(one.pcm) / SOUND_RATE)
        facts += map(str, (event.n_tokens, event.n_speech_tokens, sound_ms, event.context_len))
        times = [f"{getattr(event.times, name):.1f}" for name in TIMES.names]
        text = quoted(event.text, ends_turn=event.end_of_turn)
    return f"{FACTS.line(facts)} | {TIMES.line(times)} | {text}"
