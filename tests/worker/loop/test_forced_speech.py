"""Units that must speak, turns with a limit, units that are closed early."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from models.errors import SettingsError
from models.sampling.text import SamplerState, sample_text
from tests.worker.loop.engines import (
    ALOUD,
    SmallEngine,
    assert_mirrors,
    assert_same_events,
    make_sound,
    short_speech,
)
from tests.worker.loop.engines import (
    QUIET as NARROW,
)
from tests.worker.loop.scripted_engine import ScriptedEngine, results
from worker.assembly.parts import token_sets
from worker.config.session import SessionConfig
from worker.loop.command_queue import CommandQueue
from worker.loop.prompt.system_prompt import Adjustment
from worker.loop.results import UnitResult
from worker.loop.session import Session, UnitInput
from worker.loop.session_handle import ImageCutter, SessionHandle

HELLO = "<|speak|>one two three four"
QUIET = NARROW.model_copy(update={"max_new_speak_tokens_per_chunk": 20})
FREE = QUIET.model_copy(update={"top_k": 0, "top_p": 1.0})
HOT = 50.0  # a temperature at which any token is chosen


@pytest.fixture(scope="module")
def built() -> Iterator[ScriptedEngine]:
    with short_speech():
        yield ScriptedEngine()


@pytest.fixture
def engine(built: ScriptedEngine) -> Iterator[ScriptedEngine]:
    yield built
    built.clear()


def given(config: SessionConfig, **settings: Any) -> SessionConfig:
    return config.model_copy(update=settings)


def run_unit(engine: SmallEngine, session: Session, *sent: Any, **options: Any) -> UnitResult:
    result = engine.run_unit(session, *sent, **options)
    assert isinstance(result, UnitResult), result
    return result


# --- force_speak -------------------------------------------------------------------------------------


@pytest.mark.parametrize("compat", ["fixed", "reference"])
@pytest.mark.parametrize("mode", ["sampling", "greedy"])
def test_speaks_whatever_the_model_decides(engine: ScriptedEngine, compat: str, mode: str) -> None:
    engine.script.is_off = True
    special = engine.special
    # Without the force this rule makes every unit of a fixed session listen.
    config = given(QUIET, compat=compat, decode_mode=mode, listen_top_k=2**31 - 1)
    session = engine.start("a", config)
    plain = run_unit(engine, session, 0).tokens[0]
    assert (plain == special.listen) is (compat == "fixed"), f"expected to listen without the force, got {plain}"
    forced = [run_unit(engine, session, number, force_speak=True).tokens[0] for number in range(1, 4)]
    assert forced == [special.speak] * 3, f"expected to speak three times, got {forced}"
    after = run_unit(engine, session, 4).tokens[0]
    assert after != special.speak, "expected the model's own choice again"
    assert_mirrors(engine.unit_steps, session.slot)


def test_speaks_in_the_first_units(engine: ScriptedEngine) -> None:
    session = engine.start("a", given(QUIET, force_listen_count=5), HELLO + "<|turn_eos|>", HELLO)
    spoken, guarded = run_unit(engine, session, 0, force_speak=True), run_unit(engine, session, 1)
    assert (spoken.is_listen, spoken.text, guarded.is_listen) == (False, "one two three four", True)


def test_speaks_although_units_wait(engine: ScriptedEngine) -> None:
    """A session with a backlog listens until it has caught up; a unit that must speak does not wait for that."""
    session = engine.start("a", QUIET, HELLO + "<|turn_eos|>")
    engine.send(session, 0, force_speak=True)
    for number in range(1, 3):
        engine.send(session, number)
    engine.settle()
    heard = [event.is_listen for event in engine.take("a") if isinstance(event, UnitResult)]
    assert heard == [False, True, True], f"expected the forced unit alone to speak, got {heard}"


def test_equals_a_unit_in_which_the_model_chose_to_speak(engine: ScriptedEngine) -> None:
    """Events, counters, sampler state and context; the other settings are such that any token may be chosen."""
    engine.script.is_off = True
    session = start_hot(engine, "probe")
    run_unit(engine, session, 0)
    logits = engine.record("probe").logits[0]
    seed = seed_that_speaks(engine, session, logits)
    engine.clear()
    outcomes = {}
    for force in (False, True):
        engine.script.is_off = True
        session = start_hot(engine, "a", seed=seed)
        engine.send(session, 0, force_speak=force)
        engine.settle()
        text, slot = engine.unit_steps.state.text, session.slot
        counters = engine.unit_steps.counters(slot)
        tensors = [*engine.unit_steps.save(slot), *(getattr(text, name)[slot].clone() for name in vars(text))]
        outcomes[force] = engine.take("a"), (*counters[:9], *counters[10:12]), tensors
        engine.clear()
    (plain, at, held), (forced, at_forced, held_forced) = outcomes[False], outcomes[True]
    assert plain[-1].tokens[0] == engine.special.speak, f"expected a model that speaks, got {plain[-1]}"
    assert_same_events("a", forced, plain)
    assert at_forced == at, f"expected counters {at}, got {at_forced}"
    assert all(torch.equal(one, other) for one, other in zip(held_forced, held, strict=True)), "expected equal tensors"


def start_hot(engine: ScriptedEngine, name: str, **settings: Any) -> Session:
    session = engine.start(name, given(FREE, **settings))
    engine.unit_steps.state.text.temperature[session.slot] = HOT
    return session


def seed_that_speaks(engine: ScriptedEngine, session: Session, logits: torch.Tensor) -> int:
    """A seed with which the session's first token is <|speak|>."""
    n, own = 4000, engine.unit_steps.state.text
    state = SamplerState.allocate(n, history_length=1)  # it is empty
    for name in vars(own):
        if name not in ("history", "count", "draws", "seed"):
            getattr(state, name)[:] = getattr(own, name)[session.slot]
    state.seed[:n] = torch.arange(n)
    sets = token_sets(engine.tokenizer, len(logits), logits.device)
    chosen = sample_text(logits.expand(n, -1), torch.arange(n), torch.ones(n, dtype=torch.bool), state, sets)
    found = (chosen.ids == engine.special.speak).nonzero()
    assert len(found), f"expected a seed below {n} that speaks, got none"
    return int(found[0])


def test_affects_no_other_session_of_the_batch(engine: ScriptedEngine) -> None:
    events = {}
    for force in (False, True):
        engine.script.is_off = True
        sessions = [engine.start(name, given(FREE, seed=7)) for name in ("a", "b")]
        for number in range(2):
            engine.send(sessions[0], number, force_speak=force)
            engine.send(sessions[1], number)
            engine.settle()
        events[force] = engine.take("b")
        engine.clear()
    assert_same_events("b", events[True], events[False])


def test_choice_is_free_again_after_a_failure(engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    session = engine.start("a", QUIET, HELLO)
    table = engine.unit_steps.state.text.set_index
    before, feed = int(table[session.slot]), engine.unit_steps.feed
    seen = []

    def failing(*inputs: Any) -> None:
        seen.append(int(table[session.slot]))
        raise RuntimeError("out of order")

    monkeypatch.setattr(engine.unit_steps, "feed", failing)
    failure = engine.run_unit(session, 0, force_speak=True)
    assert str(getattr(failure, "error", "")) == "out of order", failure
    assert seen and set(seen) != {before}, f"expected another token set inside, got {seen}"
    monkeypatch.setattr(engine.unit_steps, "feed", feed)
    assert int(table[session.slot]) == before, "expected the session's own token set"
    assert run_unit(engine, session, 0).text == "one two three four"


# --- max_turn_tokens ---------------------------------------------------------------------------------


def test_turn_ends_at_its_limit_within_a_unit(engine: ScriptedEngine) -> None:
    session = engine.start("a", given(QUIET, max_turn_tokens=2), HELLO, "<|listen|>")
    ids = engine.ids("one two three four")
    result = run_unit(engine, session, 0)
    special = engine.special
    assert result.tokens == (special.speak, *ids[:2], special.turn_eos, special.chunk_eos), result
    assert (result.end_of_turn, result.turn_limit) == (True, True)
    after = run_unit(engine, session, 1)
    assert (after.is_listen, after.end_of_turn, after.turn_limit) == (True, False, False)


@pytest.mark.parametrize("n_more", [0, 1, 2, 3])
def test_turn_ends_at_its_limit_over_units(engine: ScriptedEngine, n_more: int) -> None:
    """Units of four tokens, one of which opens the unit: the limit lies anywhere in the second or third one."""
    limit, special = 4 + n_more, engine.special
    config = given(QUIET, max_turn_tokens=limit, max_new_speak_tokens_per_chunk=5)
    session = engine.start("a", config, HELLO, HELLO, HELLO, HELLO)
    spoken: list[int] = []
    for number in range(4):
        result = run_unit(engine, session, number)
        spoken += [token for token in result.tokens if token not in (special.speak, special.chunk_eos)]
        assert result.turn_limit is result.end_of_turn, result
        if result.end_of_turn:
            break
    assert spoken[-1] == special.turn_eos, f"expected the end of the turn last, got {spoken}"
    assert len(spoken) - 1 == limit, f"expected {limit} tokens, got {len(spoken) - 1}"
    assert result.n_tokens > 1, "expected the last unit to have text of its own"
    assert session.n_turn_tokens == 0 and not session.turn_open


def test_limit_counts_each_turn_anew(engine: ScriptedEngine) -> None:
    n = len(engine.ids(HELLO))  # with the token that opens the unit
    session = engine.start("a", given(QUIET, max_turn_tokens=n), *[HELLO + "<|turn_eos|>"] * 3)
    outcomes = results(engine.run(session, 3))
    assert [(one.end_of_turn, one.turn_limit, one.n_tokens) for one in outcomes] == [(True, False, n)] * 3


def test_turn_that_ends_by_itself_at_the_limit_was_not_limited(engine: ScriptedEngine) -> None:
    session = engine.start("a", given(QUIET, max_turn_tokens=len(engine.ids(HELLO)) - 1), HELLO + "<|turn_eos|>")
    result = run_unit(engine, session, 0)
    assert (result.end_of_turn, result.turn_limit, result.text) == (True, False, "one two three four")


def test_limit_may_change_within_a_turn(engine: ScriptedEngine) -> None:
    session = engine.start("a", given(QUIET, max_turn_tokens=100), HELLO, HELLO, HELLO)
    assert not run_unit(engine, session, 0).end_of_turn
    engine.sessions.adjust(session, Adjustment(session.config.adjusted({"max_turn_tokens": 3})))
    result = run_unit(engine, session, 1)
    assert (result.text, result.end_of_turn, result.turn_limit, result.is_listen) == ("", True, True, False)
    engine.sessions.adjust(session, Adjustment(session.config.adjusted({"max_turn_tokens": 0})))
    assert run_unit(engine, session, 2).text == "one two three four"


def test_speech_of_a_limited_turn_is_spoken_to_its_end(engine: ScriptedEngine) -> None:
    """Before a model that would go on begins another one. The result with its last sound names the limit."""
    config = given(ALOUD, max_turn_tokens=2, drain_s=2)
    session = engine.start("a", config, HELLO, HELLO)
    engine.end_with(session, None)
    outcomes = results(engine.run(session, 4))
    ends = [(one.end_of_turn, one.turn_limit, one.pcm is not None) for one in outcomes]
    assert ends == [(False, False, True), (False, False, True), (True, True, True), (False, False, True)], ends
    text = outcomes[0].text
    assert [one.text for one in outcomes] == [text, "", "", text] and text, outcomes


def test_turn_that_is_cut_off_was_not_limited(engine: ScriptedEngine) -> None:
    session = engine.start("a", given(QUIET, max_turn_tokens=100), HELLO, HELLO)
    run_unit(engine, session, 0)
    cut = run_unit(engine, session, 1, force_listen=True)
    assert (cut.is_listen, cut.end_of_turn, cut.turn_limit) == (True, True, False)


# --- close_early -------------------------------------------------------------------------------------


@pytest.mark.parametrize("compat", ["fixed", "reference"])
def test_closing_early_equals_silence_up_to_the_second(engine: ScriptedEngine, compat: str) -> None:
    """Within a conversation: the sound before and after is cut the same way."""
    events = {}
    for early in (False, True):
        engine.script.is_off = True
        session = engine.start("a", given(QUIET, compat=compat))
        for number, n_samples in enumerate((16_000, 5_000, 16_000, 1, 16_000)):
            sound = make_sound(number, n_samples)
            if not early:
                sound = np.concatenate((sound, np.zeros(16_000 - n_samples, np.float32)))
            engine.sessions.unit(session, UnitInput(sound, [], False, arrived=0.0, close_early=early))
            engine.settle()
        events[early] = engine.take("a")
        logits = engine.record("a").logits
        events[early].append(torch.stack(logits))
        engine.clear()
    *plain, logits = events[False]
    *closed, logits_closed = events[True]
    assert_same_events("a", closed, plain)
    assert torch.equal(logits_closed, logits), "expected the same logits after every unit"
    assert len(logits) == 5, f"expected a decision for every chunk, got {len(logits)}"


def test_closing_early_completes_sound_that_waits(engine: ScriptedEngine) -> None:
    session = engine.start("a", QUIET, "<|listen|>", HELLO)
    run_unit(engine, session, 0)
    halves = [run_unit(engine, session, 1, 4_000), run_unit(engine, session, 2, 4_000, close_early=True)]
    assert [one.text for one in halves] == ["", "one two three four"], halves
    assert [one.lag_s for one in halves] == [0.255, 0.005], f"expected as much left as after a second, got {halves}"


def test_sound_of_a_whole_unit_stays_as_it_is(engine: ScriptedEngine) -> None:
    session = engine.start("a", QUIET, "<|listen|>", "<|listen|>")
    results(engine.run(session, 1))
    result = run_unit(engine, session, 1, 20_000, close_early=True)
    assert (result.n_caught_up, result.lag_s) == (0, 0.255), f"expected a quarter of a second to wait, got {result}"


# --- both at once ------------------------------------------------------------------------------------


def test_engine_refuses_to_force_both() -> None:
    engine = SmallEngine()
    session = engine.open("a")
    handle = SessionHandle(CommandQueue(RuntimeError), engine.sessions, session, ImageCutter(engine.parts.pictures, 70))
    with pytest.raises(SettingsError, match="force_speak: expected false with force_listen, got true"):
        handle.send(make_sound(0), force_listen=True, force_speak=True)
