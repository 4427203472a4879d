"""Replies with beam search: text of the search, speech after it, rounds, cancellation, errors, live units beside it."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from torch import Tensor

from models.errors import NumericsError
from models.sampling.beams import Found
from models.stages.message_reader import Content
from tests.worker.chat.reply_engine import (
    ASKED,
    AnsweringEngine,
    answering,
    partials,
    script,
)
from tests.worker.loop.engines import ALOUD, assert_same_events
from worker.assembly.parts import EngineParts
from worker.chat.config import HalfDuplexConfig, ReplyConfig
from worker.loop.results import Failure, ReplyResult
from worker.loop.session import Session
from worker.loop.text_stages import MAX_SEARCHES, SHARE

WRITTEN = ReplyConfig(
    max_new_tokens=14, decode_mode="greedy", num_beams=3, repetition_penalty=1.2, tts_temperature=1e-5, seed=2
)
SPOKEN = WRITTEN.model_copy(update={"speak": True, "max_new_tokens": 23})
GREEDY = {"num_beams": 1}


@pytest.fixture
def engine(parts: EngineParts) -> Iterator[AnsweringEngine]:
    with answering(parts) as engine:
        yield engine


def search(engine: AnsweringEngine, content: Content, config: ReplyConfig) -> Found:
    """The result of the search in a slot of its own."""
    steps, language = engine.unit_steps, engine.language
    ends = language.reply_terminators | {language.special.endoftext}
    with steps.lease() as slot:
        (chosen,) = steps.feed([slot], [steps.encode_content(content)], [False])
        found = steps.beams.begin(slot, config.beam_settings(ends, speaks=config.speak), chosen.logits)
        assert found is not None
        while not found.is_over:
            assert steps.beams.step([found]) == [True]
    return found.found


def is_searching(engine: AnsweringEngine, n: int = 1) -> bool:
    """Whether all jobs search and the first `n` tokens are known."""
    searches = [job.search for job in engine.loop.jobs]
    return bool(searches) and all(one is not None and one.n_tokens >= n for one in searches)


# --- text and speech -------------------------------------------------------------------------------


def test_text_is_that_of_the_search_in_one_piece(engine: AnsweringEngine) -> None:
    expected = search(engine, engine.content(ASKED), WRITTEN)
    engine.ask("a", ASKED, config=WRITTEN)
    got = engine.outcome("a")
    assert (got.tokens, got.stopped) == (expected.ids, expected.stopped)
    assert got.text == engine.language.text(expected.ids) != ""
    assert [piece.text for piece in partials(engine.take("a"))] == [got.text]
    engine.ask("b", ASKED, config=WRITTEN.model_copy(update=GREEDY))
    assert engine.outcome("b").tokens != got.tokens, "expected another text than without beams"


def test_stop_token_ends_the_reply(engine: AnsweringEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first token of the text becomes a terminator, and the reply ends with its best hypothesis."""
    free = search(engine, engine.content(ASKED), WRITTEN)
    monkeypatch.setattr(engine.language, "reply_terminators", frozenset({free.ids[5]}))
    expected = search(engine, engine.content(ASKED), WRITTEN)
    engine.ask("a", ASKED, config=WRITTEN)
    got = engine.outcome("a")
    assert (got.tokens, got.stopped) == (expected.ids, expected.stopped)
    assert free.ids[5] not in got.tokens


@pytest.mark.parametrize("limit", [7, 10, 23])
def test_found_text_is_voiced_like_a_text_that_was_sampled(engine: AnsweringEngine, limit: int) -> None:
    config = SPOKEN.model_copy(update={"max_new_tokens": limit})
    expected = search(engine, engine.content(ASKED, config=config), config)
    script(engine, sampled=expected.ids)
    sampled = config.model_copy(update={**GREEDY, "max_new_tokens": len(expected.ids)})
    engine.ask("sampled", ASKED, config=sampled)
    engine.settle()
    engine.ask("found", ASKED, config=config)
    result = engine.outcome("found")
    assert result.tokens == expected.ids
    assert result.context_len == result.n_prompt + len(expected.ids)
    assert result.pcm is not None and result.n_speech_tokens > 0
    assert_same_events("found", engine.received("found"), engine.received("sampled"))


def test_rounds_keep_the_found_text_in_their_context(engine: AnsweringEngine) -> None:
    config = HalfDuplexConfig(reply=WRITTEN)
    events, lengths = {}, {}
    for name, reply in (("found", WRITTEN), ("sampled", WRITTEN.model_copy(update=GREEDY))):
        session = engine.answers.converse(name, engine.content("You are kind."), config, engine.events[name].append)
        for number in range(2):
            if name == "sampled":
                script(engine, sampled=events["found"][number].tokens)
                reply = reply.model_copy(update={"max_new_tokens": len(events["found"][number].tokens)})
            engine.answers.answer(session, engine.content(f"Question {number}"), reply, 0.0)
            assert isinstance(engine.outcome(name), ReplyResult)
        events[name] = [event for event in engine.received(name) if isinstance(event, ReplyResult)]
        lengths[name] = engine.sessions.context_len(session)
        engine.sessions.close(session)
    assert lengths["found"] == lengths["sampled"]
    assert [one.tokens for one in events["found"]] == [one.tokens for one in events["sampled"]]
    assert [one.context_len for one in events["found"]] == [one.context_len for one in events["sampled"]]


# --- cancel, close, fail ---------------------------------------------------------------------------


@pytest.mark.parametrize("config", [WRITTEN, SPOKEN], ids=["written", "spoken"])
def test_interrupt_ends_the_search_without_text(engine: AnsweringEngine, config: ReplyConfig) -> None:
    session = engine.ask("a", ASKED, config=config)
    engine.run_until(lambda: is_searching(engine, 3))
    engine.sessions.break_speech(session)
    engine.step()
    (got,) = engine.received("a")
    assert (got.stopped, got.text, got.tokens, got.pcm) == ("interrupted", "", (), None)
    assert engine.loop.is_idle


def test_session_that_closes_ends_its_search(engine: AnsweringEngine) -> None:
    free = engine.n_free
    session = engine.ask("a", ASKED, config=SPOKEN)
    engine.run_until(lambda: is_searching(engine, 3))
    engine.sessions.close(session)
    assert engine.loop.is_idle and engine.n_free == free
    assert engine.received("a") == []


def test_bad_logits_fail_only_their_search(engine: AnsweringEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = search(engine, engine.content(ASKED), WRITTEN)
    for name in ("bad", "good"):
        engine.ask(name, ASKED, config=WRITTEN)
    engine.run_until(lambda: is_searching(engine, 2))
    real = engine.parts.model.llm.logits

    def broken(*given: Any) -> Tensor:
        logits = real(*given)
        logits[0] = float("nan")
        return logits

    with monkeypatch.context() as patch:
        patch.setattr(engine.parts.model.llm, "logits", broken)
        engine.step()
    engine.settle()
    failure, result = engine.received("bad")[-1], engine.received("good")[-1]
    assert isinstance(failure, Failure) and isinstance(failure.error, NumericsError)
    assert result.tokens == expected.ids


def test_step_that_raises_for_one_search_is_repeated_for_the_others(
    engine: AnsweringEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = search(engine, engine.content(ASKED), WRITTEN)
    sessions = [engine.ask(name, ASKED, config=WRITTEN) for name in ("bad", "good")]
    real = engine.unit_steps.beams.step

    def broken(searches: Sequence[Any]) -> list[bool]:
        if any(one.slot == sessions[0].slot for one in searches):
            raise RuntimeError("broken")
        return real(searches)

    monkeypatch.setattr(engine.unit_steps.beams, "step", broken)
    engine.settle()
    assert isinstance(engine.received("bad")[-1], Failure)
    assert engine.received("good")[-1].tokens == expected.ids


# --- beside other jobs -----------------------------------------------------------------------------


def test_units_and_other_replies_do_not_change_beside_searches(engine: AnsweringEngine) -> None:
    def unit(name: str) -> Session:
        session = engine.open(name, ALOUD.model_copy(update={"seed": 5}), 0)
        engine.send(session, 1)
        return session

    engine.ask("alone", ASKED, config=SPOKEN)
    engine.settle()
    engine.sessions.close((unit("unit alone"), engine.settle())[0])
    engine.ask("beside", ASKED, config=SPOKEN)
    engine.run_until(lambda: is_searching(engine, 2))
    session = unit("unit beside")
    engine.settle()
    engine.sessions.close(session)
    assert_same_events("unit", engine.received("unit beside"), engine.received("unit alone"))
    assert_same_events("reply", engine.received("beside"), engine.received("alone"))


def test_search_takes_a_small_share_of_the_time_while_units_come_first(
    engine: AnsweringEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, n_steps, real = 0.0, 0, engine.unit_steps.beams.step

    def slow(searches: Sequence[Any]) -> list[bool]:
        nonlocal now, n_steps
        now, n_steps = now + 0.02, n_steps + 1
        return real(searches)

    monkeypatch.setattr(engine.unit_steps.beams, "step", slow)
    monkeypatch.setattr(engine.loop._batch, "clock", lambda: now)
    engine.ask("a", ASKED, config=WRITTEN)
    engine.run_until(lambda: is_searching(engine))
    monkeypatch.setattr(engine.loop._search, "_due", 0.0)
    n_steps, start = 0, now
    with monkeypatch.context() as patch:
        patch.setattr(engine.loop, "_is_contended", lambda: True)
        while now - start < 1.0:
            engine.step()
            now += 0.005
    assert 0 < 0.02 * (n_steps - 1) <= SHARE * (now - start), f"expected few steps, got {n_steps}"
    engine.settle()
    assert isinstance(engine.received("a")[-1], ReplyResult)


def test_step_serves_a_bounded_number_of_searches(engine: AnsweringEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.loop.text_stages.MAX_SEARCHES", 2)
    sizes, real = [], engine.unit_steps.beams.step

    def counted(searches: Sequence[Any]) -> list[bool]:
        sizes.append(len(searches))
        return real(searches)

    monkeypatch.setattr(engine.unit_steps.beams, "step", counted)
    for name in "abc":
        engine.ask(name, ASKED, config=WRITTEN)
    engine.settle()
    assert max(sizes) == 2 < MAX_SEARCHES
    assert len({engine.received(name)[-1].tokens for name in "abc"}) == 1
