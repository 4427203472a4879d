"""When a unit may run early: the rule on given times."""

from hypothesis import given
from hypothesis import strategies as st

from worker.loop.early.headroom import HISTORY_S, MAX_BUSY_MS, Headroom


def measured(*units: tuple[float, float]) -> Headroom:
    """units: time in ms and clock reading of each."""
    headroom = Headroom()
    for ms, now in units:
        headroom.count_unit(ms, now)
    return headroom


def test_no_trial_before_a_unit_was_measured() -> None:
    assert not Headroom().allows(0.0, 0.0, 1)
    assert measured((10.0, 5.0)).allows(5.5, 0.0, 1)


def test_times_of_the_warm_up_count_until_a_unit_is_measured() -> None:
    """All sessions at once, and one more unit for the trial; the first trial's own time afterwards."""
    headroom = Headroom()
    headroom.expect(lambda n: 0.02 + 0.08 * n)
    assert headroom.allows(0.0, 0.0, 9) and not headroom.allows(0.0, 0.0, 10)
    assert headroom.allows(0.0, MAX_BUSY_MS - 101.0, 1) and not headroom.allows(0.0, MAX_BUSY_MS - 99.0, 1)
    headroom.count_unit(MAX_BUSY_MS, 0.0)
    assert not headroom.allows(0.5, 0.0, 1), "expected the measured unit to count"
    assert headroom.allows(1.0 + HISTORY_S, 0.0, 9), "expected the warm-up to count after a pause"


def test_old_units_are_no_measure() -> None:
    headroom = measured((10.0, 5.0))
    assert headroom.allows(5.0 + HISTORY_S, 0.0, 1)
    assert not headroom.allows(7.0 + HISTORY_S, 0.0, 1)


def test_slowest_unit_of_the_last_seconds_counts() -> None:
    headroom = measured((MAX_BUSY_MS, 3.1), *((10.0, 3.2 + second) for second in range(HISTORY_S)))
    assert not headroom.allows(4.0, 0.0, 1)
    headroom.count_unit(10.0, 4.0 + HISTORY_S)
    assert headroom.allows(5.0 + HISTORY_S, 0.0, 1), "expected the slow unit to be forgotten"


def test_unit_in_flight_for_long_leaves_no_time() -> None:
    headroom = measured((10.0, 0.0))
    assert headroom.allows(1.0, MAX_BUSY_MS - 20.0, 1)
    assert not headroom.allows(1.0, MAX_BUSY_MS, 1)


def test_trials_of_a_second_add_up() -> None:
    headroom, n = measured((100.0, 0.0)), 0
    while headroom.allows(0.5, 0.0, 1):
        headroom.count_trial(90.0, 0.5)
        n += 1
    assert n == 8, f"expected 100 ms of a unit and eight trials of 90 ms to fill {MAX_BUSY_MS} ms, got {n}"
    assert headroom.allows(1.6, 0.0, 1), "expected time again a second later"


@given(st.lists(st.tuples(st.floats(0, 300), st.floats(0, 900), st.booleans()), max_size=60))
def test_a_second_never_holds_more_than_its_share(steps: list[tuple[float, float, bool]]) -> None:
    """Trials that were expected to take as long as they did stay within the share, beside the slowest unit."""
    headroom, now, slowest, spent = measured((1.0, 0.0)), 0.0, 1.0, [(0.0, 0.0)]
    for ms, wait_ms, is_unit in steps:
        now += wait_ms / 1000
        if is_unit:
            headroom.count_unit(ms, now)
            slowest = max(slowest, ms)
        elif headroom.allows(now, 0.0, 1):
            cost = max((ms for _, ms in spent), default=0.0)
            headroom.count_trial(min(ms, cost or 1.0), now)
            spent.append((now, min(ms, cost or 1.0)))
            in_second = sum(ms for end, ms in spent if end > now - 1)
            assert in_second <= MAX_BUSY_MS, f"expected at most {MAX_BUSY_MS} ms of trials in a second, got {in_second}"
