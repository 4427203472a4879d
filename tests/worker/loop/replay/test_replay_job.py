"""A context rebuilt from inputs and decisions equals the one that it replaces, with greedy and with sampled tokens."""

from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from hypothesis import example, settings
from hypothesis import given as given_by
from hypothesis.strategies import booleans, builds, lists

from tests.worker.loop.engines import (
    ALOUD,
    OFF,
    QUIET,
    Director,
    SmallEngine,
    assert_mirrors,
    make_prompt,
    make_unit,
    short_speech,
)
from worker.config.session import SessionConfig, WindowConfig
from worker.loop.observer import Observer
from worker.loop.results import DecidedUnit, Failure, UnitResult
from worker.loop.session import Session, TextInput, UnitInput

N_BEFORE, N_AFTER = 8, 2
WINDOW = WindowConfig(mode="basic", high_tokens=140, low_tokens=90)
LIMITS = {"force_listen_count": 2, "max_turn_tokens": 5}
GREEDY = QUIET.model_copy(update={"decode_mode": "greedy", "seed": None, "window": WINDOW, **LIMITS})
SPEAKING = ALOUD.model_copy(update={"window": WINDOW})

CONFIGS = {"greedy": GREEDY, "speaking": SPEAKING}


@pytest.fixture(scope="module")
def engine() -> Iterator[SmallEngine]:
    with short_speech():
        yield SmallEngine(observer=Director())


def given(number: int) -> UnitInput:
    """A unit; every third one has a picture, and the fifth one comes in two pieces."""
    return make_unit(number, pictures=(number,) if number % 3 == 1 else (), force_listen=number == 6)


def play(engine: SmallEngine, session: Session, numbers: range) -> list[UnitResult]:
    """The results of units, some of them interrupted while or after their text is decoded."""
    results = []
    for number in numbers:
        engine.sessions.unit(session, given(number))
        if number == 4:
            engine.sessions.break_speech(session)
        if number == 7:
            for _ in range(3):
                engine.step()
            engine.sessions.break_speech(session)
        engine.settle()
        [*_, result] = engine.take(session.id)
        assert isinstance(result, UnitResult), f"unit {number}: expected a result, got {result}"
        results.append(result)
        session.request_interrupt(False)
    return results


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_replayed_context_goes_on_as_the_undisturbed_one(engine: SmallEngine, config: SessionConfig) -> None:
    """Rows, window, turn, sampler and the tokens of later units; another session is not affected."""
    prompt = make_prompt(speaker=1 if config.generate_audio else None)
    first = engine.open("one", config, prompt)
    results = play(engine, first, range(N_BEFORE))
    assert any(not result.is_listen for result in results), "expected a unit that speaks"

    again = engine.sessions.open("one again", config, engine.events["one again"].append)
    engine.sessions.prepare(again, prompt)
    for number, result in enumerate(results):
        unit = given(number)
        unit.decided = result.decided
        engine.sessions.unit(again, unit)
        engine.settle()
        [event] = engine.take("one again")
        assert isinstance(event, UnitResult) and event.pcm is None, f"expected no sound and one event, got {event}"
        assert (event.index, event.tokens) == (result.index, result.tokens)
    held = [(one.window.length, one.n_units, one.turn_open, one.n_turn_tokens, one.seed) for one in (first, again)]
    assert held[0] == held[1], f"expected {held[0]}, got {held[1]}"
    assert_mirrors(engine.unit_steps, again.slot)
    keys = [engine.unit_steps.save(one.slot)[0] for one in (first, again)]
    assert keys[0].shape == keys[1].shape and torch.allclose(*keys, atol=1e-4), (keys[0] - keys[1]).abs().max()

    again.id = "one"  # the tokens of `Director` depend on it
    later = [play_one(engine, one, number) for one in (first, again) for number in range(N_BEFORE, N_BEFORE + N_AFTER)]
    assert later[:N_AFTER] == later[N_AFTER:], f"expected {later[:N_AFTER]}, got {later[N_AFTER:]}"
    again.id = "one again"
    engine.close_all()


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_context_is_rebuilt_from_any_unit_whose_turn_begins_there(engine: SmallEngine, config: SessionConfig) -> None:
    """The units before it are not kept any more."""
    prompt = make_prompt(speaker=1 if config.generate_audio else None)
    results = play(engine, engine.open("two", config, prompt), range(N_BEFORE))
    goes_on = [result.decided is not None and result.decided.goes_on for result in results]
    assert any(goes_on) and not all(goes_on), f"expected turns that begin and end, got {goes_on}"
    for first in [number + 1 for number, one in enumerate(goes_on[:-1]) if not one][-3:]:
        again = engine.sessions.open("two again", config, engine.events["two again"].append)
        engine.sessions.prepare(again, prompt)
        for number in range(first, N_BEFORE):
            unit = given(number)
            unit.decided = results[number].decided
            engine.sessions.unit(again, unit)
            engine.settle()
            [event] = engine.take("two again")
            assert isinstance(event, UnitResult), f"unit {number}: expected a result, got {event}"
            assert (event.index, event.tokens) == (results[number].index, results[number].tokens)
        engine.sessions.close(again)
        engine.settle()
    engine.close_all()


class Given(NamedTuple):
    """One unit of a conversation that is rebuilt. is_cut: an interrupt ends its text. is_piece: it fills no second."""

    has_picture: bool = False
    listens: bool = False
    is_cut: bool = False
    is_piece: bool = False

    def input(self, number: int) -> UnitInput:
        pictures = (number,) if self.has_picture else ()
        return make_unit(number, 800 if self.is_piece else 16_000, pictures=pictures, force_listen=self.listens)


@settings(max_examples=4, deadline=None, derandomize=True, database=None)
@given_by(
    units=lists(builds(Given, booleans(), booleans(), booleans(), booleans()), min_size=5, max_size=12),
    evicts=booleans(),
)
@example(units=[Given()] * 12, evicts=False)
@example(units=[Given(has_picture=number % 3 == 1, is_piece=number == 4) for number in range(10)], evicts=True)
@example(units=[*[Given()] * 4, Given(has_picture=True, is_piece=True)], evicts=False)
def test_units_rebuilt_together_equal_those_rebuilt_one_by_one(
    engine: SmallEngine, units: list[Given], evicts: bool
) -> None:
    """Results, rows, window, sampler and later tokens; rows of several units share a prefill."""
    config = GREEDY.model_copy(update={"window": WINDOW if evicts else OFF})
    live = engine.open("three", config)
    results = []
    for number, unit in enumerate(units):
        engine.sessions.unit(live, unit.input(number))
        engine.sessions.break_speech(live, unit.is_cut)
        engine.settle()
        [*_, result] = engine.take("three")
        assert isinstance(result, UnitResult), f"unit {number}: expected a result, got {result}"
        results.append(result)
        live.request_interrupt(False)
    engine.sessions.close(live)

    rebuilt, n_calls = [], []
    for is_together in (False, True):
        again = engine.open("three", config)
        inputs = [unit.input(number) for number, unit in enumerate(units)]
        with mock.patch.object(engine.unit_steps, "feed", wraps=engine.unit_steps.feed) as feed:
            for unit, result in zip(inputs, results, strict=True):
                unit.decided = result.decided or DecidedUnit(1, 0, (), ())
                engine.sessions.unit(again, unit)
                if not is_together:
                    engine.settle()
            engine.settle()
        n_calls.append(feed.call_count)
        events = engine.take("three")
        seen = [(one.index, one.tokens, one.context_len) for one in events if isinstance(one, UnitResult)]
        expected = [(one.index, one.tokens, one.context_len) for one in results]
        assert seen == expected, f"together: {is_together}, expected {expected}, got {seen}"
        assert_mirrors(engine.unit_steps, again.slot)
        keys = engine.unit_steps.save(again.slot)[0]
        later = play_one(engine, again, len(units))
        rebuilt.append((keys, engine.unit_steps.counters(again.slot)._replace(tail=None), later))
        engine.sessions.close(again)
    (keys, *others), (keys_together, *others_together) = rebuilt
    assert others == others_together, f"expected {others}, got {others_together}"
    assert keys.shape == keys_together.shape and torch.allclose(keys, keys_together, atol=1e-4)
    if not evicts and not any(unit.has_picture for unit in units):
        assert 2 * n_calls[1] <= n_calls[0], f"expected at most half of {n_calls[0]} prefills, got {n_calls[1]}"
    engine.close_all()


def test_rows_that_wait_are_fed_before_a_text_and_after_a_unit_that_fails(engine: SmallEngine) -> None:
    config = GREEDY.model_copy(update={"window": OFF})
    live = engine.open("four", config)
    results = [engine.run_unit(live, number) for number in range(3)]
    engine.sessions.close(live)
    held = []
    for is_together in (False, True):
        again = engine.open("four", config)
        for number, result in enumerate(results):
            decided = result.decided if number < 2 else result.decided._replace(sampled=(10**6,))
            engine.send(again, number, decided=decided)
            if not is_together:
                engine.settle()
        engine.sessions.insert_text(again, TextInput(tuple(engine.sessions.text_ids("user", "Hello.")), 0.0))
        engine.settle()
        kinds = [type(event).__name__ for event in engine.take("four")]
        assert kinds == ["UnitResult", "UnitResult", "Failure", "InsertedText"], kinds
        held.append(engine.unit_steps.save(again.slot)[0])
        engine.sessions.close(again)
    assert held[0].shape == held[1].shape and torch.allclose(*held, atol=1e-4), (held[0].shape, held[1].shape)
    engine.close_all()


class Script(Observer):
    """Unit 0 speaks and ends its turn, units 1 and 2 only listen, and a turn begins with unit 3."""

    def token_sampled(self, session: str, job: Any, token: int) -> int:
        unit, number, ids = job.session.n_decided, len(job.samples), job.language.special
        if number == 0:
            return ids.listen if unit in (1, 2) else ids.speak
        return {2: ids.turn_eos, 3: ids.chunk_eos}.get(number, token) if unit == 0 else token


def test_the_speech_of_a_turn_goes_on_after_a_rebuilt_unit() -> None:
    """No sound is lost: neither that of a turn whose text has ended nor that of one which goes on."""
    with short_speech():
        engine = SmallEngine(observer=Script())
        config = ALOUD.model_copy(update={"drain_s": 2.0, "window": OFF})
        prompt = make_prompt(speaker=1)
        live = engine.open("five", config, prompt)
        results = [engine.run_unit(live, number) for number in range(6)]
        decided = [one.decided for one in results]
        kinds = [(one.drains, one.goes_on) for one in decided if one.spoken]
        assert kinds == [(False, False), (True, False), *[(False, True)] * 3], kinds
        engine.sessions.close(live)
        for n_before in (1, 2, 3, 4, 5):
            again = engine.open("five", config, prompt)
            for number, one in enumerate(decided[:n_before]):
                is_old = number < n_before - 1 and not decided[n_before - 1].drains
                one = one._replace(spoken=(), unvoiced=(), drains=False) if is_old else one
                engine.run_unit(again, number, decided=one)
            later = [engine.run_unit(again, number) for number in range(n_before, 6)]
            seen, expected = map(sounds_of, (later, results[n_before:]))
            assert seen == expected, f"rebuilt from {n_before} units: expected {expected}, got {seen}"
            assert_mirrors(engine.unit_steps, again.slot)
            engine.sessions.close(again)
        bad = engine.open("six", config, prompt)
        event = engine.run_unit(bad, 0, decided=decided[0]._replace(spoken=(10**6,)))
        assert isinstance(event, Failure) and "decided.spoken" in str(event.error), event
        engine.close_all()


def sounds_of(results: list[UnitResult]) -> list[tuple[bool, str, bool, int, int]]:
    """Decision, text, end of the turn, speech tokens and samples of each unit."""
    lengths = [0 if one.pcm is None else len(one.pcm) for one in results]
    return [
        (one.is_listen, one.text, one.end_of_turn, one.n_speech_tokens, n)
        for one, n in zip(results, lengths, strict=True)
    ]


def play_one(engine: SmallEngine, session: Session, number: int) -> tuple[int, tuple[int, ...], str]:
    engine.sessions.unit(session, given(number))
    engine.settle()
    result = [event for name in ("one", "one again", "three") for event in engine.take(name)][-1]
    assert isinstance(result, UnitResult), result
    return result.index, result.tokens, result.text


@pytest.mark.parametrize("sampled", [(), (-1,), (10**6,), (5,) * 40])
def test_tokens_of_no_unit_are_refused(engine: SmallEngine, sampled: tuple[int, ...]) -> None:
    session = engine.open("one", QUIET)
    decided = engine.run_unit(session, 0).decided
    event = engine.run_unit(session, 1, decided=decided._replace(sampled=sampled, unit=2))
    assert isinstance(event, Failure) and "decided.sampled" in str(event.error), event
    piece = engine.run_unit(session, 1, 800, decided=decided._replace(sampled=(), unit=1))
    assert isinstance(piece, UnitResult) and piece.is_incomplete, f"expected a piece to need no tokens, got {piece}"
    assert isinstance(engine.run_unit(session, 2), UnitResult), "expected the session to go on"
    engine.close_all()
