"""Calls that are spaced while many jobs are in flight: when each begins, and the results of a loop that does so."""

from typing import Any
from unittest import mock

from tests.worker.loop.engines import ALOUD, assert_same_events, make_config, short_speech
from tests.worker.loop.scripted_engine import ScriptedEngine
from worker.loop import sound_stage, unit_loop
from worker.loop.order import gathering
from worker.loop.order.gathering import ENOUGH, LOADED_JOBS, Gathering

SPACING_S = 0.05
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
