"""Calls that are spaced while many jobs are in flight: when each begins, and the results of a loop that does so."""

from typing import Any
from unittest import mock

from models.graphs.shape_table import ShapeTable
from tests.worker.loop.engines import ALOUD, QUIET, assert_same_events, make_config, short_speech
from tests.worker.loop.scripted_engine import ScriptedEngine
from worker.chat.reply_job import ReplyJob
from worker.loop import sound_stage, unit_loop
from worker.loop.batch_runner import BatchRunner
from worker.loop.duplex_job import DuplexJob
from worker.loop.job import JobPhase
from worker.loop.observer import Observer
from worker.loop.order import gathering
from worker.loop.order.gathering import CROWDED_JOBS, CROWDED_SPACING_S, ENOUGH, LOADED_JOBS, Gathering, whole_batch
from worker.loop.prompt.inserted_text import TextJob
from worker.loop.replay.replay_job import ReplayJob

SPACING_S = 0.05
KINDS = (DuplexJob, ReplayJob, ReplyJob, TextJob)
SPEAK = "<|speak|>Hello there"


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_calls_are_spaced_under_load() -> None:
    clock = Clock()
    calls = Gathering(clock, SPACING_S)
    loaded, light = LOADED_JOBS, LOADED_JOBS - 1
    assert calls.is_due(1, loaded), "expected the first call at once"
    assert not calls.is_due(ENOUGH - 1, loaded), "expected a call for few jobs to wait"
    assert calls.is_due(1, light), "expected no wait with few jobs in flight"
    clock.now += SPACING_S / 2
    assert not calls.is_due(1, loaded)
    assert calls.is_due(ENOUGH, loaded), "expected a call for enough jobs at once"
    clock.now += 0.99 * SPACING_S
    assert not calls.is_due(1, loaded), "expected the spacing to begin with the latest call"
    clock.now += 0.02 * SPACING_S
    assert calls.is_due(1, loaded)


def test_calls_wait_for_more_jobs_in_a_crowd() -> None:
    clock = Clock()
    calls = Gathering(clock, SPACING_S)
    assert calls.is_due(1, CROWDED_JOBS), "expected the first call at once"
    clock.now += 0.99 * CROWDED_SPACING_S
    assert not calls.is_due(2 * ENOUGH - 1, CROWDED_JOBS), "expected a call for fewer than twice as many jobs to wait"
    assert calls.is_due(2 * ENOUGH, CROWDED_JOBS)
    clock.now += 0.99 * CROWDED_SPACING_S
    assert not calls.is_due(1, CROWDED_JOBS)
    assert calls.is_due(1, CROWDED_JOBS - 1), "expected the shorter spacing with fewer jobs in flight"


def test_only_units_count_as_in_flight() -> None:
    batch = BatchRunner(mock.Mock(), mock.Mock(), Observer(), Clock())
    units = [mock.Mock(spec=kind, gathers=kind.gathers, is_background=kind.is_background) for kind in KINDS]
    for unit in units:
        batch.take_over(unit)
    assert batch.n_gathering == 1, f"expected one of {KINDS}, got {batch.n_gathering}"


def test_a_call_takes_the_first_jobs_without_much_padding() -> None:
    shapes = ShapeTable(batch=(1, 2, 4, 8, 16))
    for n, expected in ((1, 1), (5, 4), (7, 7), (11, 8), (14, 14), (40, 16)):
        got = whole_batch(range(n), shapes)
        assert got == list(range(expected)), f"{n} jobs: expected the first {expected}, got {got}"


class TickingClock:
    """A clock that goes on by 2 ms with each reading."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.002
        return self.now


def run_staggered() -> tuple[dict[str, list[Any]], int, int]:
    """Three sessions speak; their units arrive some iterations apart. Returns: events, prefills and vocoder calls."""
    engine = ScriptedEngine(make_config(), clock=TickingClock())
    with (
        mock.patch.object(engine.unit_steps, "feed", wraps=engine.unit_steps.feed) as feed,
        mock.patch.object(engine.vocoder, "start", wraps=engine.vocoder.start) as start,
    ):
        sessions = {name: engine.start(name, ALOUD, SPEAK, SPEAK) for name in "abc"}
        feed.reset_mock()
        for number in range(2):
            for session in sessions.values():
                engine.send(session, number)
                engine.step()
            engine.settle()
        return {name: engine.take(name) for name in sessions}, feed.call_count, start.call_count


def test_results_are_the_same_with_fewer_calls() -> None:
    with short_speech():
        expected, prefills, starts = run_staggered()
        spaced = (
            mock.patch.object(unit_loop, "PREFILL_SPACING_S", 0.3),
            mock.patch.object(sound_stage, "SPACING_S", 0.3),
        )
        with mock.patch.multiple(gathering, LOADED_JOBS=2, ENOUGH=3), spaced[0], spaced[1]:
            events, fewer_prefills, fewer_starts = run_staggered()
    for name, own in expected.items():
        assert_same_events(name, events[name], own)
    assert fewer_prefills < prefills, f"expected fewer prefills than {prefills}, got {fewer_prefills}"
    assert fewer_starts < starts, f"expected fewer calls of the vocoder than {starts}, got {fewer_starts}"


def test_units_that_are_held_hold_back_nothing_else() -> None:
    clock = Clock()
    with short_speech(), mock.patch.multiple(gathering, LOADED_JOBS=2, ENOUGH=2):
        engine = ScriptedEngine(make_config(), clock=clock)
        talks = engine.start("talks", ALOUD, SPEAK, SPEAK)
        engine.send(talks, 0)
        engine.settle()
        assert talks.unplayed.ends > clock.now, "expected a client with sound left"
        engine.send(talks, 1)
        engine.step()
        own = engine.loop.jobs[0]
        listens, third = (engine.start(name, ALOUD, "<|listen|>") for name in ("listens", "third"))
        engine.send(listens, 0)
        assert engine.loop._prefills.is_due(1, 2), "expected the latest prefill to be long ago"
        before = own.phase, len(own.samples)
        engine.step()
        held = engine.loop.jobs[1]
        assert held.phase is JobPhase.START, f"expected a unit that waits for others, got {held.phase}"
        assert (own.phase, len(own.samples)) != before, "expected the unit with text to go on"
        assert not engine.loop.has_unfed_units, "expected no unit to be prefilled now"
        engine.send(third, 0)
        engine.step()
        assert held.phase is not JobPhase.START, "expected two units to be prefilled together"
        engine.settle()
        assert engine.take("listens") and engine.take("third")


def test_a_unit_before_the_first_iteration_is_not_held() -> None:
    engine = ScriptedEngine(make_config(), clock=Clock())
    session = engine.start("a", QUIET, "<|listen|>")
    engine.send(session, 0)
    with mock.patch.object(engine.loop, "run"):
        engine.step()
    assert engine.loop.has_unfed_units, f"expected a unit to prefill, got {engine.loop.jobs}"
    engine.settle()


def test_held_units_can_be_closed_and_replays_are_not_held() -> None:
    with mock.patch.multiple(gathering, LOADED_JOBS=1, ENOUGH=5):
        engine = ScriptedEngine(make_config(), clock=Clock())
        first, second = (engine.start(name, QUIET, "<|listen|>") for name in "ab")
        engine.send(first, 0)
        engine.settle()
        engine.send(second, 0)
        for _ in range(3):
            assert engine.step(), "expected the unit to be held"
        assert [job.phase for job in engine.loop.jobs] == [JobPhase.START]
        engine.close_all()
        assert not engine.loop.jobs and not engine.step(), "expected no unit after the close"
    assert (DuplexJob.gathers, ReplayJob.gathers) == (True, False)
