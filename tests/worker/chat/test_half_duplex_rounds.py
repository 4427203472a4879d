"""Half-duplex conversations: rounds that are taken back or fail, sampling, ends, and concurrent conversations."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from models.stages.runner import Runner
from models.stages.unit_steps import UnitSteps
from tests.worker.chat.half_duplex_driver import Conversation, half_duplex_engine, script
from tests.worker.chat.reply_engine import AnsweringEngine, make_parts, rows_of
from tests.worker.loop.engines import assert_same_events
from worker.assembly.parts import EngineParts
from worker.chat.config import HalfDuplexConfig, ReplyConfig
from worker.loop.results import Event, Failure, ReplyResult
from worker.loop.session import OrderError


@pytest.fixture
def engine(parts: EngineParts) -> Iterator[AnsweringEngine]:
    with half_duplex_engine(parts) as engine:
        yield engine


def outcomes(conversation: Conversation, waves: Sequence[np.ndarray]) -> list[Event]:
    return [conversation.say(wave) for wave in waves]


@pytest.fixture
def undisturbed(engine: AnsweringEngine, greeting: np.ndarray, question: np.ndarray) -> list[Event]:
    conversation = Conversation(engine, "undisturbed")
    results = outcomes(conversation, [greeting, question])
    conversation.half_duplex.close()
    return results


@pytest.mark.parametrize("n_steps", [0, 1, 6, 11])
def test_take_back_removes_the_round(
    engine: AnsweringEngine, greeting: np.ndarray, question: np.ndarray, undisturbed: list[Event], n_steps: int
) -> None:
    conversation = Conversation(engine)
    first = conversation.say(greeting)
    before = rows_of(engine.unit_steps, conversation.slot)
    script(engine, "x" * 15)
    conversation.push(greeting)
    for _ in range(n_steps):
        engine.step()
    script(engine)
    n = len(conversation.events)
    assert conversation.half_duplex.take_back().result() is True
    conversation.check()
    engine.settle()
    assert len(conversation.events) == n, "expected no outcome"
    for one, other in zip(before, rows_of(engine.unit_steps, conversation.slot), strict=True):
        assert torch.equal(one, other), "expected the context as it was"
    assert conversation.half_duplex.take_back().result() is False
    assert_same_events("conversation", [first, conversation.say(question)], undisturbed)


@pytest.mark.parametrize("stage", ["encode_clips", "feed", "step"])
def test_failed_round_leaves_no_trace(
    engine: AnsweringEngine,
    greeting: np.ndarray,
    question: np.ndarray,
    undisturbed: list[Event],
    stage: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    conversation = Conversation(engine)
    first = conversation.say(greeting)
    before = rows_of(engine.unit_steps, conversation.slot)
    owner = Runner if stage == "encode_clips" else UnitSteps
    real, count = getattr(owner, stage), [0]

    def broken(*given: Any, **options: Any) -> Any:
        count[0] += 1
        if count[0] > (5 if stage == "step" else 0):
            raise RuntimeError("broken")
        return real(*given, **options)

    script(engine, "x" * 15)
    with monkeypatch.context() as patch:
        patch.setattr(owner, stage, broken)
        failure = conversation.say(greeting)
    script(engine)
    assert isinstance(failure, Failure) and str(failure.error) == "broken" and failure.unit == 2
    for one, other in zip(before, rows_of(engine.unit_steps, conversation.slot), strict=True):
        assert torch.equal(one, other), "expected the context as it was"
    assert_same_events("conversation", [first, conversation.say(question)], undisturbed)


def test_close_takes_effect_at_once(engine: AnsweringEngine, greeting: np.ndarray) -> None:
    conversation = Conversation(engine)
    conversation.push(greeting)
    engine.step()
    n = len(conversation.events)
    assert conversation.half_duplex.close().result() is None
    assert engine.n_free == (3, 3)
    engine.settle()
    conversation.push(greeting)
    assert len(conversation.events) == n, "expected no more events"
    assert isinstance(conversation.half_duplex.close().exception(), OrderError)
    idle = Conversation(engine, "idle")
    idle.half_duplex.close()
    idle.push(greeting)
    assert idle.events == [], "expected sound to be dropped after close"


def test_concurrent_conversations_stay_independent(
    engine: AnsweringEngine, greeting: np.ndarray, question: np.ndarray, undisturbed: list[Event]
) -> None:
    conversations = [Conversation(engine, name) for name in ("one", "two")]
    conversations[0].push(greeting)
    engine.step()
    engine.step()
    conversations[1].push(greeting)
    engine.settle()
    conversations[1].push(question)
    engine.step()
    conversations[0].push(question)
    engine.settle()
    for conversation in conversations:
        results = [event for event in conversation.events if isinstance(event, ReplyResult)]
        assert_same_events(conversation.name, results, undisturbed)


@pytest.fixture(scope="module")
def drawing_engine() -> Iterator[AnsweringEngine]:
    engine = AnsweringEngine(make_parts())
    yield engine
    engine.sessions.close_all()


def answer(engine: AnsweringEngine, name: str, **settings: float) -> tuple[int, ...]:
    """Ids of the first answer of a half-duplex conversation."""
    config = HalfDuplexConfig(reply=ReplyConfig(max_new_tokens=12, **settings))
    messages = [{"role": "system", "content": ["You are kind."]}]
    system = engine.reader.cut(engine.reader.read(messages, config.reply.prompt_options()))
    session = engine.answers.converse(name, system, config, engine.events[name].append)
    engine.answers.answer(session, engine.content("Tell me."), config.reply, 0.0)
    result = engine.outcome(name)
    engine.sessions.close(session)
    assert isinstance(result, ReplyResult), f"expected an answer, got {result}"
    return result.tokens


@pytest.mark.parametrize(
    ("cold", "hot"), [({"temperature": 0.001}, {"temperature": 2.0}), ({"top_k": 1}, {"top_k": 0})]
)
def test_clients_sampling_settings_apply_to_answers(
    drawing_engine: AnsweringEngine, cold: dict[str, float], hot: dict[str, float]
) -> None:
    most_likely = [answer(drawing_engine, f"cold {seed}", seed=seed, **cold) for seed in (1, 2)]
    assert most_likely[0] == most_likely[1], f"{cold}: expected the most likely tokens for any seed, got {most_likely}"
    drawn = [answer(drawing_engine, f"hot {seed}", seed=seed, top_p=1.0, **hot) for seed in (1, 2)]
    assert drawn[0] != drawn[1], f"{hot}: expected different draws for different seeds, got twice {drawn[0]}"
