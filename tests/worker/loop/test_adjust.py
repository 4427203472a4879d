"""Settings that change between two units: which are accepted, when they apply, and that the rest stays."""

import logging

import pytest
import torch

from models.errors import ContextOverflowError
from tests.worker.loop.engines import ALOUD, QUIET, Director, SmallEngine, make_prompt, short_speech
from worker.config.session import PREPARED_SETTINGS, SessionConfig, WindowConfig
from worker.config.settings import SettingError
from worker.loop.command_queue import CommandQueue, ignore_result
from worker.loop.prompt.system_prompt import Adjustment, AdjustOutcome
from worker.loop.results import UnitResult
from worker.loop.session import OrderError, Session
from worker.loop.session_handle import ImageCutter, SessionHandle

BASIC = WindowConfig(mode="basic", high_tokens=200, low_tokens=100)


def adjust(engine: SmallEngine, session: Session, **settings: object) -> AdjustOutcome:
    """Change settings; `window` may be partial."""
    return engine.sessions.adjust(session, Adjustment(session.config.adjusted(settings)))


def run_unit(engine: SmallEngine, session: Session, **options: object) -> UnitResult:
    result = engine.run_unit(session, **options)
    assert isinstance(result, UnitResult), result
    return result


def test_settings_apply_from_the_next_unit():
    engine = SmallEngine()
    session = engine.open("a", QUIET.model_copy(update={"decode_mode": "greedy"}))
    before = run_unit(engine, session)
    counters = engine.unit_steps.counters(session.slot)
    outcome = adjust(engine, session, force_listen_count=1000)
    assert engine.unit_steps.counters(session.slot) == counters, "expected context and draws to stay"
    after = run_unit(engine, session)
    assert (outcome.from_unit, outcome.notes) == (after.index, []), f"expected the next unit, got {outcome}"
    assert after.index == before.index + 1 and after.is_listen, f"expected a unit that listens, got {after}"
    assert len(after.tokens) == 1, f"expected no token but the forced one, got {after.tokens}"


def test_refuses_settings_while_a_unit_runs():
    engine = SmallEngine()
    session = engine.open("a")
    engine.send(session)
    engine.sessions.dispatch()
    with pytest.raises(OrderError, match="expected a session between units, got prefilled"):
        adjust(engine, session)
    engine.settle()
    adjust(engine, session)


@pytest.mark.parametrize("name", sorted(PREPARED_SETTINGS.keys() - {"chunk_ms", "sample_rate"}))
def test_refuses_settings_that_only_prepare_can_change(name):
    engine = SmallEngine()
    session = engine.open("a")
    other = {
        "window.mode": {"window": BASIC},
        "window.marker": {"window": {"marker": "so far: "}},
        "euler_steps": {"euler_steps": 1},
        "seed": {"seed": 99},
        "compat": {"compat": "reference"},
    }
    with pytest.raises(SettingError, match=f"{name}: expected .*, as prepared: .*, got"):
        adjust(engine, session, top_k=1, **other[name])
    assert session.config == QUIET, "expected no setting changed, not even the valid one"


@pytest.mark.parametrize("name, value", [("tts_temperature", 1e-6), ("tts_repetition_penalty", 0.1)])
def test_speech_settings_change_the_speech_of_the_next_unit_only(name, value):
    """Within a turn. The speech before it, the text and the random numbers stay the same."""
    sounds, draws = {}, {}
    with short_speech():
        for adjusted in (False, True):
            engine = SmallEngine(observer=Director(listen=0, turn_end=0, unit_end=0))
            session = engine.open("a", ALOUD, make_prompt(speaker=0))
            first = run_unit(engine, session)
            if adjusted:
                adjust(engine, session, **{name: value})
            results = first, run_unit(engine, session)
            assert not any(result.is_listen for result in results)
            sounds[adjusted] = [result.pcm for result in results]
            draws[adjusted] = [result.tokens for result in results], engine.unit_steps.counters(session.slot)[1:3]
    plain, changed = sounds[False], sounds[True]
    assert torch.equal(*map(torch.from_numpy, (plain[0], changed[0]))), "expected the first unit unchanged"
    same = len(plain[1]) == len(changed[1]) and torch.equal(*map(torch.from_numpy, (plain[1], changed[1])))
    assert not same, f"expected other speech with {name} {value}, got the same"
    assert draws[False] == draws[True], "expected the same text"


def test_writes_no_setting_that_stays(monkeypatch):
    """Settings are tensors on the device: only those that change are written."""
    engine = SmallEngine()
    session = engine.open("a")
    written = []
    state = engine.unit_steps.state
    for name, sampler in (("text", state.text), ("speech", state.speech.sampler)):
        monkeypatch.setattr(sampler, "configure", lambda *given, name=name: written.append(name))
    for settings, expected in (({"drain_s": 1}, []), ({"top_k": 3}, ["text"]), ({"tts_temperature": 1}, ["speech"])):
        adjust(engine, session, **settings)
        assert written == expected, f"{settings}: expected {expected} written, got {written}"
        written.clear()


def test_turns_sound_off_between_turns_and_on_again():
    with short_speech():
        engine = SmallEngine(observer=Director(listen=0, turn_end=0, unit_end=0))
        session = engine.open("a", ALOUD, make_prompt(speaker=0))
        assert adjust(engine, session, generate_audio=False) == AdjustOutcome(1, speaks=False)
        assert run_unit(engine, session).pcm is None, "expected text only"
        assert adjust(engine, session, generate_audio=True) == AdjustOutcome(2, speaks=True)
        assert run_unit(engine, session).pcm is not None, "expected sound within the turn"


def test_turns_on_the_sound_of_a_session_that_was_prepared_without():
    with short_speech():
        engine = SmallEngine(observer=Director(listen=0, turn_end=0, unit_end=0))
        session = engine.open("a", QUIET, make_prompt(speaker=0))
        assert run_unit(engine, session).pcm is None
        free = engine.vocoder.n_free
        assert adjust(engine, session, generate_audio=True).speaks
        assert engine.vocoder.n_free == free - 1, "expected a vocoder slot in use"
        assert run_unit(engine, session).pcm is not None, "expected sound"
        engine.sessions.close(session)
        assert engine.vocoder.n_free == free, "expected the slot free again"


def test_a_spoken_turn_is_spoken_to_its_end():
    """Turned off within a turn: its speech, its end and the silence after it are as without the change."""
    events = {}
    with short_speech():
        for adjusted in (False, True):
            engine = SmallEngine(observer=Director(listen=0.5))
            session = engine.open("a", ALOUD.model_copy(update={"drain_s": 1}), make_prompt(speaker=0))
            results = [run_unit(engine, session)]
            while not session.is_speaking:
                results = [run_unit(engine, session)]
            if adjusted:
                outcome = adjust(engine, session, generate_audio=False)
                notes = ["setting generate_audio takes effect when the turn has ended"]
                assert outcome == AdjustOutcome(session.n_units + 1, False, notes), outcome
            while not results[-1].end_of_turn:
                results.append(run_unit(engine, session))
                assert len(results) < 30, "expected an end of the turn"
            events[adjusted] = [(r.text, r.n_speech_tokens, r.end_of_turn, r.pcm is not None) for r in results]
            later = [run_unit(engine, session) for _ in range(8)]
            spoken = [result.n_speech_tokens for result in later if not result.is_listen]
            assert spoken and (sum(spoken) == 0) is adjusted, f"{adjusted=}: after the turn, got {spoken}"
    assert events[True] == events[False], f"expected the turn as it was, got {events}"
    assert any(sound for *_, sound in events[True]), "expected a turn with sound"


def test_no_voice_to_turn_on():
    engine = SmallEngine()
    session = engine.open("a", QUIET)
    outcome = adjust(engine, session, generate_audio=True)
    assert not outcome.speaks
    assert outcome.notes == ["setting generate_audio has no effect: the session has no voice"], outcome.notes
    assert adjust(engine, session, top_k=3).notes == [], "expected no note on a setting that is not given"


def test_window_sizes_apply_when_the_next_unit_is_closed():
    engine = SmallEngine()
    session = engine.open("a", QUIET.model_copy(update={"window": BASIC}))
    while session.window.length < 150:
        run_unit(engine, session)
    assert not session.window.events
    adjust(engine, session, window={"high_tokens": 80, "low_tokens": 60})
    run_unit(engine, session)
    assert session.window.events == 1 and session.window.length <= 60, f"got {session.window.length} rows"


def test_refuses_larger_units_that_do_not_fit():
    """Before the window makes room: it evicts when a unit is closed."""
    engine = SmallEngine()
    config = SessionConfig(
        **{**dict(QUIET), "window": WindowConfig(mode="basic", high_tokens=280, low_tokens=20), "max_slice_nums": 1}
    )
    session = engine.open("a", config)
    while session.window.length < 240:
        run_unit(engine, session)
    with pytest.raises(ContextOverflowError, match=r"expected at most 384 rows with a unit, got \d+ \+ "):
        adjust(engine, session, max_slice_nums=2, window={"high_tokens": 150})
    assert session.config == config


def test_change_of_a_client_that_has_gone_is_undone(caplog: pytest.LogCaptureFixture) -> None:
    """Its future is cancelled before the engine thread takes the command."""
    engine, commands = SmallEngine(), CommandQueue(lambda: RuntimeError("closed"))
    commands.accept()
    session = engine.open("a")
    handle = SessionHandle(commands, engine.sessions, session, ImageCutter(engine.parts.pictures, 70))
    changing = handle.adjust(Adjustment(session.config.adjusted({"temperature": 0.1})))
    assert handle.config.temperature == 0.1 != session.config.temperature
    ignore_result(breaking := handle.break_speech())
    assert changing.cancel() and breaking.cancel()
    assert handle.config == session.config, f"expected the settings as before, got {handle.config}"
    errors = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    assert not errors, f"expected no warnings or errors, got {errors}"
