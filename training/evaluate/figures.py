"""Figures of played cases: counts with their 95 % intervals, and one record of each scored act."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from training.evaluate.acts import Act, Appear, Happened, Idle, Played, Say
from training.evaluate.answers import is_right, spoken_words
from training.evaluate.timing import (
    alert_delay,
    first_heard,
    onsets,
    speaks_over,
    start_delay,
    starts_in_time,
    stops_in_time,
)

Z = 1.96  # of a 95 % interval
ALERT_UNITS = 2
UNITS_OF_TEN_MINUTES = 600
MAX_LOOP_WORDS, LOOP_REPEATS = 6, 4  # the grammar's songs repeat a syllable three times
SAME_REPLIES = 5
RESAMPLES = 1000


@dataclass(frozen=True)
class Measured:
    """A figure. low, high: its 95 % interval. n: what it was counted over."""

    value: float
    low: float
    high: float
    n: int


def share(outcomes: Iterable[bool]) -> Measured | None:
    """The share of true outcomes with Wilson's interval; None without outcomes."""
    given = list(outcomes)
    n, k = len(given), sum(given)
    if not n:
        return None
    p, width = k / n, Z * Z / n
    middle = (p + width / 2) / (1 + width)
    half = Z / (1 + width) * math.sqrt(p * (1 - p) / n + width / (4 * n))
    return Measured(p, max(0.0, middle - half), min(1.0, middle + half), n)


def rate(count: int, units: int, per: int = UNITS_OF_TEN_MINUTES) -> Measured | None:
    """Events per `per` units, with the exact interval of a Poisson count; None without units. n: the units."""
    if not units:
        return None
    low = _poisson_mean(count - 1, 0.975) if count else 0.0
    return Measured(count * per / units, low * per / units, _poisson_mean(count, 0.025) * per / units, units)


def statistic(values: Sequence[float], of: Callable[[np.ndarray], float]) -> Measured | None:
    """A statistic of values, such as a percentile, with its interval over resampled values; None without values."""
    if not values:
        return None
    given, rng = np.array(values), np.random.default_rng(0)
    drawn = [of(rng.choice(given, len(given))) for _ in range(RESAMPLES)]
    return Measured(of(given), float(np.quantile(drawn, 0.025)), float(np.quantile(drawn, 0.975)), len(given))


def figures_of(played: Sequence[Played]) -> dict[str, Measured | None]:
    """The figures of all cases but long conversations, by name; None: not measured."""
    requests = [one for one in played if one.case.part == "requests"]
    scenes = [one for one in played if one.case.part == "scenes"]
    watches = [one for one in played if one.case.part == "watch"]
    usual = [one for one in requests if one.case.group == "training voices"] + scenes
    turns = [(one, done) for one in usual for _, done in said_in(one) if done is not None and _reply(done.act)]
    alarms, units = false_alarms(watches)
    return {
        **{
            f"answers, {group}": share(_answers([one for one in requests if one.case.group == group]))
            for group in ("training voices", "unseen voice", "15 dB noise")
        },
        "scenes": share(_answers(scenes)),
        "watch, in time": share(alerts(watches)),
        "watch, false alarms": rate(alarms, units),
        "starts in time": share(starts_in_time(one.speaks, done.start, done.end) for one, done in turns),
        "speaks over the user": share(speaks_over(one.speaks, done.start, done.end) for one, done in turns),
        "silent in time": share(stops(one for one in played if one.case.part == "interruptions")),
    }


def figures_of_conversation(played: Played) -> dict[str, Measured | None]:
    """Times of units, late units and loops of a long conversation."""
    spoken = [unit.ms for unit in played.units if not unit.listens]
    heard = [unit.ms for unit in played.units if unit.listens]

    def p95(values: np.ndarray) -> float:
        return float(np.percentile(values, 95))

    n = len(played.units)
    late = sum(unit.is_late for unit in played.units)
    found = n_loops([played.text(first, until) for first, until in turns_of(played)])
    return {
        "SPEAK unit, p95": statistic(spoken, p95),
        "LISTEN unit, p95": statistic(heard, p95),
        "late units": rate(late, n, n),
        "loops": rate(found, n, n),
    }


def said_in(played: Played) -> list[tuple[Say, Happened | None]]:
    """The sentences of a case, each with how it went; None: the session ended before."""
    done = {id(one.act): one for one in played.happened}
    return [(act, done.get(id(act))) for act in played.case.acts if isinstance(act, Say)]


def turns_of(played: Played) -> list[tuple[int, int]]:
    """The units [first, until) of each stretch of speech."""
    speaks = [*played.speaks, False]
    return [(first, speaks.index(False, first)) for first in onsets(played.speaks)]


def reply_to(played: Played, done: Happened) -> str:
    """What the model says from hearing a sentence, or seeing an event, up to the next act."""
    return played.text(first_heard(done.start), done.until)


def alerts(played: Iterable[Played]) -> list[bool]:
    """For each event: whether the model names it, beginning within two units of the first picture."""
    outcomes = []
    for one in played:
        done = {id(happened.act): happened for happened in one.happened}
        for act in one.case.acts:
            if isinstance(act, Appear):
                happened = done.get(id(act))
                outcomes.append(happened is not None and _is_alert(one, act, happened))
    return outcomes


def false_alarms(played: Iterable[Played]) -> tuple[int, int]:
    """How often the model speaks without an event while it watches, and the units of watching.

    A model that does not cease to speak counts once in each picture's time.
    """
    count = units = 0
    for one in played:
        for done in one.happened:
            if isinstance(done.act, Idle) and done.act.watching:
                speaks = one.speaks[int(done.start) : done.until]
                count, units = count + len(onsets(speaks)), units + len(speaks)
    return count, units


def stops(played: Iterable[Played]) -> list[bool]:
    """For each interruption whether the model is silent in time. One that does not find it speaking is a failure."""
    outcomes = []
    for one in played:
        for act, done in said_in(one):
            if act.after:
                is_stop = act.skill == "stop"
                outcomes.append(
                    done is not None
                    and done.reached
                    and stops_in_time(one.speaks, one.ends, done.start, done.end, done.until, is_stop=is_stop)
                )
    return outcomes


def n_loops(replies: Sequence[str]) -> int:
    """Replies that repeat one to six words four times in a row, and runs of five equal replies."""
    spoken = [spoken_words(reply) for reply in replies]
    n_same = sum(
        len(set(spoken[at : at + SAME_REPLIES])) == 1 for at in range(0, len(spoken) - SAME_REPLIES + 1, SAME_REPLIES)
    )
    return sum(map(_repeats, spoken)) + n_same


def records_of(played: Iterable[Played]) -> list[dict[str, Any]]:
    """One record of each sentence and event: what was said and shown, what was answered, and whether it is right."""
    rows: list[dict[str, Any]] = []
    for one in played:
        for done in one.happened:
            act = done.act
            row: dict[str, Any] = {"case": one.case.name, "group": one.case.group}
            if isinstance(act, Say):
                row |= {"skill": act.skill, "said": act.text, "start": done.start, "end": done.end}
                row |= {
                    "after": act.after,
                    "reached": done.reached,
                    "delay": start_delay(one.speaks, done.start, done.end),
                }
            elif isinstance(act, Appear):
                row |= {"skill": "watch_alert", "shown": act.target.words, "unit": int(done.start)}
                row["delay"] = alert_delay(one.speaks, int(done.start), done.until)
            else:
                continue
            reply = reply_to(one, done)
            row |= {"expected": act.reply, "reply": reply, "right": _is_right(act, reply)}
            rows.append(row)
        if one.error:
            rows.append({"case": one.case.name, "group": one.case.group, "error": one.error})
    return rows


def outcomes_by_skill(played: Iterable[Played]) -> dict[str, str]:
    """Right answers of all requests and questions by skill."""
    right, n = Counter[str](), Counter[str]()
    for one in played:
        if one.case.part in ("requests", "scenes"):
            for act, done in said_in(one):
                n[act.skill] += 1
                right[act.skill] += done is not None and _is_right(act, reply_to(one, done))
    return {skill: f"{right[skill]} of {n[skill]}" for skill in sorted(n)}


def _answers(played: Iterable[Played]) -> list[bool]:
    return [done is not None and _is_right(act, reply_to(one, done)) for one in played for act, done in said_in(one)]


def _is_right(act: Say | Appear, reply: str) -> bool:
    if isinstance(act, Appear):
        return is_right("watch_alert", "", act.reply, reply)
    return is_right(act.skill, act.text, act.reply, reply)


def _is_alert(played: Played, act: Appear, done: Happened) -> bool:
    delay = alert_delay(played.speaks, int(done.start), done.until)
    return delay is not None and delay <= ALERT_UNITS and _is_right(act, reply_to(played, done))


def _reply(act: Act) -> str:
    return act.reply if isinstance(act, Say) else ""


def _repeats(spoken: tuple[str, ...]) -> bool:
    return any(
        spoken[at : at + size] * LOOP_REPEATS == spoken[at : at + size * LOOP_REPEATS]
        for size in range(1, MAX_LOOP_WORDS + 1)
        for at in range(len(spoken) - size * LOOP_REPEATS + 1)
    )


def _poisson_mean(count: int, below: float) -> float:
    """The mean for which at most `count` events have this probability."""
    low, high = 0.0, 10.0 + 4 * (count + 1)
    for _ in range(60):
        mean = (low + high) / 2
        term = total = math.exp(-mean)
        for k in range(1, count + 1):
            term *= mean / k
            total += term
        low, high = (mean, high) if total > below else (low, mean)
    return (low + high) / 2
