"""Ends of turns: by the text, by forced listening and by an interrupt; nothing of a turn reaches the next one."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.worker.loop.engines import (
    ALOUD,
    QUIET,
    UNIT_TOKENS,
    assert_same_events,
    make_config,
    make_parts,
    make_prompt,
    make_sound,
    short_speech,
)
from tests.worker.loop.scripted_engine import SILENCE, ScriptedEngine, results
from worker.config.session import SessionConfig
from worker.engine import Engine
from worker.loop.results import Failure, PartialResult, UnitResult
from worker.loop.session import OrderError, Session

HELLO = "<|speak|>Hello there"
SHORT_DRAIN = ALOUD.model_copy(update={"drain_s": 0, "max_new_speak_tokens_per_chunk": 9})


@pytest.fixture(scope="module")
def built() -> Iterator[ScriptedEngine]:
    with short_speech():
        yield ScriptedEngine()


@pytest.fixture
def engine(built: ScriptedEngine) -> Iterator[ScriptedEngine]:
    yield built
    built.clear()


def names(engine: ScriptedEngine, tokens: Any) -> str:
    return engine.tokenizer.decode(tokens, skip_special=False)


# --- ends of turns -----------------------------------------------------------------------------------


def test_speaks_a_unit_that_ends_its_turn_and_listens(engine: ScriptedEngine) -> None:
    session = engine.start("a", SHORT_DRAIN, HELLO + "<|turn_eos|><|listen|>", HELLO)
    engine.end_with(session, None)
    [result] = results(engine.run(session, 1))
    decided = result.is_listen, result.end_of_turn, result.text
    assert decided == (False, True, "Hello there"), f"expected text that ends the turn, got {decided}"
    [call] = engine.record("a").spoke
    n_rows = len(engine.ids("Hello there<|turn_eos|>")) + 1
    assert call.n_rows == n_rows, f"rows spoken from: expected {n_rows}, got {call.n_rows}"
    assert engine.record("a").voiced_tokens == [SILENCE + tuple(call.speech_tokens)], (
        "expected every speech token to be voiced"
    )
    assert result.pcm is not None and result.pcm.any(), "expected sound, got none"
    engine.assert_silent_voice(session)


def test_character_cap_after_turn_eos_keeps_the_turn_closed(engine: ScriptedEngine) -> None:
    config = SHORT_DRAIN.model_copy(update={"max_chars_per_chunk": 12, "generate_audio": False})
    session = engine.start("a", config, HELLO + "<|turn_eos|>friend", "<|listen|>")
    capped, after = results(engine.run(session, 2))
    assert (capped.text, capped.end_of_turn) == ("Hello there", True), f"expected a turn that ends, got {capped}"
    assert after.tokens == (engine.special.listen,), (
        f"afterwards: expected to listen, got {names(engine, after.tokens)}"
    )
    assert after.is_listen, "afterwards: expected a unit that listens"


@pytest.mark.parametrize("text", ["é", "🙂", "€ 1"])
def test_character_split_across_units_is_decoded(engine: ScriptedEngine, text: str) -> None:
    ids, special = engine.ids(text), engine.special
    lines = [[special.speak, token] for token in ids[:-1]] + [[special.speak, ids[-1], special.turn_eos]]
    session = engine.start("a", QUIET, *lines)
    said = [one.text for one in results(engine.run(session, len(lines)))]
    assert "".join(said) == text, f"expected {text!r} over all units, got {said}"


def test_incomplete_character_is_flushed_at_the_end_of_the_turn(engine: ScriptedEngine) -> None:
    half, special = engine.ids("🙂")[:2], engine.special
    session = engine.start("a", QUIET, [special.speak, *half, special.turn_eos], HELLO)
    said = [one.text for one in results(engine.run(session, 2))]
    assert said == ["\ufffd", "Hello there"], f"expected nothing of it in the next turn, got {said}"


# --- interrupts and forced listening -------------------------------------------------------------------


def assert_silenced(engine: ScriptedEngine, result: UnitResult) -> None:
    decided = result.is_listen, result.end_of_turn, result.n_speech_tokens
    assert decided == (True, True, 0), f"expected a silent unit that ends the turn, got {decided}"
    special = engine.special
    ends = result.tokens[-2:]
    assert ends == (special.turn_eos, special.listen), f"expected the turn closed, got {names(engine, result.tokens)}"


def assert_starts_turn(engine: ScriptedEngine, session: Session, result: UnitResult) -> None:
    """The unit of the result is the first of a turn."""
    record = engine.record(session.id)
    call = record.spoke[-1]
    assert (call.start, call.least) == (0, 0), f"speech call: expected the start of a turn, got {call}"
    assert record.voiced[-1].speech_tokens[:3] == SILENCE, f"vocoder: expected silence first, got {record.voiced[-1]}"
    assert result.text == "Hello there" and not result.is_listen, f"expected words, got {result}"


def speaking(engine: ScriptedEngine, *more: str, config: SessionConfig = ALOUD) -> Session:
    """A session two units into a turn."""
    session = engine.start("a", config, HELLO, HELLO, *more)
    engine.end_with(session, None)
    results(engine.run(session, 2))
    assert session.turn_open, "expected an open turn"
    assert engine.unit_steps.speech_rows(session.slot) > 0, "expected speech rows"
    return session


@pytest.mark.parametrize("how", ["forced", "interrupted"])
def test_silencing_between_units_resets_speech(engine: ScriptedEngine, how: str) -> None:
    session = speaking(engine)
    if how == "interrupted":
        engine.sessions.break_speech(session)
    [result] = results([engine.run_unit(session, 5, force_listen=how == "forced")])
    assert_silenced(engine, result)
    assert result.pcm is None, f"expected no sound, got {len(result.pcm)} samples"
    engine.assert_silent_voice(session)


@pytest.mark.parametrize("how", ["forced", "interrupted"])
def test_silencing_a_draining_turn_resets_speech(engine: ScriptedEngine, how: str) -> None:
    session = engine.start("a", ALOUD, HELLO + "<|turn_eos|>")
    engine.end_with(session, None)
    [spoke] = results(engine.run(session, 1))
    assert not spoke.end_of_turn and session.speech.draining, "expected a draining turn"
    if how == "interrupted":
        engine.sessions.break_speech(session)
    [result] = results([engine.run_unit(session, 5, force_listen=how == "forced")])
    decided = result.is_listen, result.end_of_turn, result.n_speech_tokens
    assert decided == (True, True, 0), f"expected a silent unit that ends the turn, got {decided}"
    engine.assert_silent_voice(session)


@pytest.mark.parametrize("how", ["forced", "interrupted"])
def test_unit_after_silencing_starts_a_turn(engine: ScriptedEngine, how: str) -> None:
    session = speaking(engine, HELLO)
    if how == "interrupted":
        engine.sessions.break_speech(session)
    results([engine.run_unit(session, 5, force_listen=how == "forced")])
    [after] = results(engine.run(session, 1))
    assert_starts_turn(engine, session, after)


@pytest.mark.parametrize("at", [0, 1, 2])
def test_interrupt_stops_at_the_next_token(engine: ScriptedEngine, at: int) -> None:
    session = speaking(engine, "<|speak|>one two three", HELLO)

    def interrupt(job: Any, n_sampled: int) -> None:
        if n_sampled == at:
            engine.sessions.break_speech(session)

    engine.script.before_token = interrupt
    [result] = results(engine.run(session, 1))
    engine.script.before_token = None
    assert_silenced(engine, result)
    said = engine.ids("<|speak|>one two three")[:at]
    assert list(result.tokens[:-2]) == said, f"expected {names(engine, said)}, got {names(engine, result.tokens)}"
    assert len(engine.record("a").spoke) == 2, "expected no speech tokens after the interrupt"
    [after] = results(engine.run(session, 1))
    assert_starts_turn(engine, session, after)


def test_interrupt_resets_all_speech_state(engine: ScriptedEngine) -> None:
    session = speaking(engine, HELLO)
    engine.script.before_token = lambda job, n_sampled: n_sampled == 2 and engine.sessions.break_speech(session)
    results(engine.run(session, 1))
    engine.assert_silent_voice(session)


def run_into_speech(engine: ScriptedEngine, session: Session) -> None:
    """Send a unit and run it until its speech call has begun."""
    session.reconfigure(session.config.model_copy(update={"sound_ramp": (3,)}))  # drawn in several iterations
    engine.send(session, 7)
    while engine.step():
        [job] = engine.loop.jobs
        if job.calls and job.calls[0].is_begun:
            return
    raise AssertionError("expected a unit that speaks")


@pytest.mark.parametrize("mode", ["explicit", "implicit"])
def test_interrupt_while_drawing_stops_the_speech(engine: ScriptedEngine, mode: str) -> None:
    session = speaking(engine, HELLO, HELLO, config=ALOUD.model_copy(update={"ls_mode": mode}))
    run_into_speech(engine, session)
    engine.sessions.break_speech(session)
    n_before = len(engine.events["a"])
    engine.settle()
    *said, result = engine.take("a")[n_before:]
    assert not said, f"expected nothing but the result, got {said}"
    decided = result.is_listen, result.end_of_turn, result.text, result.n_speech_tokens < UNIT_TOKENS
    assert decided == (True, True, "Hello there", True), f"expected no more speech and the turn's end, got {decided}"
    ends = names(engine, session.pending)
    expected = "<|turn_eos|><|chunk_eos|></unit>" if mode == "explicit" else "<|turn_eos|></unit>"
    assert ends == expected, f"context: expected {expected} to close the unit, got {ends}"
    assert names(engine, result.tokens).endswith(expected.removesuffix("</unit>")), f"got {result.tokens}"
    assert session.window.length == engine.rows(session) + len(session.pending), "expected every row to be counted"
    drawn = int(engine.unit_steps.state.speech.sampler.draws[session.slot])
    counted = engine.unit_steps.counters(session.slot).speech_draws
    assert drawn == counted, f"random numbers used: expected those of finished units, {counted}, got {drawn}"
    [after] = results(engine.run(session, 1))
    assert_starts_turn(engine, session, after)


def test_interrupt_silences_a_draining_turn(engine: ScriptedEngine) -> None:
    session = engine.start("a", ALOUD, HELLO + "<|turn_eos|>")
    engine.end_with(session, None)
    results(engine.run(session, 1))
    run_into_speech(engine, session)
    engine.sessions.break_speech(session)
    engine.settle()
    result = engine.take("a")[-1]
    assert (result.is_listen, result.end_of_turn) == (True, True), f"expected the turn's end, got {result}"
    assert engine.special.turn_eos not in result.tokens, "expected no second turn_eos"
    engine.assert_silent_voice(session)


def test_cancelled_interrupt_has_no_effect(engine: ScriptedEngine) -> None:
    received = []
    for name in ("plain", "taken back"):
        session = engine.start(name, ALOUD, HELLO, HELLO, HELLO)
        results(engine.run(session, 1))
        if name != "plain":
            engine.sessions.break_speech(session)
            engine.sessions.break_speech(session, False)
        for number in (1, 2):
            engine.send(session, number)
        engine.settle()
        received.append(engine.take(name))
    assert_same_events("after a cancelled interrupt", received[1], received[0])


def test_interrupt_affects_one_unit(engine: ScriptedEngine) -> None:
    session = engine.start("a", QUIET, HELLO, HELLO, HELLO)
    engine.sessions.break_speech(session)
    listens = [one.is_listen for one in results(engine.run(session, 3))]
    assert listens == [True, False, False], f"expected one silent unit, got {listens}"


def test_new_prompt_cancels_an_interrupt(engine: ScriptedEngine) -> None:
    session = engine.start("a", QUIET, HELLO)
    engine.sessions.break_speech(session)
    engine.sessions.prepare(session, make_prompt())
    [result] = results(engine.run(session, 1))
    assert not result.is_listen, "expected a unit that speaks"


def test_forced_listening_at_the_start_keeps_speech_state_empty(engine: ScriptedEngine) -> None:
    session = engine.start("a", ALOUD.model_copy(update={"force_listen_count": 2}), HELLO)
    quiet = results(engine.run(session, 2))
    assert all(one.is_listen and not one.end_of_turn for one in quiet), f"expected units that only listen, got {quiet}"
    engine.assert_silent_voice(session)


# --- stop and pause --------------------------------------------------------------------------------------


def test_stopped_session_refuses_units_and_fails_waiting_ones(engine: ScriptedEngine) -> None:
    session = engine.start("a", QUIET, HELLO, HELLO, HELLO)
    for number in range(3):
        engine.send(session, number)
    engine.sessions.dispatch()  # the first one runs, two wait
    engine.sessions.stop(session)
    with pytest.raises(OrderError, match="a: unit: expected a session that is open, got stopped"):
        engine.send(session, 3)
    engine.settle()
    done = [event for event in engine.take("a") if not isinstance(event, PartialResult)]
    dropped = [event for event in done if isinstance(event, Failure)]
    assert len(dropped) == 2, f"expected failures of the two waiting units, got {done}"
    ran = [event for event in done if event not in dropped]
    assert len(results(ran)) == 1, f"expected the unit that ran to be finished, got {done}"
    engine.sessions.clear_stop(session)
    [after] = results(engine.run(session, 1))
    assert after.index == 2, f"units counted: expected 2, got {after.index}"


def test_paused_session_refuses_units_and_keeps_its_state(engine: ScriptedEngine) -> None:
    received = []
    for name in ("plain", "paused"):
        session = engine.start(name, ALOUD, HELLO, HELLO, HELLO + "<|turn_eos|>")
        for number in range(4):
            if name == "paused":
                rows = engine.rows(session)
                engine.sessions.pause(session)
                with pytest.raises(OrderError, match="expected a session that is open, got paused"):
                    engine.send(session, 9)
                engine.settle()
                assert engine.rows(session) == rows, f"context rows while paused: expected {rows}"
                engine.sessions.resume(session)
            engine.send(session, number)
            engine.settle()
        received.append(engine.take(name))
    assert_same_events("a session that paused", received[1], received[0])


def test_engine_handle_raises_order_error() -> None:
    config = make_config()
    with Engine(make_parts(config), config) as engine:
        handle = engine.open("a", QUIET, lambda event: None).result(60)
        handle.prepare(make_prompt()).result(60)
        for refuse, accept in ((handle.stop, handle.clear_stop), (handle.pause, handle.resume)):
            refuse().result(60)
            with pytest.raises(OrderError):
                handle.send(make_sound(0)).result(60)
            accept().result(60)
            handle.send(make_sound(0)).result(60)
