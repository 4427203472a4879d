"""When the model speaks, in units: starts, talking over the person, stops, alerts and false alarms.

Unit u takes the sound of second [u, u + 1); its decision follows, and what it says is heard from u + 1 on. Times are
seconds from the beginning of the session, `speaks` has one entry for each unit. A sentence that ends at `end` is
complete in unit `heard_in(end)`.
"""

import math
from collections.abc import Sequence

from training.timelines.stage import NOTICE_S, heard_in


def first_heard(start: float) -> int:
    """The first unit with sound from `start` on."""
    return math.floor(start + 1e-9)


def start_delay(speaks: Sequence[bool], start: float, end: float) -> int | None:
    """Units from the one in which a sentence is complete to the first that speaks; None: none does.

    Negative: the model begins before the sentence is complete.
    """
    first = next((unit for unit in range(first_heard(start), len(speaks)) if speaks[unit]), None)
    return None if first is None else first - heard_in(end)


def starts_in_time(speaks: Sequence[bool], start: float, end: float) -> bool:
    """Whether the model begins in the unit in which the sentence is complete or in the next one."""
    return start_delay(speaks, start, end) in (0, 1)


def speaks_over(speaks: Sequence[bool], start: float, end: float) -> bool:
    """Whether the model speaks after hearing a part of the sentence and before the sentence is complete."""
    return any(speaks[first_heard(start) : heard_in(end)])


def stops_in_time(
    speaks: Sequence[bool], ends: Sequence[bool], start: float, end: float, until: int, *, is_stop: bool
) -> bool:
    """Whether an interrupted model is silent within a unit.

    A request to stop counts once it is complete; the model is silent from the next unit on, up to `until`. Anything
    else counts after 0.3 s: the turn is over in that unit or the next is silent, and the model stays silent while the
    sentence lasts. The answer may follow at once.

    Args:
        ends: units in which a turn ends.
        until: unit up to which a request to stop is met by silence.
    """
    if is_stop:
        return not any(speaks[heard_in(end) + 1 : until])
    noticed, complete = heard_in(min(end, start + NOTICE_S)), heard_in(end)
    is_over = any(ends[unit] or not speaks[unit] for unit in range(first_heard(start), noticed + 1))
    return (is_over or not any(speaks[noticed + 1 : noticed + 2])) and not any(speaks[noticed + 1 : complete])


def alert_delay(speaks: Sequence[bool], shown: int, until: int) -> int | None:
    """Units from the first picture of an event to the first unit that speaks before `until`; None: none does."""
    return next((unit - shown for unit in range(shown, min(until, len(speaks))) if speaks[unit]), None)


def onsets(speaks: Sequence[bool]) -> list[int]:
    """The units in which the model begins to speak."""
    return [unit for unit, now in enumerate(speaks) if now and not (unit and speaks[unit - 1])]
