"""Sessions in a pool of context rows: the same results as with rows for each slot, and refusals at the start."""

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

from models.errors import ContextOverflowError, SlotError
from models.layers.kv_pages import PageSizes
from tests.worker.loop.engines import ALOUD as SPOKEN
from tests.worker.loop.engines import (
    QUIET,
    UNIT_TOKENS,
    Director,
    SmallEngine,
    digest,
    make_config,
    make_prompt,
    short_speech,
)
from tests.worker.loop.scripted_engine import ScriptedEngine, results
from worker.assembly import parts as building
from worker.assembly.sizes import PAGE_ROWS
from worker.config import session as settings
from worker.config.session import SessionConfig, WindowConfig
from worker.loop.results import Failure, UnitResult

LLM_LEN = 1024
ROWS = 3 * PAGE_ROWS  # of a session below
WINDOWED = QUIET.model_copy(update={"window": WindowConfig(high_tokens=160, low_tokens=100), "max_slice_nums": 1})
ALOUD = WINDOWED.model_copy(update={"generate_audio": True})


@pytest.fixture(scope="module", autouse=True)
def few_rows_for_texts() -> Iterator[None]:
    with mock.patch.object(settings, "TEXT_ROWS", 64), short_speech():
        yield


def make(layout: str, session: SessionConfig = WINDOWED) -> SmallEngine:
    return SmallEngine(make_config(llm_len=LLM_LEN, kv_layout=layout, session=session), Director())


def converse(engine: SmallEngine) -> dict[str, Any]:
    """What three sessions say whose pages are taken in turns; the last one starts from a snapshot."""
    found: dict[str, Any] = {}
    first = engine.open("first", ALOUD, make_prompt(speaker=1))
    engine.sessions.close(engine.open("gone", WINDOWED))
    sessions = [first, engine.open("second", WINDOWED, make_prompt("Be brief."))]
    for number in range(5):
        if number == 2:
            sessions.append(engine.open("third", ALOUD, make_prompt(speaker=1)))
        for place, session in enumerate(sessions):
            engine.send(session, number + place, pictures=(number,) if number else ())
        engine.settle()
        for session in sessions:
            result = engine.take(session.id)[-1]
            assert isinstance(result, UnitResult), result
            sound = None if result.pcm is None else digest(result.pcm)
            found.setdefault(session.id, []).append((result.tokens, sound, result.context_len))
    assert all(session.window.events > 0 for session in sessions[:2]), "expected evictions"
    director = engine.loop.observer
    assert isinstance(director, Director)
    return found | {"logits": director.logits}


def test_pages_change_no_bit_of_a_conversation() -> None:
    with mock.patch.object(building, "speech_pages", return_value=PageSizes(8, 36, "speech rows")):
        paged = make("pages")
    plain, speech = make("slots"), paged.unit_steps.state.speech
    assert speech is not None
    paged.unit_steps.context.load_kernel()  # as a start with kernels does
    expected, got = converse(plain), converse(paged)
    n_held = [speech.cache.pages.capacity(slot) for slot in range(3)]
    assert max(n_held) >= 3 * 8, f"expected a turn of several pages, got {n_held} rows"
    assert paged.unit_steps.capacity(0) == ROWS < plain.unit_steps.capacity(0) == LLM_LEN
    assert paged.unit_steps.state.nbytes() < plain.unit_steps.state.nbytes()
    for name, values in expected.items():
        assert got[name] == values, f"{name}: expected the same with pages"
    assert any(sound for _, sound, _ in expected["first"]), "expected a session to speak"
    paged.close_all()
    assert speech.cache.pages.n_free_rows == 36 * 8, f"expected all pages back, got {speech.cache.pages.n_free_rows}"


def test_rows_are_refused_at_the_start_and_returned_at_the_end() -> None:
    engine = make("pages")
    pages = engine.unit_steps.state.llm.pages
    n_free, longest = pages.n_free_rows, QUIET  # without a window a session may fill a slot
    assert n_free == 2 * ROWS + LLM_LEN
    whole = engine.open("whole", longest)
    assert engine.unit_steps.capacity(whole.slot) == LLM_LEN and pages.n_fitting(ROWS) == 2
    with pytest.raises(SlotError, match=f"expected at most {2 * ROWS} more rows, which are free, got {LLM_LEN}"):
        engine.open("another", longest)
    assert (engine.unit_steps.n_free, pages.n_free_rows) == (2, 2 * ROWS), "expected nothing to be taken"
    others = [engine.open(name, WINDOWED) for name in ("second", "third")]
    assert pages.n_free_rows == 0
    with pytest.raises(SlotError):
        engine.sessions.prepare(others[0], make_prompt(), longest)
    assert isinstance(engine.run_unit(others[1]), UnitResult), "expected other sessions to go on"
    engine.close_all()
    assert pages.n_free_rows == n_free and all(tensor[:-2].eq(0).all() for tensor in engine.unit_steps.state.llm.k)


def test_a_long_prompt_takes_more_rows() -> None:
    engine = make("pages")
    session = engine.open("long", WINDOWED, make_prompt("a b " * 120))
    n_prompt, capacity = engine.sessions.context_len(session), engine.unit_steps.capacity(session.slot)
    assert ROWS < n_prompt + 2 * session.config.unit_rows <= capacity < LLM_LEN, (n_prompt, capacity)
    outcomes = [engine.run_unit(session, number) for number in range(4)]
    assert not any(isinstance(one, Failure) for one in outcomes), outcomes
    again = engine.open("again", WINDOWED, make_prompt("a b " * 120))  # from a snapshot
    assert engine.unit_steps.capacity(again.slot) == capacity
    with pytest.raises(ContextOverflowError, match=f"expected at most {LLM_LEN} rows"):
        engine.open("longer", WINDOWED, make_prompt("a b " * 999))


def test_speech_without_free_pages_ends_alone() -> None:
    """Two turns share the pool and drop their older halves; a third one begins when they have ended."""
    hello, bye = "<|speak|>Hello there", "<|speak|>Hello<|turn_eos|>"
    with mock.patch.object(building, "speech_pages", return_value=PageSizes(32, 2, "speech rows")):
        engine = ScriptedEngine(make_config(kv_layout="pages"))
    assert engine.unit_steps.state.speech is not None
    pages = engine.unit_steps.state.speech.cache.pages
    sessions = [engine.start(name, SPOKEN, *[hello] * 5, bye) for name in ("first", "second")]
    late = engine.start("late", SPOKEN, hello, bye, hello)
    for session in sessions:
        engine.end_with(session, None)
    for unit in range(5):
        units = results([engine.run_unit(session, unit) for session in sessions])
        n_drawn = [one.n_speech_tokens for one in units]
        assert n_drawn == [UNIT_TOKENS] * 2, f"unit {unit}: expected two units that speak, got {n_drawn}"
        if unit < 2:
            refused = engine.run_unit(late, unit)
            expected = f"speech rows of slot {late.slot}: expected at most 0 more rows, which are free, got 32"
            assert isinstance(refused, Failure) and str(refused.error) == expected, (
                f"expected {expected}, got {refused}"
            )
    for session in sessions:
        starts = [call.start for call in engine.record(session.id).spoke]
        assert starts.count(0) == 1 and sorted(starts) != starts, f"expected rows to be dropped, got {starts}"
        engine.sessions.close(session)
    assert pages.n_free_rows == 64, f"expected all pages back, got {pages.n_free_rows} rows"
    (spoken,) = results([engine.run_unit(late, 2)])
    assert isinstance(spoken, UnitResult) and spoken.n_speech_tokens > 0, f"expected a turn that speaks, got {spoken}"
    engine.clear()
    assert pages.n_free_rows == 64, f"expected all pages back, got {pages.n_free_rows} rows"
