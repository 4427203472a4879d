"""First sound before other work: who waits, for how long, and that waiting changes no result."""

from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.worker.loop.engines import ALOUD, assert_same_events, make_config, short_speech
from tests.worker.loop.scripted_engine import ScriptedEngine
from worker.loop.job import JobPhase, SpeechCall
from worker.loop.order.first_sound import (
    MAX_WAIT_S,
    MIN_MARGIN_S,
    FirstSoundOrder,
    is_urgent,
    latest_start,
)
from worker.loop.order.unplayed_sound import PLAYER_S, UnplayedSound
from worker.loop.results import PartialResult, PlaybackGap

NOW = 100.0
HELLO, LISTEN = "<|speak|>Hello there", "<|listen|>"


@dataclass(eq=False)
class FakeJob:
    """What the order reads of a job."""

    arrived: float
    session: Any
    has_text_left: bool
    calls: list[int] = field(default_factory=list)
    windows: list[int] = field(default_factory=list)
    is_background: bool = False
    is_low_priority: bool = False


@st.composite
def jobs(draw: st.DrawFn) -> list[FakeJob]:
    """Jobs of different sessions; a playback ends up to two seconds from now."""

    def job() -> FakeJob:
        ends = draw(st.none() | st.floats(NOW - 1, NOW + 2))
        session = SimpleNamespace(unplayed=UnplayedSound(ends), reference=draw(st.booleans()))
        text, calls, windows = (draw(st.booleans()) for _ in range(3))
        kind = draw(st.sampled_from(["unit", "reply", "low"]))
        age = draw(st.floats(0, 1))
        return FakeJob(
            NOW - age, session, text, [1] * calls, [1] * windows, kind != "unit", is_low_priority=kind == "low"
        )

    return [job() for _ in range(draw(st.integers(1, 6)))]


@given(jobs(), st.lists(st.floats(0.001, 1), max_size=40), st.booleans())
def test_only_jobs_with_sound_left_wait_and_only_for_a_first_sound(
    given_jobs: list[FakeJob], times: list[float], is_on: bool
) -> None:
    order = FirstSoundOrder(lambda: NOW, is_on=is_on)
    for seconds in times:
        order.count_first_sound(seconds)
    waiting = order.waiting(given_jobs)
    first = [job for job in given_jobs if is_urgent(job, NOW)]
    assert order.first_of(given_jobs) == (first or given_jobs if is_on else given_jobs)
    for job in first:
        assert job.session.unplayed.ends is None or job.session.unplayed.ends <= NOW
    if not (is_on and times and first):
        assert not waiting, f"expected no job to wait, got {waiting}"
        return
    margin = max(MIN_MARGIN_S, 2 * max(times[-32:]))
    assert order.margin_s == margin
    assert not waiting & set(first), "expected a client with nothing to play not to wait"
    for job in waiting:
        left = job.session.unplayed.ends - NOW
        assert left > margin and job.arrived + MAX_WAIT_S > NOW, f"waits with {left} s left, arrived {job.arrived}"
        assert not (job.is_background or job.session.reference)
        ready = latest_start(job, margin) + max(times[-32:])
        assert ready < job.session.unplayed.ends, "expected its sound before the client has played the rest"
    for job in set(given_jobs) - waiting:
        assert job in first or latest_start(job, margin) <= NOW, f"expected {job} to wait"


@given(st.lists(st.tuples(st.floats(0, 2), st.floats(0.02, 1)), min_size=1, max_size=12))
def test_playback_ends_when_all_sound_is_played(sent: list[tuple[float, float]]) -> None:
    """A client that plays at once and goes on at once after a gap; gaps are those of one that begins 200 ms later."""
    unplayed, now, ends, buffer_ends = UnplayedSound(), 5.0, 5.0, 0.0
    for pause, seconds in sent:
        now += pause
        assert unplayed.is_over(now) == (ends <= now)
        buffer_ends = now + PLAYER_S if unplayed.is_silent else buffer_ends
        gap = unplayed.add(seconds, now, arrived=now - 0.5)
        late = now - buffer_ends
        assert (None if late <= 0 else (late, "client" if late > 0.5 else "engine")) == gap or abs(late - 0.5) < 1e-6
        buffer_ends = max(buffer_ends, now) + seconds
        ends = max(ends, now) + seconds
        assert not unplayed.is_silent and unplayed.ends == pytest.approx(ends)
    unplayed.begin_turn()
    assert unplayed.is_silent


@given(
    st.lists(st.floats(0, 0.2), min_size=1, max_size=60),
    st.floats(MIN_MARGIN_S, 3),
    st.booleans(),
)
def test_no_job_starves(steps: list[float], left: float, stays: bool) -> None:
    """However long others wait for their first sound, a job waits neither past its buffer nor for half a second."""
    now = [NOW]
    order = FirstSoundOrder(lambda: now[0])
    order.count_first_sound(0.01)
    job = FakeJob(NOW, SimpleNamespace(unplayed=UnplayedSound(NOW + left), reference=False), True)
    other = FakeJob(NOW, SimpleNamespace(unplayed=UnplayedSound(), reference=False), stays)
    for step in steps:
        now[0] += step
        is_late = now[0] >= NOW + min(MAX_WAIT_S, left - MIN_MARGIN_S)
        assert (job in order.waiting([job, other])) == (stays and not is_late)


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(1, 5)), min_size=2, max_size=8), st.floats(0.005, 0.04))
def test_sound_that_waits_for_others_leaves_no_gap(sessions: list[tuple[float, int]], step: float) -> None:
    """Turns of some seconds, each beginning at its own time, on an engine whose iterations all take as long."""
    n_steps, now = 4, [0.0]
    order = FirstSoundOrder(lambda: now[0])
    order.count_first_sound((n_steps + 1) * step)
    units = deque(sorted((begin + second, number) for number, (begin, n) in enumerate(sessions) for second in range(n)))
    playback, gaps, left = [UnplayedSound() for _ in sessions], list[PlaybackGap](), dict[FakeJob, int]()
    while units or left:
        while units and units[0][0] <= now[0]:
            arrived, number = units.popleft()
            left[FakeJob(arrived, SimpleNamespace(unplayed=playback[number], reference=False), True)] = n_steps
        working = set(left) - order.waiting(left)
        now[0] += step
        for job in working:
            left[job] -= 1
            if not left[job]:
                del left[job]
                gap = job.session.unplayed.add(1.0, now[0], job.arrived)
                gaps += [] if gap is None else [gap]
    assert not [gap for gap in gaps if gap.cause == "order"], f"expected no gap because of the order, got {gaps}"


# --- in the loop ----------------------------------------------------------------------------------


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def scripted(clock: Clock, *, is_on: bool) -> ScriptedEngine:
    return ScriptedEngine(make_config(first_sound_first=is_on), clock=clock)


def run_beside(engine: ScriptedEngine) -> dict[str, list[Any]]:
    """A session in its third unit of a turn, beside one that begins a turn and one that listens."""
    talks = engine.start("talks", ALOUD, HELLO, HELLO, HELLO, HELLO)
    for number in range(2):
        engine.send(talks, number)
        engine.settle()
    assert talks.unplayed.ends is not None and talks.unplayed.ends > MIN_MARGIN_S, f"got {talks.unplayed}"
    begins, listens = engine.start("begins", ALOUD, HELLO), engine.start("listens", ALOUD, LISTEN)
    for session in (talks, begins, listens):
        engine.send(session, 2)
    engine.settle()
    return {name: engine.take(name) for name in ("talks", "begins", "listens")}


def test_order_changes_no_result() -> None:
    with short_speech():
        on, off = (run_beside(scripted(Clock(), is_on=is_on)) for is_on in (True, False))
    for name, expected in off.items():
        assert_same_events(name, on[name], expected)
        assert len(on[name]) == len(expected)


def test_turn_with_sound_left_waits_for_the_first_sound_of_another_and_no_longer() -> None:
    with short_speech():
        clock = Clock()
        engine = scripted(clock, is_on=True)
        talks = engine.start("talks", ALOUD, HELLO, HELLO, HELLO, HELLO)
        for number in range(3):
            engine.send(talks, number)
            engine.settle()
        assert talks.unplayed.ends > 2 * MIN_MARGIN_S, f"expected sound that is left, got {talks.unplayed}"
        begins = engine.start("begins", ALOUD, HELLO)
        engine.send(talks, 3)
        engine.send(begins, 3)
        engine.take("begins")
        engine.step()
        first, other = sorted(engine.loop.jobs, key=lambda job: job.session is talks)
        assert (first.phase, other.phase) == (JobPhase.DECODE, JobPhase.START), (first.phase, other.phase)
        assert not engine.loop.has_unfed_units, "expected no unit to be prefilled before an early one"
        is_sound = lambda event: isinstance(event, PartialResult) and event.pcm is not None  # noqa: E731
        while not any(map(is_sound, engine.events["begins"])):
            assert other.phase is JobPhase.START, f"expected the unit to wait for the first sound, got {other.phase}"
            assert engine.step()
        assert other.phase is not JobPhase.START or engine.step()
        assert other.phase is not JobPhase.START, "expected the unit to go on after the first sound"


def test_speech_is_drawn_up_to_its_first_piece_while_only_jobs_that_wait_have_text() -> None:
    engine, drawn = scripted(Clock(), is_on=True), []
    set_drawn = SpeechCall.set_drawn
    talks = engine.start("talks", ALOUD, HELLO, HELLO)
    engine.send(talks, 0)
    engine.settle()
    begins = engine.start("begins", ALOUD, HELLO)
    engine.send(talks, 1)
    engine.send(begins, 1)

    def record(call: SpeechCall, n: int) -> None:
        set_drawn(call, n)
        if any(job.session is begins and call in job.calls for job in engine.loop.jobs):
            waits = any(job.session is talks and job.phase is JobPhase.START for job in engine.loop.jobs)
            drawn.append((n, waits))

    with mock.patch.object(SpeechCall, "set_drawn", record):
        engine.settle()
    (n_first,) = begins.config.sound_ramp
    assert drawn[:2] == [(1, True), (n_first, True)], f"expected one call of {n_first} tokens, got {drawn}"


def test_times_of_a_warm_up_are_forgotten() -> None:
    with short_speech():
        engine = scripted(Clock(), is_on=True)
        mark = engine.sessions.mark()
        engine.send(engine.start("a", ALOUD, HELLO), 0)
        engine.settle()
        assert engine.loop._order.margin_s is not None
        engine.sessions.forget_since(mark)
        assert engine.loop._order.margin_s is None


def test_due_turn_goes_on_beside_a_first_sound() -> None:
    with short_speech():
        clock = Clock()
        engine = scripted(clock, is_on=True)
        talks = engine.start("talks", ALOUD, HELLO, HELLO, HELLO, HELLO)
        for number in range(3):
            engine.send(talks, number)
            engine.settle()
        begins = engine.start("begins", ALOUD, HELLO)
        engine.send(talks, 3)
        engine.send(begins, 3)
        engine.step()
        [job] = [job for job in engine.loop.jobs if job.session is talks]
        assert job.phase is JobPhase.START
        clock.now = talks.unplayed.ends - MIN_MARGIN_S
        engine.step()
        assert job.phase is JobPhase.DECODE, f"expected the unit to go on in time, got {job.phase}"
        engine.settle()
