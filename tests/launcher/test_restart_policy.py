"""Restart backoff, giving up, and the health timeout, with times passed in."""

from hypothesis import given
from hypothesis import strategies as st

from launcher.memory_watch import MemoryWatch
from launcher.restart_policy import HealthTimeout, RestartBackoff, RestartPolicy, Verdict
from worker.memory_limit import ROOM

POLICY = RestartPolicy()


def test_wait_doubles_up_to_maximum_and_resets_after_ready_time() -> None:
    backoff = RestartBackoff(POLICY)
    backoff.mark_ready(0.0)
    waits = []
    for _ in range(7):
        backoff.mark_exited(-9, 1.0)
        waits.append(backoff.next_wait_s())
        backoff.mark_ready(1.0)
    assert waits == [1, 2, 4, 8, 16, 30, 30]
    backoff.mark_exited(-9, 1.0 + POLICY.reset_s)
    assert backoff.next_wait_s() == 1


def test_rejected_settings_are_not_retried() -> None:
    assert RestartBackoff(POLICY).mark_exited(2, 0.0) is Verdict.GIVE_UP


def test_usage_status_after_another_failure_is_retried() -> None:
    backoff = RestartBackoff(POLICY)
    assert [backoff.mark_exited(status, 0.0) for status in (1, 2, 1)] == ["restart", "restart", "failing"]
    assert backoff.is_failing


def test_process_that_was_ready_is_never_given_up() -> None:
    backoff = RestartBackoff(POLICY)
    backoff.mark_exited(1, 0.0)
    backoff.mark_ready(0.0)
    assert {backoff.mark_exited(2, 1.0) for _ in range(20)} == {Verdict.RESTART}
    assert backoff.n_failed == 1


@given(ready_times=st.lists(st.floats(0, 200), min_size=1, max_size=60))
def test_wait_stays_in_bounds_and_falls_only_after_ready_time(ready_times: list[float]) -> None:
    backoff, now, last = RestartBackoff(POLICY), 0.0, 0.0
    for ready_s in ready_times:
        backoff.mark_ready(now)
        begin, now = now, now + ready_s
        backoff.mark_exited(-11, now)
        wait = backoff.next_wait_s()
        assert POLICY.initial_wait_s <= wait <= POLICY.max_wait_s
        if now - begin >= POLICY.reset_s:
            assert wait == POLICY.initial_wait_s, (
                f"after {ready_s} s ready: expected {POLICY.initial_wait_s}, got {wait}"
            )
        else:
            assert wait == min(POLICY.max_wait_s, 2 * last or POLICY.initial_wait_s), f"after {last}: got {wait}"
        last, now = wait, now + wait


def test_process_counts_as_hung_after_timeout() -> None:
    health_timeout = HealthTimeout(POLICY)
    hung = [health_timeout.record_probe(False, float(second)) for second in range(100)]
    assert hung.index(True) == POLICY.hang_timeout_s


def test_process_that_starts_has_more_time() -> None:
    health_timeout = HealthTimeout(POLICY)
    hung = [health_timeout.record_probe(False, float(second), is_ready=False) for second in range(1000)]
    assert hung.index(True) == POLICY.start_timeout_s


def test_answer_resets_health_timeout() -> None:
    health_timeout = HealthTimeout(POLICY)
    for second in range(59):
        health_timeout.record_probe(False, float(second))
    assert not health_timeout.record_probe(True, 59.0)
    assert not health_timeout.record_probe(False, 60.0), (
        "expected one second without an answer to count, got all of them"
    )


def test_time_without_probes_does_not_count() -> None:
    health_timeout = HealthTimeout(POLICY)
    health_timeout.record_probe(True, 0.0)
    assert not health_timeout.record_probe(False, 86_400.0), "expected a suspended launcher to probe again first"
    assert health_timeout.seconds <= POLICY.probe_timeout_s + POLICY.ready_poll_s


def test_memory_counts_after_three_readings_above_the_limit() -> None:
    watch = MemoryWatch(100)
    assert [watch.record(n) for n in (500, 500, 90, 101, 500)] == [""] * 5
    assert watch.record(5_000_000_000) == "holds 5.0 GB of memory, expected at most 0.0 GB, and was ended"


def test_without_a_limit_a_process_may_hold_twice_what_it_began_with() -> None:
    watch, most = MemoryWatch(None), 2 * 10**9 + ROOM
    assert [watch.record(n) for n in (10**9, most, most, most, most + 1, most + 1)] == [""] * 6
    assert watch.record(most + 1).startswith("holds 6.3 GB of memory")
