"""Commands and units of a session run in order, sessions do not affect each other, and closing frees every slot."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.worker.engine.failing_regions import broken, of_slot
from tests.worker.loop.engines import (
    ALOUD,
    QUIET,
    assert_same_events,
    make_config,
    make_parts,
    make_prompt,
    make_sound,
    short_speech,
)
from tests.worker.loop.scripted_engine import ScriptedEngine, results
from worker.config.session import WindowConfig
from worker.engine import Engine
from worker.loop.results import Event, Failure, UnitResult
from worker.loop.session import OrderError

HELLO = "<|speak|>Hello there"
BYE = "<|speak|>Hello<|turn_eos|>"


@pytest.fixture(scope="module")
def built() -> Iterator[ScriptedEngine]:
    with short_speech():
        yield ScriptedEngine()


@pytest.fixture
def engine(built: ScriptedEngine) -> Iterator[ScriptedEngine]:
    yield built
    built.clear()


# --- order --------------------------------------------------------------------------


@pytest.mark.parametrize("ls_mode", ["explicit", "implicit"])
def test_unit_is_closed_before_the_next_one_begins(engine: ScriptedEngine, ls_mode: str) -> None:
    """Units that are queued at once give the same context as units that are sent one by one."""
    rows, fed = [], []
    for name in ("at once", "one by one"):
        config = QUIET.model_copy(update={"ls_mode": ls_mode})
        session = engine.start(name, config, HELLO, HELLO, HELLO, BYE)
        session.turn_open = True  # an open turn takes one unit at a time
        for number in range(4):
            engine.send(session, number)
            if name == "one by one":
                engine.settle()
        engine.settle()
        units = [event for event in engine.take(name) if isinstance(event, UnitResult)]
        assert [one.index for one in units] == [1, 2, 3, 4], f"results: expected in order, got {units}"
        rows.append(([one.context_len for one in units], [unit.length for unit in session.window.units]))
        fed.append([rows.ids.tolist() for kind, _, rows in engine.record(name).fed if kind == "prefill"])
    assert rows[0] == rows[1], f"context rows: expected {rows[1]}, got {rows[0]}"
    special = engine.special
    end = [special.chunk_eos, special.unit_end] if ls_mode == "explicit" else [special.unit_end]
    assert fed[0][1][: len(end) + 1] == [*end, special.unit_start], f"second unit: got {fed[0][1]}"
    assert fed[0] == fed[1], "expected the same context"


def test_closing_while_a_unit_runs_affects_no_other_session(engine: ScriptedEngine) -> None:
    """Closing in any iteration frees an empty slot; a neighbour and the next session give the same results."""
    config = ALOUD.model_copy(update={"sound_ramp": (3,)})  # speech tokens are drawn in several iterations
    alone = engine.start("alone", config, *[HELLO] * 3)
    results(engine.run(alone, 1))
    for number in (1, 2):
        engine.send(alone, number)
        engine.settle()
    expected = engine.take("alone")
    engine.sessions.close(alone)
    n_free = engine.unit_steps.n_free, engine.vocoder.n_free
    for n_steps in range(4):
        names = f"neighbour {n_steps}", f"leaver {n_steps}", f"follower {n_steps}"
        neighbour, leaver = (engine.start(name, config, *[HELLO] * 3) for name in names[:2])
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
        assert_same_events(f"neighbour of a session closed after {n_steps} steps", engine.take(names[0]), expected)
        follower = engine.start(names[2], config, *[HELLO] * 3)
        assert engine.rows(follower) == follower.window.preserve, "expected a slot with the prompt alone"
        results(engine.run(follower, 1))
        for number in (1, 2):
            engine.send(follower, number)
            engine.settle()
        assert_same_events(f"follower of a session closed after {n_steps} steps", engine.take(names[2]), expected)
        for session in (neighbour, follower):
            engine.sessions.close(session)
    free = engine.unit_steps.n_free, engine.vocoder.n_free
    assert free == n_free, f"slots free: expected {n_free}, got {free}"


def test_commands_of_a_session_run_in_order() -> None:
    config = make_config()
    events: list[Event] = []
    with Engine(make_parts(config), config) as engine:
        handle = engine.open("a", QUIET, events.append).result(60)
        commands: list[Any] = [handle.prepare(make_prompt()), *[handle.send(make_sound(number)) for number in range(3)]]
        commands += [handle.close(), handle.send(make_sound(9))]
        for command in commands[:-1]:
            command.result(60)
        with pytest.raises(OrderError):
            commands[-1].result(60)
        assert engine.n_free() == config.max_sessions, f"slots free: expected all, got {engine.n_free()}"
        again = engine.open("a", QUIET, events.append).result(60)
        again.prepare(make_prompt()).result(60)
    assert not [event for event in events if isinstance(event, Failure)], f"expected no failures, got {events}"


# --- failures -----------------------------------------------------------------------------------------


def test_failed_close_resets_the_session(engine: ScriptedEngine) -> None:
    window = WindowConfig(mode="basic", high_tokens=30, low_tokens=20)
    session = engine.start("a", QUIET.model_copy(update={"window": window}))
    results(engine.run(session, 1))
    with broken(engine.unit_steps.regions, "llm_evict", of_slot(session.slot), "before"):
        engine.send(session, 1)
        engine.settle()
    result, failure = engine.take("a")
    assert isinstance(result, UnitResult) and isinstance(failure, Failure), f"got {result}, {failure}"
    with pytest.raises(OrderError, match="got new"):
        engine.send(session, 2)
    engine.sessions.prepare(session, make_prompt())
    again = results(engine.run(session, 3))
    assert [one.index for one in again] == [1, 2, 3], f"expected units again, got {again}"


def test_failed_unit_does_not_block_the_next_ones(engine: ScriptedEngine) -> None:
    session = engine.start("a", QUIET, *[HELLO] * 4)
    for number in range(3):
        engine.send(session, number)
    with broken(engine.unit_steps.regions, "audio_unit", of_slot(session.slot), "after"):
        engine.step()
    engine.settle()
    kinds = [type(event) for event in engine.take("a") if isinstance(event, UnitResult | Failure)]
    assert kinds == [Failure, UnitResult, UnitResult], f"expected one failure, then two units, got {kinds}"


# --- several ------------------------------------------------------------------------------------------


def test_sessions_in_one_batch_equal_sessions_alone(engine: ScriptedEngine) -> None:
    engine.script.is_off = True
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
        assert_same_events(name, engine.take(name), expected[name])


def test_default_seeds_differ_by_session_and_repeat_with_the_engine_seed() -> None:
    def tokens(engine_seed: int) -> list[list[tuple[int, ...]]]:
        engine = ScriptedEngine(make_config(seed=engine_seed))
        engine.script.is_off = True
        config = QUIET.model_copy(update={"seed": None, "temperature": 1.5})
        sessions = [engine.start(name, config) for name in ("one", "two")]
        return [[one.tokens for one in results(engine.run(session, 2))] for session in sessions]

    first, again, other = tokens(5), tokens(5), tokens(6_000)
    assert first[0] != first[1], f"two sessions: expected other tokens in each, got twice {first[0]}"
    assert again == first, f"the engine's seed again: expected {first}, got {again}"
    assert other != first, "another seed of the engine: expected other tokens"
