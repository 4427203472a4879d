"""Scripted decisions in the engine: silence after speech opens a turn, once; trials taken back do not count."""

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest

from benchmarks.turns.detector import answered_seconds
from benchmarks.turns.questions import UserSound
from benchmarks.turns.script import PREFIX, TEXT_TOKENS, SilenceScript
from tests.worker.loop.engines import QUIET, SmallEngine
from worker.early.trial import EarlyEnd, EarlyTrial
from worker.loop.early.headroom import Headroom
from worker.loop.job import Job
from worker.loop.results import UnitResult
from worker.loop.session import Session, UnitInput

SECOND = 16_000
RNG = np.random.default_rng(0)
SPEECH = (0.07 * RNG.standard_normal(SECOND)).astype(np.float32)
SILENCE = (0.004 * RNG.standard_normal(SECOND)).astype(np.float32)
CONFIG = QUIET.model_copy(update={"max_new_speak_tokens_per_chunk": 12, "early_unit": "auto", "drain_s": 0.0})


class RecordingScript(SilenceScript):
    """replaced: whether the script replaced each token."""

    def __init__(self) -> None:
        super().__init__(silence_ms=160, answer_units=2)
        self.replaced: list[bool] = []

    def token_sampled(self, session: str, job: Job, token: int) -> int:
        chosen = super().token_sampled(session, job, token)
        self.replaced.append(chosen != token)
        return chosen


@pytest.fixture(scope="module")
def engine() -> SmallEngine:
    return SmallEngine(observer=RecordingScript())


def run(engine: SmallEngine, session: Session, sound: np.ndarray, trial: EarlyTrial | None = None) -> UnitResult:
    engine.sessions.unit(session, replace(UnitInput(sound, [], False, arrived=0.0), early=trial))
    engine.settle()
    return engine.take(session.id)[-1]


def test_user_who_has_been_silent_is_answered_once(engine: SmallEngine) -> None:
    session = engine.open(f"{PREFIX}0", CONFIG)
    ends_in_silence = np.concatenate((SPEECH[: SECOND // 2], SILENCE[SECOND // 2 :]))
    sounds = [SILENCE, SPEECH, SPEECH, SILENCE, SILENCE, SILENCE, ends_in_silence, SILENCE, SILENCE]
    results = [run(engine, session, sound) for sound in sounds]
    assert "".join("L" if one.is_listen else "S" for one in results) == "LLLSSLSSL"
    assert answered_seconds(UserSound(np.concatenate(sounds), ()), 160) == [4 * SECOND, 7 * SECOND]
    assert [one.end_of_turn for one in results] == [False] * 4 + [True] + [False] * 2 + [True] + [False]
    got = [one.n_tokens for one in results if not one.is_listen]
    assert got == [TEXT_TOKENS, TEXT_TOKENS + 1] * 2, f"expected one token more where a turn ends, got {got}"
    engine.close_all()


def test_session_with_another_name_keeps_its_tokens(engine: SmallEngine) -> None:
    script = engine.loop.observer
    assert isinstance(script, RecordingScript)
    session = engine.open("warm_up", CONFIG)
    script.replaced.clear()
    for sound in (SPEECH, SILENCE):
        run(engine, session, sound)
    assert script.replaced and not any(script.replaced), "expected the sampled tokens"
    engine.close_all()


class ResumedTrial(EarlyTrial):
    """The user speaks again while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = [False, True]

    @property
    def is_void(self) -> bool:
        return self.answers.pop(0)


def test_trial_that_is_taken_back_leaves_the_script_as_it_was(engine: SmallEngine) -> None:
    session = engine.open(f"{PREFIX}1", CONFIG)
    nothing_asked, resumed, kept = EarlyTrial(), ResumedTrial(), EarlyTrial()
    with mock.patch.object(Headroom, "allows", return_value=True):
        for sound, trial in ((SILENCE[:8_000], nothing_asked), (SPEECH[:8_000], None), (SPEECH[:8_000], resumed)):
            result = run(engine, session, sound, trial)
            assert result.is_listen, result
        assert not run(engine, session, SILENCE[:4_000], kept).is_listen
    ends = [trial.outcome.end for trial in (nothing_asked, resumed, kept)]
    assert ends == [EarlyEnd.TAKEN_BACK, EarlyEnd.TAKEN_BACK, EarlyEnd.COMMITTED]
    assert not run(engine, session, SILENCE).is_listen, "expected the second unit of the turn"
    assert run(engine, session, SILENCE).is_listen
    engine.close_all()
