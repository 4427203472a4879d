"""Places of sessions in the second: evenly spread, whatever comes and goes."""

from itertools import pairwise
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from worker.config.service import Config
from worker.loop.results import StageTimes, UnitResult
from worker.service import Service
from worker.serving import worker_settings
from worker.unit_phases import UnitPhases


class Clock:
    def __init__(self) -> None:
        self.now = 1000.25

    def __call__(self) -> float:
        return self.now


def gaps_of(places: list[float]) -> list[float]:
    """Distances between neighbours on the circle of one second."""
    ordered = sorted(place % 1 for place in places)
    return [right - left for left, right in pairwise([*ordered, ordered[0] + 1])]


@given(st.lists(st.floats(0, 10), min_size=1, max_size=40))
def test_sessions_that_follow_are_spread_evenly(pauses: list[float]) -> None:
    """Whenever they come: no gap is more than twice as wide as another, and 2^n sessions are equally far apart."""
    clock = Clock()
    phases, places = UnitPhases(clock), []
    for number, pause in enumerate(pauses):
        clock.now += pause
        delay = phases.reserve(str(number))
        assert 0 <= delay < 1
        places.append(clock.now + delay)
        widths = gaps_of(places)
        assert max(widths) <= 2 * min(widths) + 0.01, f"{number + 1} sessions: got gaps of {widths}"
        if len(places) in (2, 4, 8, 16, 32):
            assert max(widths) - min(widths) < 0.01, f"{number + 1} sessions: got gaps of {widths}"


@given(
    st.lists(st.tuples(st.sampled_from(["come", "leave", "drift"]), st.integers(0, 7), st.floats(0, 3)), max_size=40)
)
def test_a_new_session_is_in_the_middle_of_the_widest_gap(steps: list[tuple[str, int, float]]) -> None:
    """Also beside sessions that ignore their place, and not beside those that have left."""
    clock, live = Clock(), {}
    phases = UnitPhases(clock)
    for what, number, pause in steps:
        clock.now += pause
        name = str(number)
        if what == "leave":
            phases.leave(name)
            live.pop(name, None)
        elif what == "drift" and name in live:
            phases.count_unit(name, clock.now)
            live[name] = clock.now
        elif what == "come":
            others = [place for other, place in live.items() if other != name]
            delay = phases.reserve(name)
            live[name] = place = clock.now + delay
            if not others:
                assert delay == 0
                continue
            nearest = min(min((place - other) % 1, (other - place) % 1) for other in others)
            assert nearest >= max(gaps_of(others)) / 2 - 0.001, f"{nearest} from its neighbour among {others}"


def test_pieces_of_units_count_for_nothing() -> None:
    """Their load would hide that of the units, and their times say nothing about the unit's edge."""
    service, loads = Service(worker_settings(Config())), []
    service.loaded = SimpleNamespace(admission=SimpleNamespace(record=lambda load, spoke: loads.append(load)))
    times = StageTimes(load=5.0)
    service.count_unit(UnitResult("a", 0, True, "", False, times=times, is_incomplete=True), 0.25)
    service.count_unit(UnitResult("a", 1, True, "", False, times=times, tokens=(1,)), 0.5)
    assert loads == [5.0] and service._phases._phases == {"a": 0.5}
