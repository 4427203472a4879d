"""All that a turn says is voiced, once, and nothing is sent in place of sound."""

from collections.abc import Iterator

import pytest

from tests.worker.loop.engines import ALOUD, CODES, SPEECH_LEN, short_speech
from tests.worker.loop.scripted_engine import SILENCE, PuppetEngine, results
from worker.config.session import SessionConfig, WindowConfig
from worker.loop.results import UnitResult
from worker.loop.session import Session

HELLO = "<|speak|>Hello there"
BYE = "<|speak|>Hello<|turn_eos|>"
LONG = "<|speak|>one two three four five six seven eight nine ten eleven"
CODE, HELD_BACK = 960, 3840  # samples


@pytest.fixture(scope="module")
def built() -> Iterator[PuppetEngine]:
    with short_speech():
        yield PuppetEngine()


@pytest.fixture
def engine(built: PuppetEngine) -> Iterator[PuppetEngine]:
    yield built
    built.clear()


def ended(engine: PuppetEngine, *lines: str, config: SessionConfig = ALOUD, name: str = "a") -> Session:
    """A session whose text has just ended a turn of two units, and whose speech has no end by itself."""
    session = engine.start(name, config, HELLO, BYE, *lines)
    engine.end_with(session, None)
    ends = [one.end_of_turn for one in results(engine.run(session, 2))]
    assert ends == [False, False], f"end of turn: expected none before the speech ends, got {ends}"
    return session


def new_code_in_drain(engine: PuppetEngine) -> tuple[int, int]:
    """A code that a session drains in its second unit and not before. Returns: code, how many came before it."""
    session = ended(engine, name="to look")
    results(engine.run(session, 2))
    *_, first, second = [call.speech_tokens for call in engine.record("to look").spoke]
    at = next(i for i, code in enumerate(second) if code not in first + second[:i])
    return second[at], at


# --- the end of a turn ---------------------------------------------------------------------------------


def test_a_turn_is_voiced_until_its_end_code(engine: PuppetEngine) -> None:
    code, at = new_code_in_drain(engine)
    session = ended(engine)
    engine.end_with(session, code)
    first, second, after = results(engine.run(session, 3))
    assert (first.n_speech_tokens, second.n_speech_tokens) == (CODES, at), (
        f"expected {CODES} and {at} codes, got {first}, {second}"
    )
    told = [(one.is_listen, one.end_of_turn) for one in (first, second, after)]
    assert told == [(False, False), (False, True), (True, False)], f"expected the end with the last sound, got {told}"
    record = engine.record("a")
    assert len(record.speech_tokens) == 3 * CODES + at, (
        f"codes: expected those of all units, got {len(record.speech_tokens)}"
    )
    assert record.voiced_codes == [SILENCE + tuple(record.speech_tokens)], (
        "expected every code voiced once, in one turn"
    )
    n_samples = CODE * (len(SILENCE) + len(record.speech_tokens))
    assert record.n_samples == n_samples, f"samples: expected that of all codes, {n_samples}, got {record.n_samples}"
    engine.assert_silent_voice(session)


@pytest.mark.parametrize("drain_s", [0, 1, 3])
def test_what_a_turn_still_voices_is_bounded(engine: PuppetEngine, drain_s: int) -> None:
    session = engine.start("a", ALOUD.model_copy(update={"drain_s": drain_s}), BYE)
    engine.end_with(session, None)
    told = results(engine.run(session, 5))
    speech_tokens, ends = [one.n_speech_tokens for one in told], [one.end_of_turn for one in told]
    expected = [CODES] * (1 + drain_s) + [0] * (4 - drain_s)
    assert speech_tokens == expected, f"codes of each unit: expected {expected}, got {speech_tokens}"
    assert ends == [number == drain_s for number in range(5)], f"end of turn: expected in unit {drain_s}, got {ends}"
    engine.assert_silent_voice(session)


def test_a_new_turn_waits_for_the_rest_of_the_old_one(engine: PuppetEngine) -> None:
    session = ended(engine, HELLO, config=ALOUD.model_copy(update={"drain_s": 2}))
    [new] = results(engine.run(session, 1))
    assert new.text == "Hello there", f"expected the new turn's text, got {new.text!r}"
    record = engine.record("a")
    assert new.n_speech_tokens == 3 * CODES, (
        f"codes: expected two seconds of the old turn, one of the new, got {new.n_speech_tokens}"
    )
    *old, call = record.spoke
    assert (call.start, call.least) == (0, 0), f"new turn: expected to start anew, got {call}"
    first, second = record.voiced_codes
    expected = SILENCE + tuple(code for one in old for code in one.speech_tokens)
    assert first == expected, f"old turn: expected all of its codes first, {expected}, got {first}"
    expected = (SILENCE + tuple(call.speech_tokens))[: len(second)]
    assert second == expected and len(second) > 3, f"new turn: expected {expected}, got {second}"


# --- long turns ----------------------------------------------------------------------------------------


def test_a_turn_may_be_longer_than_the_code_model_remembers(engine: PuppetEngine) -> None:
    n_tokens, n_units = 12, 16
    assert (n_tokens + CODES) * n_units > 1.3 * SPEECH_LEN, "expected units enough"
    window = WindowConfig(mode="basic", high_tokens=200, low_tokens=100)
    knobs = {"window": window, "max_new_speak_tokens_per_chunk": n_tokens + 1, "max_chars_per_chunk": 99}
    session = engine.start("a", ALOUD.model_copy(update=knobs), *[LONG] * n_units)
    engine.end_with(session, None)
    speech_tokens = [one.n_speech_tokens for one in results(engine.run(session, n_units))]
    assert speech_tokens == [CODES] * n_units, f"codes of each unit: expected {CODES} each, got {speech_tokens}"
    starts = [call.start for call in engine.record("a").spoke]
    assert max(starts) > SPEECH_LEN // 2 and starts.count(0) == 1, f"expected a turn that is never forgotten: {starts}"


# --- what is sent ----------------------------------------------------------------------------------------


def test_nothing_is_sent_while_listening(engine: PuppetEngine) -> None:
    session = engine.start("a", ALOUD, "<|listen|>")
    engine.send(session, 0)
    engine.settle()
    [result] = engine.take("a")
    assert isinstance(result, UnitResult) and result.is_listen, f"expected one result that listens, got {result}"
    assert result.pcm is None, f"expected no sound, got {len(result.pcm)} samples"


def test_a_short_second_is_not_filled_up(engine: PuppetEngine) -> None:
    session = engine.start("a", ALOUD, HELLO, HELLO)
    engine.end_with(session, None)
    for waits in (HELD_BACK, 0):  # the newest sound of a turn waits for the next
        n_windows = len(engine.record("a").voiced)
        [result] = results(engine.run(session, 1))
        n_speech_tokens = sum(len(window.speech_tokens) - 3 for window in engine.record("a").voiced[n_windows:])
        n_samples = CODE * n_speech_tokens - waits
        assert 0 < n_samples < 24_000, f"expected less than a second, got {n_samples} samples"
        assert len(result.pcm) == n_samples, (
            f"samples: expected those of {n_speech_tokens} codes, got {len(result.pcm)}"
        )
        assert result.pcm[:100].any(), "expected sound from the first sample on, got zeros"
