import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.doors.realtime.turns.unit_timer import GRACE_S, TimerState, UnitTimer, send_at

OWED = TimerState(is_answering=True, spoke_at=None, is_idle=True)
QUIET = TimerState(is_answering=False, spoke_at=None, is_idle=True)


def test_nothing_runs_before_the_first_sound() -> None:
    assert UnitTimer().fill_at(OWED, 0.0) is None


def test_missing_sound_is_silence_while_an_answer_is_owed() -> None:
    timer = UnitTimer()
    timer.record_sound(10.0)
    assert timer.fill_at(OWED, 10.0) == pytest.approx(11.0 + GRACE_S)
    timer.record_unit(11.3, is_filled=True)
    assert timer.fill_at(OWED, 11.3) == pytest.approx(12.0), "expected one unit a second from now on"
    timer.record_unit(12.0, is_filled=True)
    assert timer.fill_at(OWED, 12.0) == pytest.approx(13.0)


def test_the_clock_pauses_when_nothing_is_owed() -> None:
    timer = UnitTimer()
    timer.record_sound(0.0)
    at = timer.fill_at(QUIET, 0.0)
    assert at == pytest.approx(1.3) and timer.fill_at(QUIET, 1.3) is None and timer.is_paused
    timer.record_sound(50.0)
    assert not timer.is_paused


def test_the_model_may_answer_for_ten_seconds_after_the_user_spoke() -> None:
    timer = UnitTimer()
    timer.record_sound(0.0)
    now, n_units = 0.0, 0
    while (at := timer.fill_at(TimerState(False, 0.5, True), now)) is not None and n_units < 100:
        now = at
        if timer.fill_at(TimerState(False, 0.5, True), now) is not None:
            timer.record_unit(now, is_filled=True)
            n_units += 1
    assert 9 <= n_units <= 10 and timer.is_paused


def test_a_unit_in_flight_is_waited_for() -> None:
    timer = UnitTimer()
    timer.record_sound(0.0)
    assert timer.fill_at(TimerState(True, None, is_idle=False), 5.0) is None


@given(st.lists(st.floats(0.0, 0.25), min_size=1, max_size=50))
def test_sound_at_its_pace_is_never_filled(jitter: list[float]) -> None:
    timer = UnitTimer()
    timer.record_sound(0.0)
    for second, late in enumerate(jitter, start=1):
        now = second + late
        at = timer.fill_at(OWED, now)
        assert at is not None and at > now - 0.001
        timer.record_sound(now)
        timer.record_unit(now, is_filled=False)


def test_a_client_never_holds_more_than_a_second_of_sound() -> None:
    assert send_at(100.0, 1000.0, 100.2) == 100.2
    assert send_at(100.0, 3000.0, 100.2) == 102.0
