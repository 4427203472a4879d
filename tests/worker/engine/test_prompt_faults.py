"""Failures while a session is prepared: the session is new afterwards, and no other slot is affected."""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from models.errors import AudioError, ContextOverflowError, ModelError, SettingsError, SlotError
from tests.models.stages.slot_copies import assert_fresh
from tests.worker.engine.failing_regions import Broken, broken
from tests.worker.engine.three_sessions import (
    engine,
)
from tests.worker.loop.engines import (
    ALOUD,
    QUIET,
    SmallEngine,
    assert_same_events,
    make_prompt,
    voice,
)
from worker.config.session import SessionConfig, WindowConfig
from worker.loop.prompt.system_prompt import SystemPrompt
from worker.loop.results import Failure
from worker.loop.session import OrderError, SessionPhase

pytestmark = pytest.mark.usefixtures("short_units")


@pytest.fixture(autouse=True)
def close_all_sessions() -> Iterator[None]:
    yield
    engine().close_all()


def bad_prompts() -> list[tuple[str, SystemPrompt, SessionConfig, type[Exception], str | None]]:
    """Cases: name, prompt, config, error, region that fails."""
    loud = make_prompt("Be kind.", ref=1, speaker=1)
    wide = QUIET.model_copy(update={"window": WindowConfig(high_tokens=5000)})
    broken_voice = replace(voice(1), mel=voice(1).mel * torch.nan)
    return [
        ("text too long", make_prompt("so " * 500), QUIET, ContextOverflowError, None),
        ("window too large", loud, wide, ModelError, None),
        ("voice of NaN", replace(loud, voice=broken_voice), ALOUD, AudioError, None),
        ("unsupported euler_steps", loud, ALOUD.model_copy(update={"euler_steps": 7}), SettingsError, None),
        ("clips fail", loud, ALOUD, Broken, "clips"),
        ("prefill fails", loud, ALOUD, Broken, "unit_prefill"),
        ("voice fails", loud, ALOUD, Broken, "voice"),
        ("turn start fails", loud, ALOUD, Broken, "begin"),
    ]


@pytest.mark.parametrize("case", bad_prompts(), ids=lambda case: case[0])
def test_failure_of_a_prompt(case: tuple[str, SystemPrompt, SessionConfig, type[Exception], str | None]) -> None:
    """The session is new afterwards, every slot is kept, and waiting units fail."""
    _, prompt, config, error, region = case
    small = SmallEngine() if region in ("voice", "clips") else engine()  # a prepared voice or clip is not encoded again
    small.sessions._prompts.snapshots.clear()
    session = small.open("one", ALOUD, make_prompt(speaker=0))
    small.run_unit(session, 1)
    small.send(session, 2)
    table = small.vocoder.regions if region in ("voice", "begin") else small.unit_steps.regions
    fault = nullcontext() if region is None else broken(table, region, lambda tensors: True, "after")
    with fault, pytest.raises(error):
        small.sessions.prepare(session, prompt, config)
    assert session.phase is SessionPhase.NEW, f"expected a new session, got {session.phase}"
    small.settle()
    errors = [type(event.error) for event in small.take("one") if isinstance(event, Failure)]
    assert errors == [OrderError], f"expected a failure of the waiting unit, got {errors}"
    free = small.unit_steps.n_free, small.vocoder.n_free
    n = small.config.max_sessions
    assert free == (n - 1, n), f"expected only its own slot in use, got {free} free"
    assert_fresh(small.unit_steps.state, [session.slot])
    small.sessions.prepare(session, make_prompt("Be kind.", speaker=0), ALOUD)
    again = small.run_unit(session, 1)
    small.sessions.close(session)
    other = small.open("one", ALOUD, make_prompt("Be kind.", speaker=0))
    assert_same_events("one", [again], [small.run_unit(other, 1)])


def test_a_voice_without_memory_fails_its_session_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other session speaks on, and the voice can be prepared once there is memory."""
    prompt, results = make_prompt("Be kind.", ref=1, speaker=1), []
    for has_memory in (True, False):
        small = SmallEngine()
        other, session = small.open("other", ALOUD, make_prompt(speaker=0)), small.open("one", ALOUD)
        if not has_memory:
            with monkeypatch.context() as patch:
                patch.setattr(small.vocoder.state, "grow_voices", no_memory)
                with pytest.raises(SlotError, match=r"voice: expected memory of the device .*no room"):
                    small.sessions.prepare(session, prompt, ALOUD)
            assert session.phase is SessionPhase.NEW, f"expected a new session, got {session.phase}"
        results.append([small.run_unit(other, 1)])
        small.sessions.prepare(session, prompt, ALOUD)
        results[-1].append(small.run_unit(session, 1))
        small.close_all()
    for name, (want, got) in zip(("other", "one"), zip(*results, strict=True), strict=True):
        assert_same_events(name, [got], [want])


def no_memory(n_frames: int) -> None:
    raise torch.OutOfMemoryError("no room")
