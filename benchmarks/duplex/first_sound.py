"""First sound of turns under load: half of the sessions speak, with and without the order of the unit loop, and with
units that are spread over the second or come at random.

Each session repeats a turn of `SPOKEN_UNITS` units and as many units of listening. Sessions begin at different points
of this cycle, so that half of them speak at any time. Does not start engines.
"""

import logging
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from benchmarks.duplex.bench_sessions import SPOKEN_UNITS, TALK, BenchSession, SentUnit, percentiles, place_in_cycle
from benchmarks.duplex.engine import RunningEngine
from benchmarks.duplex.live_sessions import (
    DEADLINE_MS,
    SESSION_SETUP_S,
    LoadGenerator,
    LoadPlan,
    SyntheticMedia,
    drain,
)
from benchmarks.playback import needed_delay
from worker.loop.order.unplayed_sound import PLAYER_S
from worker.loop.results import SOUND_RATE
from worker.unit_phases import UnitPhases

LOG = logging.getLogger(__name__)
SEED = 22  # of random times of units


def measure_first_sound(
    running: RunningEngine, plan: LoadPlan, *, left_s: Callable[[], float], save: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Measure each number of sessions four times: units spread or at random, first sound first or in no order.

    Args:
        left_s: returns the seconds that remain for this part.
        save: called with the result after each row.
    Returns: {rows, left_out, failed}.
    """
    result: dict[str, Any] = {"rows": [], "left_out": [], "failed": []}
    for n, is_spread, is_ordered in product(plan.counts, (True, False), (True, False)):
        what = f"{n} sessions, {'spread' if is_spread else 'random'}, {'ordered' if is_ordered else 'not ordered'}"
        if left_s() < plan.seconds + plan.warm_s + SESSION_SETUP_S * n:
            result["left_out"].append(what)
            continue
        try:
            row = _measure_row(running, plan, n, is_spread=is_spread, is_ordered=is_ordered)
        except Exception as error:
            LOG.exception("measuring %s failed", what)
            result["failed"].append(f"{what}: {type(error).__name__}: {error}"[:300])
            continue
        result["rows"].append(row)
        save(result)
    running.engine.order_first_sound(True).result()
    return result


def offsets(n: int, *, is_spread: bool) -> list[float]:
    """When the units of `n` sessions come, in s after a whole second: as a worker spreads them, or at random."""
    if is_spread:
        phases = UnitPhases(lambda: 0.0)
        return [phases.reserve(str(number)) for number in range(n)]
    return [random.Random(f"{SEED} {number}").random() for number in range(n)]


def _measure_row(
    running: RunningEngine, plan: LoadPlan, n: int, *, is_spread: bool, is_ordered: bool
) -> dict[str, Any]:
    running.engine.order_first_sound(is_ordered).result()
    config = running.engine.config.session.model_copy(update={"force_listen_count": 0, "drain_s": 0})
    sessions: list[BenchSession] = []
    try:
        for number in range(n):
            context = plan.contexts[0] + (plan.contexts[1] - plan.contexts[0]) * number // max(n - 1, 1)
            own = config.model_copy(update={"seed": number})
            sessions.append(BenchSession(running, f"{TALK} {number}", context=context, config=own, seed=number))
        running.wait_idle()
        before = running.compile_counts_since_ready()
        generator = LoadGenerator(
            sessions, SyntheticMedia(plan.n_frames), replace(plan, counts=(n,)), offsets(n, is_spread=is_spread)
        )
        generator.start()
        generator.wait_until(generator.started_at + plan.warm_s + plan.seconds)
        generator.stop()
        drain(sessions)
        late = running.compile_counts_since_ready()
    finally:
        for session in sessions:
            session.close()
    return {
        "sessions": n,
        "units": "spread" if is_spread else "random",
        "order": "first sound first" if is_ordered else "none",
        **figures(generator.measured_units()),
        "late": {name: late[name] - before[name] for name in late},
        "is_overloaded": generator.is_overloaded,
    }


def figures(units: Sequence[SentUnit]) -> dict[str, Any]:
    """Times in ms from when a unit is due: first sounds of turns, first sounds of their later units, and results.

    Delays in ms with which a player of a turn has no gap, and the turns that need more than `PLAYER_S`.
    """
    placed = [(place_in_cycle(unit.session, unit.result.index - 1), unit) for unit in units if unit.result is not None]
    totals = [unit.total_ms for unit in units]
    delays = [turn_delay(turn) for turn in whole_turns(placed)]
    return {
        "n": len(units),
        "n_turns": sum(place == 0 for place, _ in placed),
        "first_sound_ms": percentiles([unit.first_sound_ms for place, unit in placed if place == 0]),
        "later_sound_ms": percentiles([unit.first_sound_ms for place, unit in placed if 0 < place < SPOKEN_UNITS]),
        "listen_ms": percentiles([unit.total_ms for place, unit in placed if place >= SPOKEN_UNITS]),
        "total_ms": percentiles(totals),
        "n_missed": sum(total is None or total > DEADLINE_MS for total in totals),
        "errors": sorted({unit.error for unit in units if unit.error})[:5],
        "playback_delay_ms": percentiles(delays),
        "n_turns_with_gaps": sum(delay > 1e3 * PLAYER_S for delay in delays),
    }


def whole_turns(placed: Sequence[tuple[int, SentUnit]]) -> list[list[SentUnit]]:
    """The units of each turn that was measured from its first to its last unit, in order."""
    by_session: dict[str, list[tuple[int, SentUnit]]] = defaultdict(list)
    for place, unit in sorted(placed, key=lambda one: one[1].due):
        by_session[unit.session].append((place, unit))
    turns = []
    for own in by_session.values():
        for start, (place, _) in enumerate(own):
            turn = own[start : start + SPOKEN_UNITS]
            if place == 0 and [other for other, _ in turn] == list(range(SPOKEN_UNITS)):
                turns.append([unit for _, unit in turn])
    return turns


def turn_delay(turn: Sequence[SentUnit]) -> float:
    """The smallest delay in ms with which a player of the turn has no gap."""
    pieces = [(arrived, n_samples / SOUND_RATE) for unit in turn for arrived, n_samples in unit.pieces]
    return 1e3 * needed_delay(pieces)
