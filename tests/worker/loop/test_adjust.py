"""Settings that change between two units: which are accepted, and when."""

import pytest

from tests.worker.loop.engines import QUIET, SmallEngine
from worker.config.session import WindowConfig
from worker.config.settings import SettingError
from worker.loop.results import UnitResult
from worker.loop.session import OrderError
from worker.loop.sessions import PREPARED_SETTINGS


def result(engine: SmallEngine) -> UnitResult:
    engine.settle()
    (event,) = (event for event in engine.take("a") if isinstance(event, UnitResult))
    return event


def test_settings_apply_from_the_next_unit():
    engine = SmallEngine()
    session = engine.open("a", QUIET.model_copy(update={"decode_mode": "greedy"}))
    engine.send(session)
    before = result(engine)
    counters = engine.unit_steps.counters(session.slot)
    engine.sessions.adjust(session, session.config.model_copy(update={"force_listen_count": 1000}))
    assert engine.unit_steps.counters(session.slot) == counters, "expected context and draws to stay"
    engine.send(session)
    after = result(engine)
    assert after.index == before.index + 1 and after.is_listen, f"expected a unit that listens, got {after}"
    assert len(after.tokens) == 1, f"expected no token but the forced one, got {after.tokens}"


def test_refuses_settings_while_a_unit_runs():
    engine = SmallEngine()
    session = engine.open("a")
    engine.send(session)
    engine.sessions.dispatch()
    with pytest.raises(OrderError, match="expected a session between units, got prefilled"):
        engine.sessions.adjust(session, QUIET)
    engine.settle()
    engine.sessions.adjust(session, QUIET)


@pytest.mark.parametrize("name", PREPARED_SETTINGS)
def test_refuses_settings_that_only_prepare_can_change(name):
    engine = SmallEngine()
    session = engine.open("a")
    other = {
        "generate_audio": not QUIET.generate_audio,
        "tts_temperature": 0.5,
        "tts_repetition_penalty": 2.0,
        "window": WindowConfig(mode="basic", high_tokens=100, low_tokens=90),
        "euler_steps": 1,
        "seed": 99,
        "compat": "reference",
    }
    with pytest.raises(SettingError, match=f"{name}: expected .*, as prepared, got"):
        engine.sessions.adjust(session, session.config.model_copy(update={name: other[name]}))
    assert session.config == QUIET
