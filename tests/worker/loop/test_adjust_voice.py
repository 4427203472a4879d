"""Another voice between two units: from the next turn on, and refused without an effect where there is no room."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from models.errors import AudioError, SlotError
from tests.worker.loop.engines import ALOUD, Director, SmallEngine, bits, make_prompt, short_speech, voice
from worker.loop.prompt.system_prompt import Adjustment, AdjustOutcome
from worker.loop.results import UnitResult
from worker.loop.session import Session

LATER = "another voice takes effect when the turn has ended"


@pytest.fixture(scope="module", autouse=True)
def short_units() -> Iterator[None]:
    with short_speech():
        yield


@pytest.fixture(scope="module")
def engine() -> SmallEngine:
    return SmallEngine(observer=Director(listen=0.5, turn_end=0.2))


@contextmanager
def opened(engine: SmallEngine, speaker: int | None, generate_audio: bool = True) -> Iterator[Session]:
    """A session that the test closes; afterwards no voice is in use."""
    config = ALOUD.model_copy(update={"drain_s": 1, "generate_audio": generate_audio})
    session = engine.open("a", config, make_prompt(speaker=speaker))
    try:
        yield session
    finally:
        engine.sessions.close(session)
        engine.take("a")
        users = [entry.users for entry in engine.vocoder.voices._by_slot.values()]
        assert not any(users), f"expected no voice in use, got {users}"


def run_units(engine: SmallEngine, session: Session, n: int, first: int = 0) -> list[UnitResult]:
    results = [engine.run_unit(session, first + number) for number in range(n)]
    assert all(isinstance(result, UnitResult) for result in results), results
    return results


def start_turn(engine: SmallEngine, session: Session) -> None:
    for _ in range(20):
        run_units(engine, session, 1)
        if session.is_speaking and session.speech.n_speech_tokens:
            return
    raise AssertionError("expected a turn that is spoken")


def sounds(results: list[UnitResult]) -> list[object]:
    return [None if result.pcm is None else bits(result.pcm) for result in results]


def test_takes_effect_at_once_between_turns(engine: SmallEngine) -> None:
    """The sound is that of a session with the voice from the start; the text stays."""
    heard, texts = {}, {}
    for before, after in ((0, None), (1, None), (0, 1)):
        with opened(engine, before) as session:
            if after is not None:
                outcome = engine.sessions.adjust(session, Adjustment(voice=voice(after)))
                assert outcome == AdjustOutcome(1, speaks=True), outcome
            results = run_units(engine, session, 5)
            heard[before, after], texts[before, after] = sounds(results), [result.tokens for result in results]
    assert any(heard[0, None]) and heard[0, 1] == heard[1, None] != heard[0, None]
    assert texts[0, None] == texts[1, None] == texts[0, 1]


def test_an_open_turn_keeps_its_voice_to_its_end(engine: SmallEngine) -> None:
    """Then the next turn has the new voice, the last one that was set."""
    turn, later = {}, {}
    for adjusted in (True, False):
        with opened(engine, 0) as session:
            start_turn(engine, session)
            if adjusted:
                for number in (2, 1):
                    outcome = engine.sessions.adjust(session, Adjustment(voice=voice(number)))
                    assert outcome.notes == [LATER], outcome
                turn[True] = []
                while engine.vocoder._next_voices:
                    turn[True] += run_units(engine, session, 1)
            else:
                turn[False] = [run_units(engine, session, 1)[0] for _ in turn[True]]
            later[adjusted] = run_units(engine, session, 12)
    assert len(turn[True]) > 1 and sounds(turn[True][:-1]) == sounds(turn[False][:-1]), "expected the turn unchanged"
    # The last unit may begin another turn after the end of this one.
    end, expected = turn[True][-1].pcm, turn[False][-1].pcm
    assert end is not None and expected is not None and np.array_equal(end[:1000], expected[:1000])
    assert [one.tokens for one in later[True]] == [one.tokens for one in later[False]]
    pairs = list(zip(sounds(later[True]), sounds(later[False]), strict=True))
    assert any(pair[0] for pair in pairs), "expected another turn with sound"
    assert all(one != other for one, other in pairs if one), "expected another voice in the next turn"


def test_an_interrupt_ends_the_old_voice(engine: SmallEngine) -> None:
    with opened(engine, 0) as session:
        start_turn(engine, session)
        engine.sessions.adjust(session, Adjustment(voice=voice(1)))
        engine.sessions.break_speech(session)
        run_units(engine, session, 1)
        assert not engine.vocoder._next_voices, "expected the new voice in use"


def test_gives_a_voice_to_a_session_without_one(engine: SmallEngine) -> None:
    with opened(engine, None) as session:
        assert not any(sounds(run_units(engine, session, 4)))
        assert engine.sessions.adjust(session, Adjustment(voice=voice(0))).speaks
        assert any(sounds(run_units(engine, session, 8)))


def test_is_kept_for_a_session_that_does_not_speak(engine: SmallEngine) -> None:
    heard = {}
    for before, after in ((0, 1), (1, None)):
        with opened(engine, before, generate_audio=False) as session:
            if after is not None:
                outcome = engine.sessions.adjust(session, Adjustment(voice=voice(after)))
                assert outcome.notes == ["another voice has no effect while the session does not speak"]
            engine.sessions.adjust(session, Adjustment(session.config.adjusted({"generate_audio": True})))
            heard[before, after] = sounds(run_units(engine, session, 5))
    assert any(heard[0, 1]) and heard[0, 1] == heard[1, None]


def test_too_many_voices_leave_the_old_one() -> None:
    """Nothing of the same adjustment takes effect, neither settings nor prompt."""
    engine = SmallEngine()
    room = engine.vocoder.sizes.voice_frames // voice(0).n_frames
    sizes, n_free = engine.vocoder.sizes, len(engine.vocoder.voices._free)
    session = engine.open("a", ALOUD, make_prompt(speaker=0))
    held = []
    while len(held) < min(room, n_free) - 1:
        slot = engine.vocoder._voice_slot(voice(10 + len(held)), session.config.euler_steps or 1)
        engine.vocoder.voices.acquire(slot)
        held.append(slot)
    before = session.config, session.window, session.speech, dict(engine.vocoder._sessions)
    change = Adjustment(session.config.adjusted({"top_k": 3}), make_prompt("Hi."), voice(5))
    with pytest.raises(SlotError, match=r"voices: expected a slot and \d+ of \d+ frames"):
        engine.sessions.adjust(session, change)
    assert (session.config, session.window, session.speech, engine.vocoder._sessions) == before
    assert not engine.vocoder._next_voices and engine.vocoder.sizes is sizes
    engine.vocoder.voices.release(held.pop())
    assert engine.sessions.adjust(session, change).notes == []
    assert session.config.top_k == 3 and session.window is not before[1]


def test_refuses_a_voice_that_is_not_one(engine: SmallEngine) -> None:
    with opened(engine, 0) as session:
        bad = voice(0)
        bad = type(bad)(bad.speech_tokens, bad.mel * np.nan, bad.speaker)
        with pytest.raises(AudioError):
            engine.sessions.adjust(session, Adjustment(voice=bad))
        assert not engine.vocoder._next_voices
        run_units(engine, session, 2)


def test_an_empty_change_does_nothing(engine: SmallEngine) -> None:
    with opened(engine, None, generate_audio=False) as session:
        outcome = engine.sessions.adjust(session, Adjustment())
        assert outcome == AdjustOutcome(1, speaks=False), outcome
