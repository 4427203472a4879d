"""A session's memory is bounded, and every context row belongs to the prompt or to a unit in the window."""

import random
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from models.inputs.image import image_patches, plan
from models.layers.rotary import rotary_phases, rotate
from tests.worker.engine.failing_regions import broken
from tests.worker.loop.engines import LLM_LEN, QUIET, make_config, make_image, make_sound
from tests.worker.loop.scripted_engine import ScriptedEngine, results
from worker.config.session import WindowConfig
from worker.loop.results import Failure, UnitResult
from worker.loop.session import Session, SessionPhase, UnitInput

WINDOWS = {
    "off": WindowConfig(mode="off"),
    "basic": WindowConfig(mode="basic", high_tokens=120, low_tokens=80),
    "context": WindowConfig(mode="context", max_units=3, previous_max_tokens=20),
}
LINES = ("<|speak|>one two", "<|speak|>three<|turn_eos|>", "<|listen|>", "<|speak|>four five<|turn_eos|><|listen|>")

SHORT_LINES = ("<|speak|>one", "<|listen|>", "<|speak|>two<|turn_eos|>", "<|listen|>")


@pytest.fixture(scope="module")
def built() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def engine(built: ScriptedEngine) -> Iterator[ScriptedEngine]:
    yield built
    built.clear()


def assert_rows_accounted_for(engine: ScriptedEngine, session: Session, what: str) -> None:
    window, device = session.window, engine.rows(session)
    counted = engine.unit_steps.context_len(session.slot)
    assert counted == device, f"{what}: expected the host to count {device} rows, got {counted}"
    known = window.preserve + sum(unit.length for unit in window.units)
    held = device - session.n_early_rows + len(session.pending)
    assert known == held, f"{what}: expected the prompt and its units to be the {held} rows held, got {known}"
    assert window.stray == 0, f"{what}: expected no stray rows, got {window.stray}"


# --- accounting of rows ------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "ls_mode"), [*((mode, "explicit") for mode in WINDOWS), ("context", "implicit")])
def test_every_row_belongs_to_the_prompt_or_a_unit(engine: ScriptedEngine, mode: str, ls_mode: str) -> None:
    rng = random.Random(mode)
    config = QUIET.model_copy(update={"window": WINDOWS[mode], "ls_mode": ls_mode})
    session = engine.start(mode, config, *LINES * 9)
    done: list[Any] = []
    for number in range(16):
        kind = rng.choice(("sound", "sound", "short", "late", "image", "both", "forced", "interrupted", "fails"))
        if kind == "interrupted":
            engine.sessions.break_speech(session)
        sound = {"short": 5000, "late": 40_000}.get(kind, 16_000)
        region = "unit_step" if number % 2 else "unit_prefill"
        with broken(engine.unit_steps.regions, region, lambda _, kind=kind: kind == "fails", "after"):
            images = [0] if kind in ("image", "both", "short") else []
            seed = None if kind == "image" else number
            done.append(engine.run_unit(session, seed, sound, pictures=images, force_listen=kind == "forced"))
        assert_rows_accounted_for(engine, session, f"unit {number}, {kind}")
    assert any(isinstance(one, Failure) for one in done), "expected some units to fail"
    assert sum(isinstance(one, UnitResult) for one in done) > 8, "expected most units to succeed"


# --- bounds ------------------------------------------------------------------------------------------


def test_context_mode_bounds_rows_of_large_units() -> None:
    engine = ScriptedEngine(make_config(llm_len=600))
    image = make_image(0, 896, 448)
    slices = image_patches(image, plan(*image.size, 2))
    window = WindowConfig(mode="context", max_units=24, previous_max_tokens=10)
    session = engine.start("a", QUIET.model_copy(update={"window": window, "max_slice_nums": 2}))
    for number in range(5):
        engine.sessions.unit(session, UnitInput(make_sound(number), [slices], False, arrived=0.0))
        engine.settle()
        [result] = results(engine.take("a"))
        assert result.n_slices == 3, f"slices: expected 3, got {result.n_slices}"
        assert_rows_accounted_for(engine, session, f"unit {number}")
    assert session.window.dropped_units > 0, "expected evictions before the window holds 24 units"


@pytest.mark.parametrize("mode", ["basic", "context"])
def test_unit_that_fills_the_context_is_evicted_and_the_session_goes_on(engine: ScriptedEngine, mode: str) -> None:
    window = WindowConfig(mode=mode, high_tokens=40, low_tokens=20, max_units=1, previous_max_tokens=6)
    config = QUIET.model_copy(update={"window": window, "max_new_speak_tokens_per_chunk": 6})
    filled = 0
    for n_words in range(LLM_LEN - 36, LLM_LEN - 20):
        session = engine.start("a", config, "<|speak|>one two three four five six", text="so " * n_words)
        outcomes = engine.run(session, 1)
        filled += isinstance(outcomes[0], UnitResult) and outcomes[0].context_len == LLM_LEN
        lost = session.phase is not SessionPhase.READY
        engine.sessions.close(session)
        assert not lost, f"prompt of {n_words} words: expected the session to go on, got {outcomes}"
    assert filled, "expected a unit that fills the context"


def sizes(thing: Any, seen: set[int] | None = None) -> int:
    """Entries of all containers reachable from an object, and 4 KiB pages of its arrays."""
    seen = set() if seen is None else seen
    if id(thing) in seen or callable(thing) or isinstance(thing, type):
        return 0
    seen.add(id(thing))
    if isinstance(thing, str | bytes):
        return len(thing)
    if isinstance(thing, Mapping):
        return len(thing) + sum(sizes(one, seen) for one in thing.values())
    if isinstance(thing, list | tuple | set | frozenset | deque):
        return len(thing) + sum(sizes(one, seen) for one in thing)
    if hasattr(thing, "nbytes"):
        return int(thing.nbytes) // 4096
    slots = [getattr(thing, name) for name in getattr(thing, "__slots__", ()) if hasattr(thing, name)]
    return sizes([*slots, *vars(thing).values()] if hasattr(thing, "__dict__") else slots, seen)


def test_60_units_take_no_more_memory_than_20(engine: ScriptedEngine) -> None:
    sessions = []
    for mode in ("basic", "context"):
        config = QUIET.model_copy(update={"window": WINDOWS[mode]})
        sessions.append(engine.start(mode, config, *SHORT_LINES * 15))
    host: dict[str, list[int]] = {session.id: [] for session in sessions}
    held: dict[str, list[int]] = {session.id: [] for session in sessions}
    engine_sizes, state_bytes = [], engine.unit_steps.state.nbytes()
    for number in range(60):
        for session in sessions:
            engine.send(session, number % 7)
        engine.settle()
        for session in sessions:
            results([one for one in engine.take(session.id) if not hasattr(one, "unit")])
            if number % 3 == 0:  # at changing positions in the script
                host[session.id].append(sizes({name: one for name, one in vars(session).items() if name != "emit"}))
            held[session.id].append(engine.rows(session))
        engine.script.record.clear()
        if number in (19, 59):
            engine_sizes.append(
                sum(map(sizes, (engine.loop.jobs, engine.sessions._prompts.snapshots, engine.unit_steps._counters)))
            )
    for session in sessions:
        early, late = max(host[session.id][:7]), max(host[session.id][7:])
        assert late <= early + 20, f"{session.id}: expected no more than in twenty units ({early}), got {late}"
        assert max(held[session.id]) <= 200, f"{session.id}: expected bounded rows, got {max(held[session.id])}"
        assert_rows_accounted_for(engine, session, session.id)
    assert engine_sizes[1] <= engine_sizes[0], f"engine: expected no growth, got {engine_sizes}"
    assert engine.unit_steps.state.nbytes() == state_bytes, "slots: expected no growth"
    assert len(engine.loop.jobs) == 0, "expected no jobs left"


# --- keys -------------------------------------------------------------------------------------------


def keys_of_units(engine: ScriptedEngine, session: Session) -> dict[int, Tensor]:
    """Keys of the first layer for every closed unit, by unit id."""
    keys, at, found = engine.unit_steps.state.llm.k[0][session.slot], session.window.preserve, {}
    for unit in list(session.window.units)[:-1]:
        found[unit.id] = keys[:, at : at + unit.length].clone()
        at += unit.length
    return found


@pytest.mark.parametrize("mode", ["basic", "context"])
def test_keys_are_rounded_at_most_twice_by_any_number_of_evictions(engine: ScriptedEngine, mode: str) -> None:
    session = engine.start(mode, QUIET.model_copy(update={"window": WINDOWS[mode]}), *LINES * 5)
    cache, slot, n = engine.unit_steps.state.llm, session.slot, session.window.prefix
    first = cache.k[0][slot, :, :n].clone()
    before: dict[int, Tensor] = {}
    for _ in range(20):
        results(engine.run(session, 1))
        after = keys_of_units(engine, session)
        for number in before.keys() & after.keys():
            same = torch.equal(before[number], after[number])
            assert same, f"unit {number}: expected unchanged keys, they changed in unit {session.n_units}"
        before = after
    ahead = cache.positions[slot] - cache.lengths[slot]
    assert session.window.events > 2 and ahead > 0, f"expected several evictions, got {session.window.events}"
    phase = rotary_phases(ahead, engine.parts.model.llm.model.frequencies)
    once = rotate(first, phase.cos(), phase.sin())
    assert torch.equal(cache.k[0][slot, :, :n], once), "prompt: expected keys rotated once from the original ones"
