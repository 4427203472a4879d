"""Failures of turn-based replies: the affected sessions, and the remaining part of the reply."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from models.errors import ContextOverflowError, NumericsError, SlotError
from models.token2wav.stream.vocoder import Chunk
from tests.worker.chat.reply_engine import (
    ASKED,
    LLM_LEN,
    LONGER,
    MANY,
    SETTINGS,
    SPOKEN,
    WRITTEN,
    AnsweringEngine,
    alone,
    answering,
    partials,
    replies_alone,
    short_chunks,
)
from tests.worker.loop.engines import assert_same_events
from worker.assembly.parts import EngineParts
from worker.config.session import REPLY_SET, REPLY_TEXT_SET
from worker.loop.results import Event, Failure, ReplyResult
from worker.loop.session import OrderError


@pytest.fixture
def engine(parts: EngineParts) -> Iterator[AnsweringEngine]:
    with answering(parts) as engine:
        yield engine


@pytest.fixture(scope="module")
def expected(parts: EngineParts) -> dict[str, list[Event]]:
    return replies_alone(parts)


def break_down(
    monkeypatch: pytest.MonkeyPatch, owner: Any, stage: str, slot: int, after: int = 0, job: Any = None
) -> None:
    """Make a stage fail for a slot from a given call on; with `job` only until the job has recorded the error."""
    real, count = getattr(owner, stage), [0]

    def call(slots: Sequence[Any], *given: Any, **settings: Any) -> Any:
        if slot in [one.session if isinstance(one, Chunk) else one for one in slots]:
            count[0] += 1
            if count[0] > after and (job is None or job.error is None):
                raise RuntimeError("broken")
        return real(slots, *given, **settings)

    monkeypatch.setattr(owner, stage, call)


@pytest.mark.parametrize(("stage", "after"), [("feed", 0), ("step", 0), ("step", 13)])
def test_failed_reply_affects_no_other_session(
    engine: AnsweringEngine, stage: str, after: int, monkeypatch: pytest.MonkeyPatch, expected: dict[str, list[Event]]
) -> None:
    bad = engine.ask("bad", ASKED, config=LONGER)
    engine.ask("good", ASKED, config=SPOKEN)
    break_down(monkeypatch, engine.unit_steps, stage, bad.slot, after)
    engine.settle()
    failure = engine.take("bad")[-1]
    assert isinstance(failure, Failure) and str(failure.error) == "broken" and failure.unit == 1
    assert_same_events("neighbour", engine.received("good"), expected["spoken"])
    assert len(engine.sessions) == 0


def test_failed_step_does_not_change_the_speech_of_others(
    engine: AnsweringEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their speech is undone with their text and drawn again, with the token history of earlier text chunks."""
    config = LONGER.model_copy(update={"max_new_tokens": 26, "tts_repetition_penalty": 4.0})
    with short_chunks(MANY):
        expected = alone(engine, config)
        bad = engine.ask("bad", ASKED, config=config.model_copy(update={"speak": False}))
        engine.ask("good", ASKED, config=config)
        break_down(monkeypatch, engine.unit_steps, "step", bad.slot, 22)
        engine.settle()
    assert isinstance(engine.take("bad")[-1], Failure)
    assert_same_events("neighbour", engine.received("good"), expected)


def test_nan_logits_fail_one_reply(
    engine: AnsweringEngine, monkeypatch: pytest.MonkeyPatch, expected: dict[str, list[Event]]
) -> None:
    bad = engine.ask("bad", ASKED, config=SPOKEN)
    engine.ask("good", ASKED, config=SPOKEN)
    step, count = engine.unit_steps.step, [0]

    def odd(slots: Sequence[int], *given: Any) -> Any:
        count[0] += 1
        chosen = step(slots, *given)
        return [one._replace(bad=slot == bad.slot and count[0] > 4) for slot, one in zip(slots, chosen, strict=True)]

    monkeypatch.setattr(engine.unit_steps, "step", odd)
    engine.settle()
    assert isinstance(engine.take("bad")[-1].error, NumericsError)
    assert_same_events("neighbour", engine.received("good"), expected["spoken"])


@pytest.mark.parametrize(
    ("stage", "after", "compat"),
    [
        ("condition", 0, "fixed"),
        ("condition", 1, "reference"),
        ("begin", 0, "reference"),
        ("begin", 1, "fixed"),
        ("advance", 2, "fixed"),
        ("start", 0, "fixed"),
        ("start", 1, "reference"),
    ],
)
def test_failed_speech_keeps_the_text(
    engine: AnsweringEngine,
    stage: str,
    after: int,
    compat: str,
    monkeypatch: pytest.MonkeyPatch,
    expected: dict[str, list[Event]],
) -> None:
    whole = expected[compat][-1]
    bad = engine.ask("bad", ASKED, config=SETTINGS[compat])
    engine.ask("good", ASKED, config=SPOKEN)
    owner = engine.vocoder if stage == "start" else engine.unit_steps.speaker
    number = bad.speech.vocoder_slot if stage == "start" else bad.slot
    job = next(job for job in engine.loop.jobs if job.session is bad)
    break_down(monkeypatch, owner, stage, number, after, job)
    late: list[Exception] = []
    engine.observer.speech_call_ended = lambda session, *_: session == "bad" and job.error and late.append(job.error)
    engine.settle()
    assert not late, "expected no speech after the failure"
    events = engine.take("bad")
    result = events[-1]
    assert isinstance(result, ReplyResult), f"expected a result, got {result}"
    assert str(result.voice_error) == "broken"
    assert (result.text, result.tokens, result.stopped) == (whole.text, whole.tokens, whole.stopped)
    assert "".join(piece.text for piece in partials(events)) == whole.text
    n_samples = 0 if result.pcm is None else len(result.pcm)
    assert n_samples < len(whole.pcm) and sum(len(p.pcm) for p in partials(events) if p.pcm is not None) == n_samples
    assert_same_events("neighbour", engine.received("good"), expected["spoken"])
    monkeypatch.undo()
    assert_same_events("the next one in that slot", alone(engine), expected["spoken"])


def test_text_fails_after_its_speech(engine: AnsweringEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = engine.ask("bad", ASKED, config=SPOKEN.model_copy(update={"max_new_tokens": 40}))
    break_down(monkeypatch, engine.unit_steps.speaker, "begin", bad.slot)
    break_down(monkeypatch, engine.unit_steps, "step", bad.slot, 25)
    failure = engine.outcome("bad")
    assert isinstance(failure, Failure) and str(failure.error) == "broken"


def test_refuses_a_conversation_beyond_the_context(engine: AnsweringEngine) -> None:
    n = len(engine.content(ASKED))
    room = LLM_LEN - n
    with pytest.raises(ContextOverflowError, match=rf"expected at most {LLM_LEN} rows.+got {n} \+ {room + 1}"):
        engine.ask("a", ASKED, config=WRITTEN.model_copy(update={"max_new_tokens": room + 1}))
    with pytest.raises(ContextOverflowError, match=rf"got {n} \+ {-(-room // 10) * 10}"):
        engine.ask("a", ASKED, config=WRITTEN.model_copy(update={"max_new_tokens": room, "compat": "reference"}))
    sessions = [engine.ask(str(number), ASKED, config=SPOKEN) for number in range(3)]
    with pytest.raises(SlotError, match="expected a free slot"):
        engine.ask("a", ASKED)
    with pytest.raises(OrderError, match="expected a name that is free"):
        engine.ask("0", ASKED)
    for session in sessions:
        engine.sessions.close(session)


def test_without_a_voice_every_token_is_allowed(engine: AnsweringEngine) -> None:
    for speaker, expected in ((None, REPLY_TEXT_SET), (0, REPLY_SET)):
        session = engine.ask("a", ASKED, config=SPOKEN, speaker=speaker)
        assert int(engine.unit_steps.state.text.set_index[session.slot]) == expected
        result = engine.outcome("a")
        assert (result.pcm is None, result.n_speech_tokens == 0) == (speaker is None,) * 2
