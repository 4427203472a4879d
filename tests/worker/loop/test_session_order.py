"""Sessions begin, end and share an engine in the order in which they were asked to, and leave nothing behind."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.worker.engine.failing_regions import broken, of_slot
from tests.worker.loop.engines import (
    ALOUD,
    QUIET,
    assert_told,
    make_config,
    make_parts,
    make_prompt,
    make_sound,
    short_speech,
)
from tests.worker.loop.scripted_engine import PuppetEngine, results
from worker.config.session import WindowConfig
from worker.engine import Engine
from worker.loop import duplex_job
from worker.loop.results import Event, Failure, UnitResult
from worker.loop.session import OrderError

HELLO = "<|speak|>Hello there"
BYE = "<|speak|>Hello<|turn_eos|>"


@pytest.fixture(scope="module")
def built() -> Iterator[PuppetEngine]:
    with short_speech():
        yield PuppetEngine()


@pytest.fixture
def engine(built: PuppetEngine) -> Iterator[PuppetEngine]:
    yield built
    built.clear()


# --- one unit after the other --------------------------------------------------------------------------


@pytest.mark.parametrize("ls_mode", ["explicit", "implicit"])
def test_a_unit_is_closed_before_the_next_one_begins(engine: PuppetEngine, ls_mode: str) -> None:
    """Units that arrive at once: the context is what it is if each waits for the result of the one before."""
    rows, fed = [], []
    for name in ("at once", "in turn"):
        config = QUIET.model_copy(update={"ls_mode": ls_mode})
        session = engine.start(name, config, HELLO, HELLO, HELLO, BYE)
        session.turn_open = True  # who speaks does not catch up
        for number in range(4):
            engine.send(session, number)
            if name == "in turn":
                engine.settle()
        engine.settle()
        told = [event for event in engine.take(name) if isinstance(event, UnitResult)]
        assert [one.index for one in told] == [1, 2, 3, 4], f"results: expected in order, got {told}"
        rows.append(([one.context_len for one in told], [unit.length for unit in session.window.units]))
        fed.append([rows.ids.tolist() for what, _, rows in engine.record(name).fed if what == "prefill"])
    assert rows[0] == rows[1], f"context rows: expected {rows[1]}, got {rows[0]}"
    special = engine.special
    end = [special.chunk_eos, special.unit_end] if ls_mode == "explicit" else [special.unit_end]
    assert fed[0][1][: len(end) + 1] == [*end, special.unit_start], f"second unit: got {fed[0][1]}"
    assert fed[0] == fed[1], "expected the same context"


def test_closing_while_a_unit_runs_harms_nobody(engine: PuppetEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every stage of the unit: its slot comes back empty, a neighbour and the next session never notice."""
    monkeypatch.setattr(duplex_job, "EARLY_SPEECH_TOKENS", 3)  # codes in several steps
    alone = engine.start("alone", ALOUD, *[HELLO] * 3)
    results(engine.run(alone, 1))
    for number in (1, 2):
        engine.send(alone, number)
        engine.settle()
    expected = engine.take("alone")
    engine.sessions.close(alone)
    n_free = engine.duplex.runner.pool.n_free, engine.vocoder.n_free
    for n_steps in range(4):
        names = f"neighbour {n_steps}", f"leaver {n_steps}", f"follower {n_steps}"
        neighbour, leaver = (engine.start(name, ALOUD, *[HELLO] * 3) for name in names[:2])
        results(engine.run(neighbour, 1))
        engine.send(neighbour, 1)
        engine.send(leaver, 1)
        for _ in range(n_steps):
            assert engine.step(), "expected a unit that takes more steps"
        engine.sessions.dispatch()
        engine.sessions.close(leaver)
        with pytest.raises(OrderError):
            engine.sessions.get(names[1])
        engine.settle()
        engine.send(neighbour, 2)
        engine.settle()
        assert_told(f"neighbour of one that left after {n_steps} steps", engine.take(names[0]), expected)
        follower = engine.start(names[2], ALOUD, *[HELLO] * 3)
        assert engine.rows(follower) == follower.window.preserve, "expected a slot with the prompt alone"
        results(engine.run(follower, 1))
        for number in (1, 2):
            engine.send(follower, number)
            engine.settle()
        assert_told(f"follower of one that left after {n_steps} steps", engine.take(names[2]), expected)
        for session in (neighbour, follower):
            engine.sessions.close(session)
    free = engine.duplex.runner.pool.n_free, engine.vocoder.n_free
    assert free == n_free, f"slots free: expected {n_free}, got {free}"


def test_orders_of_a_session_are_taken_in_order() -> None:
    config = make_config()
    events: list[Event] = []
    with Engine(make_parts(config), config) as engine:
        handle = engine.open("a", QUIET, events.append).result(60)
        orders: list[Any] = [handle.prepare(make_prompt()), *[handle.send(make_sound(number)) for number in range(3)]]
        orders += [handle.close(), handle.send(make_sound(9))]
        for order in orders[:-1]:
            order.result(60)
        with pytest.raises(OrderError):
            orders[-1].result(60)
        assert engine.n_free() == config.max_sessions, f"slots free: expected all, got {engine.n_free()}"
        again = engine.open("a", QUIET, events.append).result(60)
        again.prepare(make_prompt()).result(60)
    assert not [event for event in events if isinstance(event, Failure)], f"expected no failures, got {events}"


# --- failures -----------------------------------------------------------------------------------------


def test_a_unit_that_cannot_be_closed_blocks_nothing(engine: PuppetEngine) -> None:
    window = WindowConfig(mode="basic", high_tokens=30, low_tokens=20)
    session = engine.start("a", QUIET.model_copy(update={"window": window}))
    results(engine.run(session, 1))
    with broken(engine.duplex.runner.regions, "llm_evict", of_slot(session.slot), "before"):
        engine.send(session, 1)
        engine.settle()
    result, failure = engine.take("a")
    assert isinstance(result, UnitResult) and isinstance(failure, Failure), f"got {result}, {failure}"
    with pytest.raises(OrderError, match="got new"):
        engine.send(session, 2)
    engine.sessions.prepare(session, make_prompt())
    again = results(engine.run(session, 3))
    assert [one.index for one in again] == [1, 2, 3], f"expected units again, got {again}"


def test_a_unit_that_fails_blocks_nothing(engine: PuppetEngine) -> None:
    session = engine.start("a", QUIET, *[HELLO] * 4)
    for number in range(3):
        engine.send(session, number)
    with broken(engine.duplex.runner.regions, "audio_unit", of_slot(session.slot), "after"):
        engine.step()
    engine.settle()
    kinds = [type(event) for event in engine.take("a") if isinstance(event, UnitResult | Failure)]
    assert kinds == [Failure, UnitResult, UnitResult], f"expected one failure, then two units, got {kinds}"


# --- several ------------------------------------------------------------------------------------------


def test_sessions_side_by_side_are_what_each_is_alone(engine: PuppetEngine) -> None:
    engine.puppet.is_off = True
    seeds = {"one": 1, "two": 2, "three": 3}
    configs = {name: ALOUD.model_copy(update={"seed": seed, "temperature": 1.3}) for name, seed in seeds.items()}
    expected = {}
    for name, config in configs.items():
        session = engine.start(name, config, ref=seeds[name])
        for number in range(3):
            engine.send(session, 10 * seeds[name] + number)
            engine.settle()
        expected[name] = engine.take(name)
        engine.sessions.close(session)
    sessions = {name: engine.start(name, config, ref=seeds[name]) for name, config in configs.items()}
    for number in range(3):
        for name, session in sessions.items():
            engine.send(session, 10 * seeds[name] + number)
        engine.settle()
    for name in seeds:
        assert_told(name, engine.take(name), expected[name])


def test_seeds_that_nobody_gave_differ_and_come_again_with_the_engines() -> None:
    def tokens(engine_seed: int) -> list[list[tuple[int, ...]]]:
        engine = PuppetEngine(make_config(seed=engine_seed))
        engine.puppet.is_off = True
        config = QUIET.model_copy(update={"seed": None, "temperature": 1.5})
        sessions = [engine.start(name, config) for name in ("one", "two")]
        return [[one.tokens for one in results(engine.run(session, 2))] for session in sessions]

    first, again, other = tokens(5), tokens(5), tokens(6_000)
    assert first[0] != first[1], f"two sessions: expected other tokens in each, got twice {first[0]}"
    assert again == first, f"the engine's seed again: expected {first}, got {again}"
    assert other != first, "another seed of the engine: expected other tokens"
