"""The side lane: text that the model writes beside its speech, over units, and what the engine makes of it."""

from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.checkpoint.config import SideLaneConfig, parse_config, read_json
from models.errors import ConfigError, TokenError
from tests.worker.loop.decoder.decoder_helpers import CUT, END, LISTEN, SPEAK, Run, check, drive, make
from tests.worker.loop.engines import QUIET as NARROW
from tests.worker.loop.engines import TINY, assert_mirrors, short_history_model, short_speech
from tests.worker.loop.scripted_engine import ScriptedEngine, results
from worker.assembly.parts import side_lane_of, token_sets
from worker.config.session import FIXED_SET, FIXED_SPEAK_SET, SIDE_DUPLEX_SET, SIDE_SET
from worker.http.units.unit_message import TurnCounters, UnitClock, result_message
from worker.loop.prompt.system_prompt import Adjustment
from worker.loop.results import PartialResult, UnitResult
from worker.loop.unit_decoder import MAX_SPAN, SideLane, SideState, TurnCap

OPEN, CLOSE = 110, 111
CALL = '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'
BODY = CALL.removeprefix("<tool_call>").removesuffix("</tool_call>")
WIDE = NARROW.model_copy(update={"max_new_speak_tokens_per_chunk": 20, "max_side_tokens_per_chunk": 48})


def side(ids: Sequence[int] | None = None, most: int = 8) -> SideState:
    return SideState(SideLane(OPEN, CLOSE), None if ids is None else tuple(ids), most)


def check_side(run: Run, *, open_ids: list[int] | None = None, spans: Sequence[tuple[int, ...]] = ()) -> None:
    got = run.decoder.side_ids, tuple(run.decoder.side_spans)
    assert got == (open_ids, tuple(spans)), f"expected {open_ids} and {spans}, got {got}"
    assert set(run.rows.values()) == set(run.decoder.spoken), "expected rows for speech of the spoken tokens alone"


# --- one unit --------------------------------------------------------------------------------------


def test_a_span_within_speech_is_fed_and_not_spoken() -> None:
    run = drive(make(side=side()), [SPEAK, 3, OPEN, 7, 8, CLOSE, 4, CUT])
    check(run, [SPEAK, 3, OPEN, 7, 8, CLOSE, 4], spoken=[3, 4], all_ids=[SPEAK, 3, OPEN, 7, 8, CLOSE, 4, CUT])
    check(run, run.fed, n_turn_tokens=2, n_side=4, is_listen=False, turn_open=True)
    check_side(run, spans=[(7, 8)])


def test_a_span_in_front_of_the_decision_leaves_it_free() -> None:
    listens = drive(make(side=side()), [OPEN, 7, CLOSE, LISTEN])
    check(listens, [OPEN, 7, CLOSE], is_listen=True, end_of_turn=False, terminator=LISTEN, spoken=[])
    speaks = drive(make(side=side()), [OPEN, 7, CLOSE, SPEAK, 3, END, CUT])
    check(speaks, [OPEN, 7, CLOSE, SPEAK, 3, END], is_listen=False, end_of_turn=True, spoken=[3, END])
    for run in (listens, speaks):
        check_side(run, spans=[(7,)])


def test_control_tokens_inside_a_span_are_part_of_it() -> None:
    run = drive(make(side=side()), [SPEAK, OPEN, LISTEN, END, OPEN, CLOSE, CUT])
    check(run, [SPEAK, OPEN, LISTEN, END, OPEN, CLOSE], is_listen=False, end_of_turn=False, turn_open=True)
    check_side(run, spans=[(LISTEN, END, OPEN)])


def test_without_a_side_lane_the_markers_are_text() -> None:
    run = drive(make(max_chars=200), [SPEAK, OPEN, 7, CLOSE, CUT])
    check(run, [SPEAK, OPEN, 7], spoken=[OPEN, 7], n_side=0)  # the third word is beyond the unit's characters


SPOKEN = st.sampled_from([1, 2, 3, SPEAK, LISTEN, END, CUT])
SPAN = st.lists(st.sampled_from([7, 8, LISTEN, END, CUT]), max_size=3)


@given(
    st.lists(st.tuples(SPOKEN, st.none() | SPAN), max_size=8),
    st.booleans(),
    st.integers(2, 6),
    st.integers(0, 3),
)
def test_spans_change_nothing_of_the_speech(
    given: list[tuple[int, list[int] | None]], turn_open: bool, max_tokens: int, cap: int
) -> None:
    """A unit with spans speaks, listens and ends as the one without them; each span comes out as it went in."""
    options: dict[str, Any] = {"turn_open": turn_open, "max_tokens": max_tokens, "cap": TurnCap(0, cap)}
    plain = drive(make(**options), [*(token for token, _ in given), *[CUT] * 9])
    taken = given[: plain.n_sampled]
    beside = [one for token, span in taken for one in ([OPEN, *span, CLOSE] if span is not None else []) + [token]]
    run = drive(make(side=side(most=1000), **options), [*beside, *[CUT] * 9])
    assert run.outcome()["spoken"] == plain.outcome()["spoken"]
    names = ("terminator", "is_listen", "end_of_turn", "turn_open", "turn_limited", "n_turn_tokens")
    got, expected = ([getattr(one.decoder, name) for name in names] for one in (run, plain))
    assert got == expected, f"{names}: expected {expected}, got {got}"
    if not plain.decoder.turn_limited:  # the end of the turn may take the place of a span's beginning
        check_side(run, spans=[tuple(span) for _, span in taken if span is not None])


# --- over units ------------------------------------------------------------------------------------


@pytest.mark.parametrize("turn_open", [False, True])
def test_a_span_goes_on_with_the_next_unit(turn_open: bool) -> None:
    """A unit with a part of a span alone is silent, unless a turn is open: its speech goes on."""
    first = drive(make(side=side(most=3), turn_open=turn_open), [OPEN, 7, 8])
    check(first, [OPEN, 7, 8], terminator=CUT, is_listen=not turn_open, end_of_turn=False, turn_open=turn_open)
    check_side(first, open_ids=[7, 8])
    middle = drive(make(side=side([7, 8], most=3), turn_open=turn_open), [9, 1, 2])
    check_side(middle, open_ids=[7, 8, 9, 1, 2])
    last = drive(make(side=side([7, 8, 9, 1, 2], most=3), turn_open=turn_open), [CLOSE, SPEAK, 3, CUT])
    check_side(last, spans=[(7, 8, 9, 1, 2)])
    check(last, [CLOSE, SPEAK, 3], spoken=[3], is_listen=False)


def test_what_is_said_before_a_cut_is_spoken() -> None:
    run = drive(make(side=side(most=2)), [SPEAK, 3, 4, OPEN, 7])
    check(run, [SPEAK, 3, 4, OPEN, 7], spoken=[3, 4], terminator=CUT, is_listen=False, turn_open=True)
    check_side(run, open_ids=[7])


def test_a_silent_unit_leaves_a_span_open() -> None:
    forced = drive(make(side=side([7]), override=True, turn_open=True), [])
    check(forced, [END], is_listen=True, end_of_turn=True)
    interrupted = drive(make(side=side([7]), turn_open=True), [8, 9], interrupt_after=1)
    check(interrupted, [8, END], is_listen=True, end_of_turn=True)
    check_side(forced, open_ids=[7])
    check_side(interrupted, open_ids=[7, 8])


def test_a_span_that_is_too_long_ends() -> None:
    run = drive(make(side=side([7] * MAX_SPAN)), [9, LISTEN])
    check(run, [CLOSE], is_listen=True)
    check_side(run, spans=[(7,) * MAX_SPAN])


def test_a_span_is_dropped_when_the_lane_is_turned_off() -> None:
    run = drive(make(side=side([7], most=0)), [9, SPEAK, 3, CUT])
    check(run, [CLOSE, SPEAK, 3], spoken=[3])
    check_side(run)


def test_the_limit_of_a_turn_does_not_cut_a_span() -> None:
    cap = TurnCap(n_tokens=2, most=2)
    run = drive(make(side=side([7]), turn_open=True, cap=cap), [8, CLOSE, 5])
    check(run, [8, CLOSE, END], end_of_turn=True, turn_limited=True)
    check_side(run, spans=[(7, 8)])


# --- the engine ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def built() -> Iterator[ScriptedEngine]:
    model = short_history_model()
    config = model.config.model_copy(update={"side_lane": SideLaneConfig()})
    with short_speech():
        with mock.patch.object(model, "config", config):
            engine = ScriptedEngine()
        yield engine


@pytest.fixture
def engine(built: ScriptedEngine) -> Iterator[ScriptedEngine]:
    yield built
    built.clear()


def test_calls_are_results_of_their_own_beside_the_speech(engine: ScriptedEngine) -> None:
    ids = engine.ids(CALL)
    lines = [f"<|speak|>one{CALL} two", "three<|turn_eos|>", f"{CALL}<|listen|>"]
    session = engine.start("a", WIDE, *lines)
    said, ended, heard = (engine.run_unit(session, number) for number in range(3))
    results([said, ended, heard])
    assert (said.text, said.side_texts, said.n_side_tokens) == ("one two", (BODY,), len(ids)), said
    assert (ended.side_texts, ended.end_of_turn, heard.is_listen, heard.text) == ((), True, True, "")
    assert heard.side_texts == (BODY,) and heard.tokens == (*ids, engine.special.listen)
    assert_mirrors(engine.unit_steps, session.slot)
    assert engine.unit_steps.context_len(session.slot) + len(session.pending) == session.window.length


def test_messages_of_results_have_the_calls_and_count_their_tokens() -> None:
    event = UnitResult("a", 3, True, "", False, side_texts=(BODY,), n_side_tokens=9)
    message = result_message(event, UnitClock(0.0, 0.0), ends_turn=False, speaks=True, n_parts=0, backlog=0)
    counted = TurnCounters().counted(message, event)
    assert message.side_texts == [BODY] and counted.usage is not None
    assert (counted.usage.side_tokens, counted.usage.text_tokens) == (9, 0)
    plain = result_message(
        UnitResult("a", 3, True, "", False), UnitClock(0.0, 0.0), ends_turn=False, speaks=True, n_parts=0, backlog=0
    )
    assert plain.side_texts is None, "expected no field in the messages of other checkpoints"


def test_a_call_over_units_beside_speech(engine: ScriptedEngine) -> None:
    """The unit's budget cuts the call; the turn speaks on after it, and no part of it is ever emitted as text."""
    ids = engine.ids(CALL)
    most = len(ids) // 2 + 1
    config = WIDE.model_copy(update={"max_side_tokens_per_chunk": most})
    speak = [engine.special.speak, *engine.ids("one")]
    session = engine.start("a", config, [*speak, *ids[:most]], [*ids[most:], *engine.ids("<|speak|> two")])
    for number in range(2):
        engine.send(session, number)
        engine.settle()
    *parts, _ = events = engine.take("a")
    first, second = results([one for one in events if not isinstance(one, PartialResult)])
    assert (first.text, first.side_texts, first.is_listen) == ("one", (), False)
    assert (second.text, second.side_texts, second.is_listen) == (" two", (BODY,), False)
    assert "".join(part.text for part in parts if isinstance(part, PartialResult)) == "one two"
    assert session.side_ids is None


def test_tokens_are_chosen_from_the_set_of_their_place(engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    session = engine.start("a", WIDE, f"{CALL}<|speak|>one<|turn_eos|>")
    table, steps = engine.unit_steps.state.text.set_index, engine.unit_steps
    seen: list[tuple[int, int]] = []
    plain_feed, plain_step = steps.feed, steps.step

    def feed(*given: Any) -> Any:
        seen.append((-1, int(table[session.slot])))
        return plain_feed(*given)

    def step(slots: Any, ids: Any, *given: Any) -> Any:
        seen.append((ids[0], int(table[session.slot])))
        return plain_step(slots, ids, *given)

    monkeypatch.setattr(steps, "feed", feed)
    monkeypatch.setattr(steps, "step", step)
    results([engine.run_unit(session, 0, force_speak=True)])
    n, call = len(engine.ids(CALL)), [one for _, one in seen]
    expected = [FIXED_SPEAK_SET, *[SIDE_SET] * (n - 1), FIXED_SPEAK_SET, *[SIDE_DUPLEX_SET] * (len(call) - n - 1)]
    assert call == expected, f"expected {expected}, got {call}"
    assert int(table[session.slot]) == SIDE_DUPLEX_SET


def test_a_checkpoint_names_its_markers(engine: ScriptedEngine) -> None:
    given = {**read_json(TINY / "config.json"), "side_lane": {"start": "<think>", "end": "</think>"}}
    [start], [end] = engine.ids("<think>"), engine.ids("</think>")
    assert side_lane_of(engine.tokenizer, parse_config(given)) == SideLane(start, end)
    with pytest.raises(TokenError, match="expected an entry '<no such token>', got none"):
        side_lane_of(engine.tokenizer, parse_config({**given, "side_lane": {"start": "<no such token>"}}))
    with pytest.raises(ConfigError, match="side_lane"):
        parse_config({**given, "side_lane": {"start": 7}})


def test_sets_keep_spans_well_formed(engine: ScriptedEngine) -> None:
    vocab_size = engine.parts.model.config.vocab_size
    forbidden = token_sets(engine.tokenizer, vocab_size, "cpu", engine.parts.language.side_lane).forbidden
    special, ids = engine.special, engine.ids
    [start], [end], [colon] = ids("<tool_call>"), ids("</tool_call>"), ids(":")
    assert [bool(forbidden[one, start]) for one in (FIXED_SET, SIDE_DUPLEX_SET, SIDE_SET)] == [True, False, True]
    assert [bool(forbidden[one, end]) for one in (FIXED_SET, SIDE_DUPLEX_SET, SIDE_SET)] == [True, True, False]
    inside = [special.listen, special.speak, special.turn_eos, special.chunk_eos, special.unit_end, special.im_end]
    assert bool(forbidden[SIDE_SET, inside].all()) and not forbidden[SIDE_SET, colon]


def test_sessions_without_functions_and_other_checkpoints(engine: ScriptedEngine) -> None:
    table = engine.unit_steps.state.text.set_index
    session = engine.start("a", NARROW)
    assert int(table[session.slot]) == FIXED_SET, "expected no span in a session that does not ask for the lane"
    outcome = engine.sessions.adjust(session, Adjustment(WIDE))
    assert int(table[session.slot]) == SIDE_DUPLEX_SET and outcome.notes == []
    plain = ScriptedEngine()
    other = plain.start("a", WIDE, "<|speak|>one<|turn_eos|>")
    assert int(plain.unit_steps.state.text.set_index[other.slot]) == FIXED_SET
    [note] = plain.sessions.adjust(other, Adjustment(WIDE)).notes
    assert "no side lane" in note
    [result] = results([plain.run_unit(other, 0)])
    assert (result.text, result.side_texts) == ("one", ())


def test_a_failed_unit_keeps_the_span_of_the_one_before(
    engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = engine.ids(CALL)
    config = WIDE.model_copy(update={"max_side_tokens_per_chunk": 6})
    session = engine.start("a", config, ids[:6], [], [*ids[6:12]], ids[12:])
    engine.run_unit(session, 0)
    held = session.side_ids
    assert held == tuple(ids[1:6])
    with monkeypatch.context() as broken:
        broken.setattr(engine.unit_steps, "feed", mock.Mock(side_effect=RuntimeError("out of order")))
        engine.run_unit(session, 1)
    assert session.side_ids == held
