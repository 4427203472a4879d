"""Another prompt between two units: the context goes on behind it, the window protects it, refusals change nothing."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from models.errors import AudioError, ContextOverflowError, ModelError, SettingsError
from tests.worker.engine.failing_regions import Broken, broken, of_slot
from tests.worker.loop.engines import QUIET, Director, SmallEngine, assert_mirrors, make_prompt, make_sound
from worker.config.session import WindowConfig
from worker.loop.prompt.system_prompt import Adjustment, SystemPrompt
from worker.loop.results import Failure, UnitResult
from worker.loop.session import Session, SessionPhase

BASIC = WindowConfig(mode="basic", high_tokens=140, low_tokens=90)
MEMORY = WindowConfig(mode="context", max_units=3, previous_max_tokens=8)
MODES = {
    "off": QUIET,
    "basic": QUIET.model_copy(update={"window": BASIC}),
    "context": QUIET.model_copy(update={"window": MEMORY}),
    "reference": QUIET.model_copy(update={"window": BASIC, "compat": "reference"}),
}
SHORT, LONG = make_prompt("Hi."), make_prompt("You answer in rhymes, and only about the sea. " * 2, ref=0)


@pytest.fixture(scope="module")
def engine() -> SmallEngine:
    return SmallEngine(observer=Director(listen=0.2))


@contextmanager
def opened(engine: SmallEngine, mode: str) -> Iterator[Session]:
    """A session that the test closes. Its name is the mode, on which the director's choices depend."""
    session = engine.open(mode, MODES[mode])
    try:
        yield session
    finally:
        engine.sessions.close(session)
        engine.take(mode)


def run_units(engine: SmallEngine, session: Session, n: int) -> list[UnitResult]:
    results = [engine.run_unit(session, seed) for seed in range(n)]
    assert all(isinstance(result, UnitResult) for result in results), results
    assert_consistent(engine, session)
    return results


def assert_consistent(engine: SmallEngine, session: Session) -> None:
    assert_mirrors(engine.unit_steps, session.slot)
    rows = engine.unit_steps.context_len(session.slot) + len(session.pending)
    assert rows == session.window.length, f"expected {session.window.length} rows, got {rows}"


def front_of(engine: SmallEngine, session: Session, n: int) -> list[torch.Tensor]:
    keys, values = engine.unit_steps.state.llm.save(session.slot, n)
    return [*keys, *values]


@pytest.mark.parametrize("mode", MODES)
def test_tokens_change_and_the_context_goes_on(engine: SmallEngine, mode: str) -> None:
    """With a shorter and a longer prompt, beside a session that keeps its own."""
    tokens = {}
    for kind, prompt in (("unchanged", None), ("shorter", SHORT), ("longer", LONG)):
        with opened(engine, mode) as session:
            before = run_units(engine, session, 5)
            window, kept = session.window, [unit.id for unit in session.window.units]
            if prompt is not None:
                counters = engine.unit_steps.counters(session.slot)
                outcome = engine.sessions.adjust(session, Adjustment(prompt=prompt))
                assert outcome.from_unit == before[-1].index + 1, f"{kind}: got {outcome.from_unit}"
                assert engine.unit_steps.counters(session.slot)[1:7] == counters[1:7], f"{kind}: expected draws to stay"
                assert [unit.id for unit in session.window.units] == kept[-len(session.window.units) :], kind
                assert session.window.length - session.window.preserve <= window.length - window.preserve, kind
                assert_consistent(engine, session)
            after = run_units(engine, session, 6)
            tokens[kind] = [result.tokens for result in before], [result.tokens for result in after]
    for kind in ("shorter", "longer"):
        assert tokens[kind][0] == tokens["unchanged"][0], f"{kind}: expected the same tokens before the change"
        assert tokens[kind][1] != tokens["unchanged"][1], f"{kind}: expected other tokens under another prompt"


@pytest.mark.parametrize("mode", ["basic", "context"])
def test_window_protects_the_new_prompt(engine: SmallEngine, mode: str) -> None:
    """Evictions go on behind it, and its rows are those of a session prepared with it."""
    with opened(engine, mode) as session:
        run_units(engine, session, 4)
        engine.sessions.adjust(session, Adjustment(prompt=SHORT))
        events, n_prompt = session.window.events, session.window.prefix
        run_units(engine, session, 12)
        assert session.window.events > events, "expected evictions, got none: nothing was tested"
        assert session.window.prefix == n_prompt
        front = front_of(engine, session, n_prompt)
    with opened(engine, mode) as session:
        engine.sessions.prepare(session, SHORT)
        fresh = front_of(engine, session, n_prompt)
    n_layers = len(front) // 2
    for got, expected in zip(front[n_layers:], fresh[n_layers:], strict=True):
        assert torch.allclose(got, expected, atol=1e-5), "expected the values of the prompt's rows"
    lengths = [torch.stack([k.norm(dim=-1) for k in keys[:n_layers]]) for keys in (front, fresh)]
    assert torch.allclose(*lengths, atol=1e-4), "expected the prompt's keys, up to their rotation"


def test_equals_a_session_prepared_with_the_prompt(engine: SmallEngine) -> None:
    """Before the first unit there are no rows of another prompt: tokens are equal from then on."""
    with opened(engine, "basic") as session:
        engine.sessions.adjust(session, Adjustment(prompt=LONG))
        assert_consistent(engine, session)
        got = [result.tokens for result in run_units(engine, session, 4)]
    with opened(engine, "basic") as session:
        engine.sessions.prepare(session, LONG)
        expected = [result.tokens for result in run_units(engine, session, 4)]
    assert got == expected


def test_snapshots_serve_adjusted_prompts(engine: SmallEngine) -> None:
    engine.sessions.forget_snapshots()
    with opened(engine, "basic") as session:
        engine.sessions.adjust(session, Adjustment(prompt=LONG))
        assert engine.sessions.n_snapshots == 2
        with broken(engine.unit_steps.regions, "unit_prefill", of_slot(session.slot), "before"):
            engine.sessions.prepare(session, LONG)
            engine.sessions.adjust(session, Adjustment(prompt=make_prompt()))
        assert_consistent(engine, session)


def test_makes_room_for_a_longer_prompt(engine: SmallEngine) -> None:
    """By evicting the oldest units at once, except in a window that evicts nothing."""
    with opened(engine, "basic") as session:
        while session.window.length < BASIC.high_tokens - 30:
            run_units(engine, session, 1)
        n_units, ids = len(session.window.units), [unit.id for unit in session.window.units]
        engine.sessions.adjust(session, Adjustment(prompt=LONG))
        n_left = len(session.window.units)
        assert n_left < n_units and [unit.id for unit in session.window.units] == ids[n_units - n_left :]
        assert session.window.length <= BASIC.high_tokens
        assert_consistent(engine, session)
        run_units(engine, session, 3)


def test_refusals_change_nothing(engine: SmallEngine) -> None:
    limit = engine.config.llm_len - QUIET.unit_rows
    encode = engine.parts.language.tokenizer.encode
    tight = next(
        prompt
        for prompt in (make_prompt("so" + " so" * n) for n in range(limit))
        if limit - 8 < len(encode(prompt.prefix)) + len(encode(prompt.suffix)) < limit
    )
    bad: list[tuple[SystemPrompt, type[ModelError]]] = [
        (make_prompt("so " * 400), ContextOverflowError),
        (tight, ContextOverflowError),  # it fits alone, but not before the newest unit
        (SystemPrompt("", ""), SettingsError),
    ]
    for mode in ("off", "basic", "context"):
        with opened(engine, mode) as session:
            run_units(engine, session, 4)
            state = [tensor[session.slot].clone() for tensor in engine.unit_steps.state.tensors()]
            before = session.window, session.window.length, len(session.window.units), session.config
            changed = session.config.adjusted({"force_listen_count": 1000})
            for prompt, error in bad:
                with pytest.raises(error):
                    engine.sessions.adjust(session, Adjustment(changed, prompt))
                assert (session.window, session.window.length, len(session.window.units), session.config) == before
                now = [tensor[session.slot] for tensor in engine.unit_steps.state.tensors()]
                assert all(torch.equal(a, b) for a, b in zip(state, now, strict=True)), f"{mode}: rows have changed"
            run_units(engine, session, 1)


def test_failing_model_leaves_the_old_prompt(engine: SmallEngine) -> None:
    engine.sessions.forget_snapshots()
    with opened(engine, "basic") as session:
        run_units(engine, session, 3)
        state = [tensor[session.slot].clone() for tensor in engine.unit_steps.state.tensors()]
        for when in ("before", "after"):
            breaking = broken(engine.unit_steps.regions, "unit_prefill", of_slot(session.slot), when)
            with breaking, pytest.raises(Broken):
                engine.sessions.adjust(session, Adjustment(prompt=LONG))
            now = [tensor[session.slot] for tensor in engine.unit_steps.state.tensors()]
            assert all(torch.equal(a, b) for a, b in zip(state, now, strict=True)), f"{when}: rows have changed"
        run_units(engine, session, 2)


def test_device_that_fails_while_rows_move_ends_the_context(
    engine: SmallEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(engine, "basic") as session:
        run_units(engine, session, 2)

        def fail(*given: object, **options: object) -> None:
            raise RuntimeError("device")

        with monkeypatch.context() as patch:
            patch.setattr(engine.unit_steps.state.llm, "shift", fail)
            with pytest.raises(RuntimeError, match="device"):
                engine.sessions.adjust(session, Adjustment(prompt=LONG))
        assert session.phase is SessionPhase.NEW and engine.unit_steps.context_len(session.slot) == 0
        engine.sessions.prepare(session, SHORT)
        run_units(engine, session, 1)


def test_other_sessions_do_not_notice(engine: SmallEngine) -> None:
    """Neither one between units nor one with a unit in flight."""
    results = {}
    for adjusted in (False, True):
        with opened(engine, "basic") as session, opened(engine, "off") as neighbour:
            run_units(engine, session, 2)
            engine.send(neighbour, 1)
            engine.step()
            if adjusted:
                engine.sessions.adjust(session, Adjustment(prompt=LONG))
            engine.settle()
            events = [*engine.take("off"), engine.run_unit(neighbour, 2)]
            assert not any(isinstance(event, Failure) for event in events)
            results[adjusted] = [event.tokens for event in events if isinstance(event, UnitResult)]
    assert results[True] == results[False]


def test_reference_voice_changes_the_prompt(engine: SmallEngine) -> None:
    with opened(engine, "basic") as session:
        run_units(engine, session, 1)
        n_rows = session.window.preserve
        engine.sessions.adjust(session, Adjustment(prompt=make_prompt(ref=1)))
        assert session.window.preserve == n_rows + 10, "expected ten rows for a second of sound"
        assert_consistent(engine, session)
        with pytest.raises((AudioError, ModelError)):
            loud = make_prompt()
            sound = np.concatenate([make_sound(seed) for seed in range(40)])
            engine.sessions.adjust(session, Adjustment(prompt=SystemPrompt(loud.prefix, loud.suffix, sound)))
        assert session.window.preserve == n_rows + 10
