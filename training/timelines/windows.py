"""Parts of a long conversation as a session's window keeps them: each part is one training sequence.

Serving evicts the oldest units when a unit is closed, and with mode `context` keeps their text in the prompt. Between
two evictions the context only grows. A part therefore holds the prompt of that time, the units that were kept, and the
new ones, which are learned. Kept units are computed anew; in serving their rows remember evicted ones.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from training.timelines.layout import ContextRows, RowLayout
from training.timelines.timeline import TimelineUnit


@dataclass(frozen=True)
class TrainingWindow:
    """Limits of a window, with the defaults of serving.

    Args:
        mode: basic: evict by rows; context: evict by units and keep their text.
        high, low: rows; basic evicts above `high` down to `low`.
        max_units, max_previous: context: units kept, tokens of kept text.
        slack: context: units that a part may have beyond `max_units`. Serving has a new prompt after every unit with
            text; a part for each would compute the kept units again and again.
    """

    mode: Literal["basic", "context"] = "basic"
    high: int = 4000
    low: int = 3500
    max_units: int = 24
    max_previous: int = 500
    slack: int = 12


@dataclass(frozen=True)
class TimelinePart:
    """Units [first, end) after a prompt, of which those from `learned_from` on are learned. previous: kept text."""

    first: int
    learned_from: int
    end: int
    previous: tuple[int, ...] = ()


def split_parts(
    units: Sequence[TimelineUnit], layout: RowLayout, window: TrainingWindow | None = None, n_reference: int = 0
) -> Iterator[TimelinePart]:
    """The parts of a conversation, in order. n_reference: rows of the reference voice in the prompt."""
    window = window or TrainingWindow()
    first = learned_from = 0
    length = len(layout.prompt(n_reference))
    previous: list[int] = []
    for number, unit in enumerate(units):
        length += layout.unit_length(unit)
        if window.mode == "basic":
            if length <= window.high:
                continue
            keep = first
            while keep < number and length > window.low:
                length -= layout.unit_length(units[keep])
                keep += 1
        else:
            if number + 1 - first <= window.max_units + window.slack:
                continue
            keep = number + 1 - window.max_units
        yield TimelinePart(first, learned_from, number + 1, _marked(layout, previous))
        if window.mode == "context":
            previous += [token for gone in units[first:keep] for token in layout.spoken(gone)]
            del previous[: -window.max_previous]
        first, learned_from = keep, number + 1
    if learned_from < len(units):
        yield TimelinePart(first, learned_from, len(units), _marked(layout, previous))


def part_rows(
    units: Sequence[TimelineUnit], part: TimelinePart, layout: RowLayout, n_reference: int = 0
) -> ContextRows:
    """The rows of one part. n_reference: as for `split_parts`."""
    prompt = replace(layout.prompt(n_reference), previous=part.previous)
    return layout.rows(units[part.first : part.end], prompt, first=part.first, learned_from=part.learned_from)


def _marked(layout: RowLayout, previous: Sequence[int]) -> tuple[int, ...]:
    return (*layout.marker, *previous) if previous else ()
