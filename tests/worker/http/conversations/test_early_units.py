"""`DuplexConversation` at pauses of the user: which units may run early, and what their results say."""

from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any
from unittest import mock

import numpy as np
import pytest

from tests.worker.early.test_pause import LoudnessNetwork
from tests.worker.early.test_pause_listener import AUTO, SILENT, SPOKEN
from tests.worker.http.conversations.duplex_stage import Handle, Stage, staged, until
from worker.config.session import SessionConfig
from worker.early import pause_listener
from worker.early.pause_thread import PauseThread
from worker.early.trial import EarlyEnd, EarlyOutcome, EarlyTrial
from worker.loop.results import UnitResult
from worker.protocol.messages import Interrupt, Interrupted, Pause, Paused, Prepare, Prepared, Result
from worker.protocol.wire import Sound

OUTCOMES = (
    EarlyOutcome(EarlyEnd.COMMITTED, 625.0, 20.0),
    EarlyOutcome(EarlyEnd.TAKEN_BACK, 0.0, 30.0),
    EarlyOutcome(EarlyEnd.SKIPPED),
)


class RecordingHandle(Handle):
    """Keeps the trials of the units that were sent."""

    def __init__(self) -> None:
        super().__init__()
        self.trials: list[EarlyTrial | None] = []

    def send(self, *given: Any, **options: Any) -> Future[None]:
        self.trials.append(options["early"])
        return super().send(*given, **options)


@pytest.fixture(autouse=True)
def loudness() -> Iterator[None]:
    with (
        mock.patch.object(pause_listener, "shared_thread", lambda: PauseThread(LoudnessNetwork())),
        mock.patch.object(pause_listener, "MAX_WAIT_S", 20.0),
    ):
        yield


async def prepared(config: SessionConfig = AUTO) -> Stage:
    stage = Stage()
    stage.handle = RecordingHandle()
    stage.conversation._service.session_config = lambda given: (config, [])
    await stage.say(Prepare())
    assert isinstance(await stage.hear(), Prepared)
    return stage


async def say(stage: Stage, *chunks: Any, early: EarlyOutcome | None = None) -> Result:
    """Send chunks, answer them, and return the last result. early: of the last unit."""
    for number, chunk in enumerate(chunks):
        n_before = stage.handle.calls.count("send")
        await stage.say(chunk.model_copy())
        await stage.sent(n_before + 1)
        stage.n_units += 1
        outcome = early if number == len(chunks) - 1 else None
        stage.conversation.emit(UnitResult("c", stage.n_units, True, "", False, early=outcome))
        result = await stage.hear()
        assert isinstance(result, Result), f"expected a result, got {result!r}"
    return result


@staged
async def test_unit_at_a_pause_may_run_early() -> None:
    stage = await prepared()
    await say(stage, SPOKEN, SILENT, SILENT, SPOKEN)
    trials = stage.handle.trials
    assert [trial is not None for trial in trials] == [False, True, False, False]
    assert trials[1].is_void, "expected speech to make it void"


@staged
async def test_speech_is_heard_while_the_unit_is_in_flight() -> None:
    stage = await prepared()
    await say(stage, SPOKEN)
    await stage.say(SILENT.model_copy())
    await stage.sent(2)
    trial = stage.handle.trials[1]
    assert not trial.is_void
    await stage.say(SPOKEN.model_copy())  # waits for the answer to the chunk before
    await until(lambda: trial.is_void)
    assert trial.is_void and len(stage.handle.trials) == 2, "expected the pause to end before the next unit begins"


@staged
async def test_no_unit_may_run_early_unless_the_setting_asks_for_it() -> None:
    stage = await prepared(SessionConfig())
    await say(stage, SPOKEN, SILENT)
    assert stage.handle.trials == [None, None]


@staged
async def test_results_and_counts_of_early_units() -> None:
    stage = await prepared()
    results = [await say(stage, SPOKEN, SILENT, early=outcome) for outcome in OUTCOMES]
    assert [(one.early, one.shift_ms) for one in results] == [(True, 625.0), (None, None), (None, None)]
    totals = stage.conversation._metrics.totals
    counts = {name: totals[name] for name in ("speculations", "committed", "wasted_ms")}
    assert counts == {"speculations": 2, "committed": 1, "wasted_ms": 30.0}


@staged
async def test_trial_is_void_when_the_client_leaves() -> None:
    stage = await prepared()
    await say(stage, SPOKEN, SILENT)
    stage.conversation.leave()
    assert stage.handle.trials[1].is_void


@staged
async def test_interrupt_reaches_a_piece_that_has_not_reached_the_engine() -> None:
    """It is the answer to all that came before it, and to nothing after."""
    stage = await prepared()
    await stage.say(SPOKEN.model_copy(), Interrupt())
    await stage.sent(1)
    assert stage.handle.calls == ["break", "send"]
    stage.answer(is_listen=True, is_incomplete=True)
    assert isinstance(await stage.hear(), Result) and isinstance(await stage.hear(), Interrupted)
    assert stage.handle.calls == ["break", "send", "clear"]


@staged
async def test_chunks_of_a_paused_session_are_not_kept() -> None:
    stage = await prepared()
    await stage.say(Pause(timeout=60.0), SPOKEN.model_copy(), SPOKEN.model_copy())
    assert isinstance(await stage.hear(), Paused)
    for _ in range(2):
        assert (await stage.hear()).code == "paused"
    assert not stage.conversation._pauses._hearing, "expected nothing left of refused chunks"


@staged
async def test_pictures_of_a_refused_unit_are_not_expected() -> None:
    stage = await prepared()
    await stage.say(SPOKEN.model_copy(update={"audio_base64": Sound(np.array([np.nan], np.float32))}))
    assert (await stage.hear()).code == "bad_audio" and stage.handle.calls == ["forget"]
