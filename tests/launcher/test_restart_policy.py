"""Backoff, giving up and silence, with time that a test makes."""

from hypothesis import given
from hypothesis import strategies as st

from launcher.restart_policy import HealthTimeout, Policy, RestartBackoff, Verdict

POLICY = Policy()


def test_waits_double_up_to_the_most_and_begin_anew_after_health() -> None:
    backoff = RestartBackoff(POLICY)
    backoff.ready(0.0)
    waits = []
    for _ in range(7):
        backoff.ended(-9, 1.0)
        waits.append(backoff.wait_s())
        backoff.ready(1.0)
    assert waits == [1, 2, 4, 8, 16, 30, 30]
    backoff.ended(-9, 1.0 + POLICY.reset_s)
    assert backoff.wait_s() == 1


def test_settings_that_cannot_be_are_not_tried_again() -> None:
    assert RestartBackoff(POLICY).ended(2, 0.0) is Verdict.GIVE_UP


def test_the_same_status_later_is_one_failure_of_three() -> None:
    backoff = RestartBackoff(POLICY)
    assert [backoff.ended(status, 0.0) for status in (1, 2, 1)] == ["restart", "restart", "give up"]


def test_one_that_was_ready_is_never_given_up() -> None:
    backoff = RestartBackoff(POLICY)
    backoff.ended(1, 0.0)
    backoff.ready(0.0)
    assert {backoff.ended(2, 1.0) for _ in range(20)} == {Verdict.RESTART}
    assert backoff.n_failed == 1


@given(lives=st.lists(st.floats(0, 200), min_size=1, max_size=60))
def test_waits_stay_in_bounds_and_fall_only_after_health(lives: list[float]) -> None:
    backoff, now, last = RestartBackoff(POLICY), 0.0, 0.0
    for healthy_s in lives:
        backoff.ready(now)
        begin, now = now, now + healthy_s
        backoff.ended(-11, now)
        wait = backoff.wait_s()
        assert POLICY.first_s <= wait <= POLICY.most_s
        if now - begin >= POLICY.reset_s:
            assert wait == POLICY.first_s, f"after {healthy_s} s of health: expected {POLICY.first_s}, got {wait}"
        else:
            assert wait == min(POLICY.most_s, 2 * last or POLICY.first_s), f"after {last}: got {wait}"
        last, now = wait, now + wait


def test_a_process_is_hung_when_it_was_silent_for_long_enough() -> None:
    health_timeout = HealthTimeout(POLICY)
    told = [health_timeout.asked(False, float(second)) for second in range(100)]
    assert told.index(True) == POLICY.hung_s


def test_an_answer_ends_the_silence() -> None:
    health_timeout = HealthTimeout(POLICY)
    for second in range(59):
        health_timeout.asked(False, float(second))
    assert not health_timeout.asked(True, 59.0)
    assert not health_timeout.asked(False, 60.0), "expected one second of silence, got all of them"


def test_nobody_is_blamed_for_time_in_which_nobody_asked() -> None:
    health_timeout = HealthTimeout(POLICY)
    health_timeout.asked(True, 0.0)
    assert not health_timeout.asked(False, 86_400.0), "expected a launcher that slept to ask again first"
    assert health_timeout.seconds <= POLICY.answer_s + POLICY.serving_poll_s
