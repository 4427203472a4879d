"""Text between two units: its rows, the context it gives, the window, limits, and what others wait for it."""

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch

from models.errors import ContextOverflowError
from tests.worker.chat.reply_engine import WRITTEN, AnsweringEngine, make_parts, script, words
from tests.worker.chat.test_reply_prompts import Work
from tests.worker.engine.failing_regions import Broken, broken, of_slot
from tests.worker.loop.engines import ALOUD, QUIET, SmallEngine, assert_mirrors, make_config, short_speech
from tests.worker.loop.scripted_engine import ScriptedEngine, results
from worker.config.session import WindowConfig
from worker.loop.prompt.inserted_text import MAX_TEXT_CHARS
from worker.loop.results import Failure, InsertedText, UnitResult
from worker.loop.session import OrderError, Session, TextInput
from worker.loop.text_stages import PERIOD

HELLO = "<|speak|>Hello there"
NAME = "The caller is Ada."


@pytest.fixture(scope="module")
def built() -> Iterator[ScriptedEngine]:
    with short_speech():
        yield ScriptedEngine()


@pytest.fixture
def engine(built: ScriptedEngine) -> Iterator[ScriptedEngine]:
    yield built
    built.clear()


def insert(engine: SmallEngine | AnsweringEngine, session: Session, text: str = NAME, role: str = "user") -> TextInput:
    """Queue a text. Returns: it."""
    given = TextInput(engine.sessions.text_ids(role, text), arrived=0.0)
    engine.sessions.insert_text(session, given)
    return given


def inserted(engine: SmallEngine, session: Session, text: str = NAME, role: str = "user") -> InsertedText | Failure:
    """Insert a text and run it. Returns: its outcome."""
    insert(engine, session, text, role)
    engine.settle()
    return engine.take(session.id)[-1]


def assert_consistent(engine: SmallEngine, session: Session) -> None:
    assert_mirrors(engine.unit_steps, session.slot)
    rows = engine.unit_steps.context_len(session.slot) + len(session.pending)
    assert rows == session.window.length, f"expected {session.window.length} rows, got {rows}"


# --- rows --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["system", "user"])
def test_rows_are_a_message_as_the_prompt_writes_it(engine: ScriptedEngine, role: str) -> None:
    got = engine.parts.language.message(role, NAME)
    assert got == engine.ids(f"<|im_start|>{role}\n{NAME}<|im_end|>"), engine.tokenizer.decode(got, skip_special=False)


def test_rows_of_an_output_are_a_response_to_the_user(engine: ScriptedEngine) -> None:
    got = engine.parts.language.message("tool", "<tool_call> 3")
    plain = engine.tokenizer.encode_plain("<tool_call> 3")
    head, tail = engine.ids("<|im_start|>user\n<tool_response>\n"), engine.ids("\n</tool_response><|im_end|>")
    assert got == [*head, *plain, *tail], engine.tokenizer.decode(got, skip_special=False)


def test_control_tokens_in_the_text_are_characters(engine: ScriptedEngine) -> None:
    text = "<|im_end|><unit><|speak|> <unit"
    ids = engine.parts.language.message("user", text)
    special = engine.special
    assert [i for i in ids if i in engine.tokenizer.special_ids] == [special.im_start, special.im_end], ids
    assert engine.tokenizer.decode(ids) == f"user\n{text}"


@pytest.mark.parametrize("when", ["before the first unit", "between units", "within a turn"])
@pytest.mark.parametrize("mode", ["explicit", "implicit", "reference"])
def test_context_equals_the_same_rows_in_one_prefill(engine: ScriptedEngine, when: str, mode: str) -> None:
    compat = {"compat": "reference"} if mode == "reference" else {"ls_mode": mode}
    config = QUIET.model_copy(update={"decode_mode": "greedy", **compat})
    lines = {"before the first unit": [], "between units": [HELLO + "<|turn_eos|>"], "within a turn": [HELLO]}[when]
    states = {}
    for apart in (True, False):
        session = engine.start("a", config, *lines, HELLO)
        results(engine.run(session, len(lines)))
        if apart:
            event = inserted(engine, session)
            ids = engine.parts.language.message("user", NAME)
            assert event == InsertedText("a", len(ids)), event
            assert_consistent(engine, session)
        else:
            ids = engine.parts.language.message("user", NAME)
            session.register_unit(len(ids), "text", (), "", True)
            session.set_pending([*session.pending, *ids])  # the next unit's prefill feeds them in front of its own
        [result] = results(engine.run(session, 1))
        assert (result.text, session.turn_open) == ("Hello there", True)
        if mode != "reference":
            assert_consistent(engine, session)
        slot = session.slot
        counters = engine.unit_steps.counters(slot)
        kept = [unit.length for unit in session.window.units], session.window.length, result.tokens
        states[apart] = (*counters[:9], kept), engine.unit_steps.save(slot), engine.record("a").logits[-1]
        engine.clear()
    (host, rows, logits), (host_once, rows_once, logits_once) = states[True], states[False]
    assert host == host_once, f"expected {host_once}, got {host}"
    for one, other in zip(rows, rows_once, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-5)
    torch.testing.assert_close(logits, logits_once, rtol=0, atol=1e-4)


def test_texts_and_units_run_in_the_order_of_sending(engine: ScriptedEngine) -> None:
    session = engine.start("a", QUIET, HELLO, HELLO)
    session.turn_open = True  # an open turn takes one unit at a time
    engine.send(session, 0)
    first = insert(engine, session, "One.")
    second = insert(engine, session, "Two.", "system")
    engine.send(session, 1)
    engine.settle()
    events = [event for event in engine.take("a") if isinstance(event, UnitResult | InsertedText)]
    kinds = [event.n_rows if isinstance(event, InsertedText) else event.index for event in events]
    assert kinds == [1, len(first.ids), len(second.ids), 2], events
    fed = [rows for what, _, rows in engine.record("a").fed if what == "prefill"]
    special = engine.special
    assert fed[1].ids.tolist() == [special.chunk_eos, special.unit_end, *first.ids]
    assert fed[2].ids.tolist() == [*second.ids]
    assert fed[3].ids.tolist()[0] == special.unit_start
    assert_consistent(engine, session)


def test_text_within_a_turn_does_not_touch_its_speech(engine: ScriptedEngine) -> None:
    """The turn's speech goes on behind the text, and what it drains is drained."""
    outcomes = {}
    config = ALOUD.model_copy(update={"drain_s": 2, "max_new_speak_tokens_per_chunk": 9})
    for texts in (False, True):
        session = engine.start("a", config, HELLO, HELLO + "<|turn_eos|>")
        engine.end_with(session, None)
        units = []
        for number in range(4):
            units += results([engine.run_unit(session, number)])
            if texts:
                assert isinstance(inserted(engine, session), InsertedText)
        calls = [(call.start, call.n_rows, call.least, len(call.speech_tokens)) for call in engine.record("a").spoke]
        outcomes[texts] = calls, [(one.text, one.is_listen, one.end_of_turn, one.n_speech_tokens) for one in units]
        engine.clear()
    assert outcomes[True] == outcomes[False]


def test_result_counts_the_rows_of_the_texts_before_it(engine: ScriptedEngine) -> None:
    session = engine.start("a", QUIET, "<|listen|>", HELLO, "<|listen|>")
    n = len(engine.parts.language.message("user", NAME))
    insert(engine, session)
    insert(engine, session)
    rows = [engine.run_unit(session, number, pictures=[1] * (number == 1)).rows for number in range(3)]
    n_image = engine.parts.language.image_rows
    # <unit>; then the two ids that close the unit before it.
    assert rows == [(2 * n + 1, 10, 0), (3 + 2, 10, n_image), (3, 10, 0)], rows
    assert sum(map(sum, rows)) + len(session.pending) + session.window.preserve + 4 == session.window.length


# --- window and limits -------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["basic", "context"])
def test_window_evicts_texts_like_units(mode: str) -> None:
    engine = SmallEngine(observer=None)
    window = WindowConfig(mode=mode, high_tokens=150, low_tokens=100, max_units=4, previous_max_tokens=8)
    session = engine.open("a", QUIET.model_copy(update={"window": window, "force_listen_count": 1000}))
    for number in range(8):
        assert isinstance(inserted(engine, session, f"Fact number {number}."), InsertedText)
        assert_consistent(engine, session)
        assert isinstance(engine.run_unit(session, number), UnitResult)
        assert_consistent(engine, session)
    kinds = {unit.kind for unit in session.window.units}
    assert session.window.dropped_units > 4 and kinds == {"audio", "text"}, (session.window.dropped_units, kinds)


@pytest.mark.parametrize("window", ["off", "basic", "context"])
def test_refuses_a_text_that_leaves_no_room_for_a_unit(window: str) -> None:
    engine = SmallEngine(make_config(llm_len=200))
    settings = WindowConfig(mode=window, high_tokens=90, low_tokens=60, previous_max_tokens=20)
    session = engine.open("a", QUIET.model_copy(update={"window": settings, "force_listen_count": 1000}))
    before = engine.unit_steps.counters(session.slot)
    refused = inserted(engine, session, "word " * 80)
    assert isinstance(refused, Failure) and isinstance(refused.error, ContextOverflowError), refused
    assert "text inserted into session a: expected at most" in str(refused.error), refused.error
    assert engine.unit_steps.counters(session.slot)[:9] == before[:9], "expected the context as it was"
    assert isinstance(inserted(engine, session, "a"), InsertedText)
    assert all(isinstance(engine.run_unit(session, number), UnitResult) for number in range(2))
    assert_consistent(engine, session)


def test_limits_the_texts_between_two_units(engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.loop.prompt.inserted_text.MAX_TEXT_ROWS", 40)
    session = engine.start("a", QUIET, "<|listen|>")
    n = len(engine.parts.language.message("user", NAME))
    outcomes = [inserted(engine, session) for _ in range(3)]
    assert [type(one) for one in outcomes] == [InsertedText, InsertedText, Failure], outcomes
    assert f"expected at most {40 - 2 * n} rows, got {n}" in str(outcomes[2].error)
    results(engine.run(session, 1))
    assert isinstance(inserted(engine, session), InsertedText), "expected room again after a unit"


def test_refuses_a_long_text_before_it_is_tokenized(engine: ScriptedEngine) -> None:
    with pytest.raises(ContextOverflowError, match=f"text: expected at most {MAX_TEXT_CHARS} characters, got"):
        engine.sessions.text_ids("user", "x" * (MAX_TEXT_CHARS + 1))


# --- order and failures ------------------------------------------------------------------------------


def test_accepts_texts_while_paused_only(engine: ScriptedEngine) -> None:
    session = engine.start("a", QUIET, HELLO)
    engine.sessions.pause(session)
    assert isinstance(inserted(engine, session), InsertedText)
    engine.sessions.resume(session)
    engine.sessions.stop(session)
    with pytest.raises(OrderError, match="session a: text: expected a session that is open or paused, got stopped"):
        insert(engine, session)
    engine.sessions.clear_stop(session)
    assert engine.run_unit(session, 0).text == "Hello there"
    unprepared = engine.sessions.open("b", QUIET, engine.events["b"].append)
    with pytest.raises(OrderError, match="session b: text"):
        insert(engine, unprepared)


def test_waiting_text_of_a_stopped_session_fails(engine: ScriptedEngine) -> None:
    session = engine.start("a", QUIET, HELLO)
    engine.send(session, 0)
    engine.sessions.dispatch()
    insert(engine, session)
    engine.sessions.stop(session)
    [failure] = [event for event in engine.take("a") if isinstance(event, Failure)]
    assert "a text that waited: expected its turn to come" in str(failure.error)


def test_failing_text_changes_nothing(engine: ScriptedEngine) -> None:
    tokens = {}
    for fails in (False, True):
        session = engine.start("a", QUIET.model_copy(update={"decode_mode": "greedy"}))
        engine.script.is_off = True
        first = results(engine.run(session, 1))
        if fails:
            at, pending = engine.unit_steps.counters(session.slot), list(session.pending)
            with broken(engine.unit_steps.regions, "unit_prefill", of_slot(session.slot), "after"):
                failure = inserted(engine, session)
            assert isinstance(failure, Failure) and isinstance(failure.error, Broken), failure
            assert engine.unit_steps.counters(session.slot)[:9] == at[:9] and session.pending == pending
        tokens[fails] = [one.tokens for one in (*first, *results(engine.run(session, 2)))]
        engine.clear()
    assert tokens[True] == tokens[False]


def test_other_sessions_do_not_notice_it(engine: ScriptedEngine) -> None:
    tokens = {}
    for texts in (False, True):
        engine.script.is_off = True
        sessions = [engine.start(name, QUIET.model_copy(update={"seed": 3})) for name in ("a", "b")]
        for number in range(2):
            if texts:
                insert(engine, sessions[0], "word " * 40)
            for session in sessions:
                engine.send(session, number)
            engine.settle()
        tokens[texts] = [event.tokens for event in engine.take("b") if isinstance(event, UnitResult)]
        engine.clear()
    assert tokens[True] == tokens[False]


# --- fair shares -------------------------------------------------------------------------------------


def test_long_text_yields_to_units_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = AnsweringEngine(make_parts(2, rows=(16, 64)))
    writer, other = engine.open("writer"), engine.open("other")
    work = Work(engine, monkeypatch)
    insert(engine, writer, "word " * 120)
    parts: list[int] = []  # iterations in which the text had a part while a unit had text to work on
    number = 0
    while not engine.events["writer"]:
        if not other.is_busy:
            script(engine, other=[engine.language.special.speak, *words(engine, 9)])
            engine.send(other, number)
            number += 1
        work.step()
        if work.rows[-1].get(writer.slot) and other.is_busy:
            parts.append(len(work.rows))
        assert work.rows[-1].get(writer.slot, 0) <= 64
        assert len(work.rows) < 200, "expected the text within 200 iterations"
    assert len(parts) > 2, f"expected parts beside units, got them at iterations {parts}"
    waits = [later - earlier for earlier, later in pairwise(parts)]
    assert min(waits) >= PERIOD, f"expected {PERIOD} iterations between two parts, got {waits}"


def test_flood_of_texts_does_not_hold_up_a_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take turns, and the parts of both together keep the bounds that a chat alone keeps."""
    engine = AnsweringEngine(make_parts(2, rows=(16, 64)))
    writer = engine.open("writer")
    work = Work(engine, monkeypatch)
    chat = engine.ask("chat", "word " * 200, config=WRITTEN)
    for _ in range(3):
        insert(engine, writer, "word " * 60)
    fed: list[int] = []
    while not engine.events["chat"]:
        work.step()
        [(slot, n_rows)] = work.rows[-1].items()
        assert n_rows <= 64, f"expected one part of at most 64 rows, got {n_rows}"
        fed.append(slot)
        assert fed[-2:] != [writer.slot] * 2, f"expected the chat's turn after a text's, got {fed}"
    assert fed.count(writer.slot) > 4 and fed.count(chat.slot) > 4, fed
