"""Turn-based answers when something goes wrong: whom it reaches, and what is left of the answer."""

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
    heard_alone,
    make_parts,
    partials,
    short_chunks,
)
from tests.worker.loop.engines import assert_told
from worker.assembly.parts import EngineParts
from worker.config.session import REPLY_SET, REPLY_TEXT_SET
from worker.loop.results import Event, Failure, ReplyResult
from worker.loop.session import OrderError


@pytest.fixture(scope="module")
def parts() -> EngineParts:
    return make_parts()


@pytest.fixture
def engine(parts: EngineParts) -> Iterator[AnsweringEngine]:
    with answering(parts) as engine:
        yield engine


@pytest.fixture(scope="module")
def expected(parts: EngineParts) -> dict[str, list[Event]]:
    return heard_alone(parts)


def break_down(
    monkeypatch: pytest.MonkeyPatch, owner: Any, stage: str, slot: int, after: int = 0, job: Any = None
) -> None:
    """A stage fails whenever a slot takes part, from some call of its on; with a job until that has noticed."""
    real, count = getattr(owner, stage), [0]

    def call(slots: Sequence[Any], *given: Any, **knobs: Any) -> Any:
        if slot in [one.session if isinstance(one, Chunk) else one for one in slots]:
            count[0] += 1
            if count[0] > after and (job is None or job.error is None):
                raise RuntimeError("broken")
        return real(slots, *given, **knobs)

    monkeypatch.setattr(owner, stage, call)


@pytest.mark.parametrize(("stage", "after"), [("feed", 0), ("step", 0), ("step", 13)])
def test_an_answer_that_fails_harms_nobody(
    engine: AnsweringEngine, stage: str, after: int, monkeypatch: pytest.MonkeyPatch, expected: dict[str, list[Event]]
) -> None:
    bad = engine.ask("bad", ASKED, config=LONGER)
    engine.ask("good", ASKED, config=SPOKEN)
    break_down(monkeypatch, engine.duplex, stage, bad.slot, after)
    engine.settle()
    failure = engine.take("bad")[-1]
    assert isinstance(failure, Failure) and str(failure.error) == "broken" and failure.unit == 1
    assert_told("neighbour", engine.heard("good"), expected["spoken"])
    assert len(engine.sessions) == 0


def test_a_step_that_fails_does_not_show_in_what_others_speak_meanwhile(
    engine: AnsweringEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their speech is undone with their text, and has to come out the same, recent codes of text chunks before too."""
    config = LONGER.model_copy(update={"max_new_tokens": 26, "tts_repetition_penalty": 4.0})
    with short_chunks(MANY):
        expected = alone(engine, config)
        bad = engine.ask("bad", ASKED, config=config.model_copy(update={"speak": False}))
        engine.ask("good", ASKED, config=config)
        break_down(monkeypatch, engine.duplex, "step", bad.slot, 22)
        engine.settle()
    assert isinstance(engine.take("bad")[-1], Failure)
    assert_told("neighbour", engine.heard("good"), expected)


def test_odd_logits_fail_an_answer_only(
    engine: AnsweringEngine, monkeypatch: pytest.MonkeyPatch, expected: dict[str, list[Event]]
) -> None:
    bad = engine.ask("bad", ASKED, config=SPOKEN)
    engine.ask("good", ASKED, config=SPOKEN)
    step, count = engine.duplex.step, [0]

    def odd(slots: Sequence[int], *given: Any) -> Any:
        count[0] += 1
        chosen = step(slots, *given)
        return [one._replace(bad=slot == bad.slot and count[0] > 4) for slot, one in zip(slots, chosen, strict=True)]

    monkeypatch.setattr(engine.duplex, "step", odd)
    engine.settle()
    assert isinstance(engine.take("bad")[-1].error, NumericsError)
    assert_told("neighbour", engine.heard("good"), expected["spoken"])


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
def test_a_voice_that_fails_leaves_the_text(
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
    owner = engine.vocoder if stage == "start" else engine.duplex.speaker
    number = bad.voice.slot if stage == "start" else bad.slot
    job = next(job for job in engine.loop.jobs if job.session is bad)
    break_down(monkeypatch, owner, stage, number, after, job)
    late: list[Exception] = []
    engine.observer.spoke = lambda session, *_: session == "bad" and job.error and late.append(job.error)
    engine.settle()
    assert not late, "expected no speech behind the failure"
    events = engine.take("bad")
    result = events[-1]
    assert isinstance(result, ReplyResult), f"expected a result, got {result}"
    assert str(result.voice_error) == "broken"
    assert (result.text, result.tokens, result.stopped) == (whole.text, whole.tokens, whole.stopped)
    assert "".join(piece.text for piece in partials(events)) == whole.text
    n_samples = 0 if result.pcm is None else len(result.pcm)
    assert n_samples < len(whole.pcm) and sum(len(p.pcm) for p in partials(events) if p.pcm is not None) == n_samples
    assert_told("neighbour", engine.heard("good"), expected["spoken"])
    monkeypatch.undo()
    assert_told("the next one in that slot", alone(engine), expected["spoken"])


def test_text_may_fail_behind_the_voice(engine: AnsweringEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = engine.ask("bad", ASKED, config=SPOKEN.model_copy(update={"max_new_tokens": 40}))
    break_down(monkeypatch, engine.duplex.speaker, "begin", bad.slot)
    break_down(monkeypatch, engine.duplex, "step", bad.slot, 25)
    failure = engine.outcome("bad")
    assert isinstance(failure, Failure) and str(failure.error) == "broken"


def test_what_does_not_fit_is_refused_at_once(engine: AnsweringEngine) -> None:
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


def test_without_a_voice_nothing_is_kept_from_being_written(engine: AnsweringEngine) -> None:
    for speaker, expected in ((None, REPLY_TEXT_SET), (0, REPLY_SET)):
        session = engine.ask("a", ASKED, config=SPOKEN, speaker=speaker)
        assert int(engine.duplex.state.text.set_index[session.slot]) == expected
        result = engine.outcome("a")
        assert (result.pcm is None, result.n_speech_tokens == 0) == (speaker is None,) * 2
