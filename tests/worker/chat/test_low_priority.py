"""Answers with low priority beside units and other answers, with a clock that only the model's work advances."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.worker.chat.reply_engine import ASKED, WRITTEN, AnsweringEngine, answering
from tests.worker.loop.engines import assert_same_events
from worker.assembly.parts import EngineParts
from worker.config.settings import SettingError
from worker.loop.job import JobPhase
from worker.loop.results import ReplyResult, UnitResult
from worker.loop.text_stages import MAX_UNIT_AGE_S, SHARE

LOW = WRITTEN.model_copy(update={"priority": "low"})
COST_S = 0.02  # of a forward


class ModelClock:
    """A clock that advances with every forward. now: s. forwards: the slots of each."""

    def __init__(self, engine: AnsweringEngine, patch: pytest.MonkeyPatch):
        self.now = 0.0
        self.forwards: list[list[int]] = []
        for name in ("feed", "step"):
            patch.setattr(engine.unit_steps, name, self._counted(getattr(engine.unit_steps, name)))
        patch.setattr(engine.loop._batch, "clock", lambda: self.now)

    def _counted(self, real: Any) -> Any:
        def forward(slots: Sequence[int], *args: Any) -> Any:
            self.now += COST_S
            self.forwards.append(list(slots))
            return real(slots, *args)

        return forward

    def n_of(self, slot: int) -> int:
        """Forwards that served a slot."""
        return sum(slot in slots for slots in self.forwards)


@pytest.fixture
def engine(parts: EngineParts) -> Iterator[AnsweringEngine]:
    with answering(parts) as engine:
        yield engine


def has_result(engine: AnsweringEngine, name: str, kind: type) -> bool:
    return any(isinstance(event, kind) for event in engine.events[name])


def n_iterations(engine: AnsweringEngine, name: str) -> int:
    """Iterations of the loop until a unit's result."""
    n = 0
    while not has_result(engine, name, UnitResult):
        engine.step()
        n += 1
    return n


def test_alone_it_equals_an_answer_with_normal_priority(engine: AnsweringEngine) -> None:
    engine.ask("normal", ASKED, speaker=None)
    engine.settle()
    engine.ask("low", ASKED, config=LOW, speaker=None)
    engine.settle()
    assert_same_events("low", engine.received("low"), engine.received("normal"))


def test_a_unit_that_may_be_late_has_the_engine_to_itself(
    engine: AnsweringEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    unit = engine.open("unit")
    engine.send(unit, 1)
    alone = n_iterations(engine, "unit")
    expected = engine.received("unit")
    engine.sessions.close(unit)
    clock = ModelClock(engine, monkeypatch)
    asked = engine.ask("low", ASKED, config=LOW, speaker=None)
    engine.run_until(lambda: engine.loop.jobs[0].phase is JobPhase.DECODE)
    unit = engine.open("unit")
    before = clock.n_of(asked.slot)
    clock.now = 1.01 * MAX_UNIT_AGE_S  # the unit has arrived at 0
    engine.send(unit, 1)
    assert n_iterations(engine, "unit") == alone
    assert clock.n_of(asked.slot) == before, "expected no part of the answer while the unit was in flight"
    assert_same_events("unit", engine.received("unit"), expected)
    engine.settle()
    assert has_result(engine, "low", ReplyResult)


def test_a_young_unit_shares_little_of_the_time(engine: AnsweringEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ModelClock(engine, monkeypatch)
    asked = engine.ask("low", ASKED, config=LOW, speaker=None)
    monkeypatch.setattr(engine.loop, "_has_prior_work", lambda: True)
    engine.send(engine.open("unit"), 1)
    while clock.now < MAX_UNIT_AGE_S:
        engine.step()
        clock.now += 0.005
    assert 0 < (clock.n_of(asked.slot) - 1) * COST_S <= SHARE * clock.now


def test_other_answers_come_first(engine: AnsweringEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ModelClock(engine, monkeypatch)
    low = engine.ask("low", ASKED, config=LOW, speaker=None)
    engine.ask("normal", ASKED, speaker=None)
    engine.run_until(lambda: has_result(engine, "normal", ReplyResult))
    assert not has_result(engine, "low", ReplyResult)
    n = clock.n_of(low.slot) - 2  # without the first, and the one after the other answer's last token
    assert n * COST_S <= SHARE * clock.now, f"expected few parts of the answer with low priority, got {n}"
    engine.settle()
    assert has_result(engine, "low", ReplyResult)


@pytest.mark.parametrize("others", [{"speak": True}, {"decode_mode": "greedy", "num_beams": 3}])
def test_speech_and_searches_have_normal_priority_only(others: dict[str, Any]) -> None:
    with pytest.raises(SettingError, match=r"priority: expected normal for an answer with speech or with beams"):
        type(WRITTEN)(priority="low", **others)
