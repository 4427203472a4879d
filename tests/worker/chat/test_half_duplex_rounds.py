"""Half-duplex conversations: rounds that are taken back or fail, conversations that close, and concurrent ones."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from models.stages.runner import Runner
from models.stages.unit_steps import UnitSteps
from tests.worker.chat.half_duplex_driver import Conversation, half_duplex_engine, script
from tests.worker.chat.reply_engine import AnsweringEngine, rows_of
from tests.worker.loop.engines import assert_same_events
from worker.assembly.parts import EngineParts
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
