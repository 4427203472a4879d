"""A worker's states: legal transitions, progress and wire names."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.status import LEGAL, START, WIRE_NAMES, State, StateError, Status


class ManualClock:
    """A clock that the test advances."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_starts_in_loading():
    assert Status().state is State.LOADING


def test_times_the_stages_of_a_start():
    clock = ManualClock()
    status = Status(clock)
    for state, seconds in ((State.COMPILING, 3.0), (State.WARMING_UP, 20.0), (State.IDLE, 4.0)):
        clock.now += seconds
        status.move(state)
    expected = {State.LOADING: 3.0, State.COMPILING: 20.0, State.WARMING_UP: 4.0}
    assert status.start_seconds == expected, f"expected {expected}, got {status.start_seconds}"


def test_second_start_resets_times():
    status = Status()
    for state in (State.WARMING_UP, State.IDLE, State.UNLOADED, State.LOADING):
        status.move(state)
    assert status.start_seconds == {}


@given(st.lists(st.sampled_from(list(State)), max_size=12))
def test_refuses_illegal_transitions(steps):
    status = Status()
    for wanted in steps:
        before = status.state
        if wanted in LEGAL[before]:
            status.move(wanted)
            assert status.state is wanted
            continue
        with pytest.raises(StateError, match=f"got {wanted}"):
            status.move(wanted)
        assert status.state is before


def test_every_state_is_reachable():
    reached = {State.LOADING}.union(*LEGAL.values())
    assert reached == set(State)
    assert LEGAL.keys() == WIRE_NAMES.keys() == set(State)
    assert all(State.DRAINING in LEGAL[state] for state in State if state is not State.DRAINING)


def test_only_idle_has_the_wire_name_idle():
    takes = {state for state, name in WIRE_NAMES.items() if name == "idle"}
    assert takes == {State.IDLE}
    assert all(WIRE_NAMES[state] == "loading" for state in START)


def test_idle_and_busy_follow_the_number_of_sessions():
    status = Status()
    status.count_sessions(1)
    assert status.state is State.LOADING, f"expected a start to go on, got {status.state}"
    for state in (State.WARMING_UP, State.IDLE):
        status.move(state)
    seen = []
    for n in (0, 1, 2, 1, 0):
        status.count_sessions(n)
        seen.append(status.state)
    assert seen == [State.IDLE, State.BUSY, State.BUSY, State.BUSY, State.IDLE]
    status.move(State.DRAINING)
    status.count_sessions(0)
    assert status.state is State.DRAINING


def test_progress_belongs_to_its_stage():
    status = Status()
    status.progress("weights", 3, 7)
    assert (status.now.progress.what, status.now.progress.done, status.now.progress.total) == ("weights", 3, 7)
    status.move(State.WARMING_UP)
    assert status.now.progress.what == "", f"expected none yet, got {status.now.progress}"


def test_keeps_the_error_of_a_failure():
    status = Status()
    status.move(State.FAILED, "no such folder")
    assert status.now.error == "no such folder"
