"""Every spoken token is voiced once, and no silence is emitted in place of sound."""

from collections.abc import Iterator

import pytest

from tests.worker.loop.engines import ALOUD, SPEECH_LEN, UNIT_TOKENS, short_speech
from tests.worker.loop.scripted_engine import SILENCE, ScriptedEngine, results
from worker.config.session import SessionConfig, WindowConfig
from worker.loop.results import UnitResult
from worker.loop.session import Session

HELLO = "<|speak|>Hello there"
BYE = "<|speak|>Hello<|turn_eos|>"
LONG = "<|speak|>one two three four five six seven eight nine ten eleven"
SAMPLES_PER_TOKEN, HELD_BACK = 960, 3840


@pytest.fixture(scope="module")
def built() -> Iterator[ScriptedEngine]:
    with short_speech():
        yield ScriptedEngine()


@pytest.fixture
def engine(built: ScriptedEngine) -> Iterator[ScriptedEngine]:
    yield built
    built.clear()


def ended(engine: ScriptedEngine, *lines: str, config: SessionConfig = ALOUD, name: str = "a") -> Session:
    """A session whose text has ended a turn of two units and whose speech has no end token."""
    session = engine.start(name, config, HELLO, BYE, *lines)
    engine.end_with(session, None)
    ends = [one.end_of_turn for one in results(engine.run(session, 2))]
    assert ends == [False, False], f"end of turn: expected none before the speech ends, got {ends}"
    return session


def first_new_drained_token(engine: ScriptedEngine) -> tuple[int, int]:
    """A speech token that first appears in the second drained unit. Returns: the token and its index in that unit."""
    session = ended(engine, name="probe")
    results(engine.run(session, 2))
    *_, first, second = [call.speech_tokens for call in engine.record("probe").spoke]
    at = next(i for i, token in enumerate(second) if token not in first + second[:i])
    return second[at], at


# --- the end of a turn ---------------------------------------------------------------------------------


def test_turn_is_voiced_until_its_end_token(engine: ScriptedEngine) -> None:
    token, at = first_new_drained_token(engine)
    session = ended(engine)
    engine.end_with(session, token)
    first, second, after = results(engine.run(session, 3))
    assert (first.n_speech_tokens, second.n_speech_tokens) == (UNIT_TOKENS, at), (
        f"expected {UNIT_TOKENS} and {at} speech tokens, got {first}, {second}"
    )
    decisions = [(one.is_listen, one.end_of_turn) for one in (first, second, after)]
    assert decisions == [(False, False), (False, True), (True, False)], (
        f"expected the end with the last sound, got {decisions}"
    )
    record = engine.record("a")
    assert len(record.speech_tokens) == 3 * UNIT_TOKENS + at, (
        f"speech tokens: expected those of all units, got {len(record.speech_tokens)}"
    )
    assert record.voiced_tokens == [SILENCE + tuple(record.speech_tokens)], (
        "expected every speech token voiced once, in one turn"
    )
    n_samples = SAMPLES_PER_TOKEN * (len(SILENCE) + len(record.speech_tokens))
    assert record.n_samples == n_samples, (
        f"samples: expected those of all speech tokens, {n_samples}, got {record.n_samples}"
    )
    engine.assert_silent_voice(session)


@pytest.mark.parametrize("drain_s", [0, 1, 3])
def test_drain_s_bounds_the_drained_speech(engine: ScriptedEngine, drain_s: int) -> None:
    session = engine.start("a", ALOUD.model_copy(update={"drain_s": drain_s}), BYE)
    engine.end_with(session, None)
    units = results(engine.run(session, 5))
    speech_tokens, ends = [one.n_speech_tokens for one in units], [one.end_of_turn for one in units]
    expected = [UNIT_TOKENS] * (1 + drain_s) + [0] * (4 - drain_s)
    assert speech_tokens == expected, f"speech tokens of each unit: expected {expected}, got {speech_tokens}"
    assert ends == [number == drain_s for number in range(5)], f"end of turn: expected in unit {drain_s}, got {ends}"
    engine.assert_silent_voice(session)


def test_new_turn_waits_for_the_drained_speech(engine: ScriptedEngine) -> None:
    session = ended(engine, HELLO, config=ALOUD.model_copy(update={"drain_s": 2}))
    [new] = results(engine.run(session, 1))
    assert new.text == "Hello there", f"expected the new turn's text, got {new.text!r}"
    record = engine.record("a")
    assert new.n_speech_tokens == 3 * UNIT_TOKENS, (
        f"speech tokens: expected two seconds of the old turn, one of the new, got {new.n_speech_tokens}"
    )
    *old, call = record.spoke
    assert (call.start, call.least) == (0, 0), f"new turn: expected the start of a turn, got {call}"
    first, second = record.voiced_tokens
    expected = SILENCE + tuple(token for one in old for token in one.speech_tokens)
    assert first == expected, f"old turn: expected all of its speech tokens first, {expected}, got {first}"
    expected = (SILENCE + tuple(call.speech_tokens))[: len(second)]
    assert second == expected and len(second) > 3, f"new turn: expected {expected}, got {second}"


# --- long turns ----------------------------------------------------------------------------------------


def test_turn_may_exceed_the_speech_cache(engine: ScriptedEngine) -> None:
    n_tokens, n_units = 12, 16
    assert (n_tokens + UNIT_TOKENS) * n_units > 1.3 * SPEECH_LEN, "expected more rows than the cache holds"
    window = WindowConfig(mode="basic", high_tokens=200, low_tokens=100)
    settings = {"window": window, "max_new_speak_tokens_per_chunk": n_tokens + 1, "max_chars_per_chunk": 99}
    session = engine.start("a", ALOUD.model_copy(update=settings), *[LONG] * n_units)
    engine.end_with(session, None)
    speech_tokens = [one.n_speech_tokens for one in results(engine.run(session, n_units))]
    assert speech_tokens == [UNIT_TOKENS] * n_units, (
        f"speech tokens of each unit: expected {UNIT_TOKENS} each, got {speech_tokens}"
    )
    starts = [call.start for call in engine.record("a").spoke]
    assert max(starts) > SPEECH_LEN // 2 and starts.count(0) == 1, f"expected the cache never to be emptied: {starts}"


# --- pieces of a unit -----------------------------------------------------------------------------------


def test_ramp_divides_the_sound_and_changes_neither_text_nor_speech_tokens(engine: ScriptedEngine) -> None:
    said, sizes = {}, {}
    for ramp in ((6,), (5,), (5, 1)):
        name = f"ramp {ramp}"
        config = ALOUD.model_copy(update={"sound_ramp": ramp, "drain_s": 0})
        session = engine.start(name, config, HELLO, HELLO, BYE)
        engine.end_with(session, None)
        units = results(engine.run(session, 3))
        record = engine.record(name)
        assert record.voiced_tokens[0] == SILENCE + tuple(record.speech_tokens), f"{name}: expected each token once"
        said[ramp] = [one.text for one in units], record.speech_tokens, [one.tokens for one in units]
        sizes[ramp] = [len(window.speech_tokens) - 3 for window in record.voiced]
    assert all(one == said[(6,)] for one in said.values()), f"expected the same ids for every ramp, got {said}"
    assert sizes[(6,)] != sizes[(5,)], f"expected other windows, got {sizes}"


@pytest.mark.parametrize(
    ("ramp", "compat", "expected"),
    [
        ((UNIT_TOKENS,), None, [(3 + UNIT_TOKENS, True)]),  # a piece that has all tokens of a unit
        ((UNIT_TOKENS + 2,), None, [(3 + UNIT_TOKENS, True)]),
        ((UNIT_TOKENS,), "reference", [(3 + UNIT_TOKENS, False), (3, True)]),
    ],
)
def test_last_unit_of_a_turn_is_voiced_in_one_window(
    engine: ScriptedEngine, ramp: tuple[int, ...], compat: str | None, expected: list[tuple[int, bool]]
) -> None:
    config = ALOUD.model_copy(update={"sound_ramp": ramp, "drain_s": 0, "compat": compat})
    session = engine.start("a", config, HELLO, BYE)
    engine.end_with(session, None)
    engine.run(session, 1)
    before = list(engine.record("a").voiced)
    engine.run(session, 1)
    ends = [(len(window.speech_tokens), window.last) for window in engine.record("a").voiced[len(before) :]]
    assert before and ends == expected, f"windows: expected {expected}, got {ends}"


def test_reference_ignores_the_ramp(engine: ScriptedEngine) -> None:
    windows = []
    for ramp in ((5,), (3, 2)):
        name = f"reference {ramp}"
        config = ALOUD.model_copy(update={"sound_ramp": ramp, "compat": "reference"})
        results(engine.run(engine.start(name, config, HELLO, BYE), 2))
        windows.append(engine.record(name).voiced)
    assert windows[0] == windows[1] and windows[0], f"expected the same windows, got {windows}"


# --- what is sent ----------------------------------------------------------------------------------------


def test_emits_no_sound_while_listening(engine: ScriptedEngine) -> None:
    session = engine.start("a", ALOUD, "<|listen|>")
    engine.send(session, 0)
    engine.settle()
    [result] = engine.take("a")
    assert isinstance(result, UnitResult) and result.is_listen, f"expected one result that listens, got {result}"
    assert result.pcm is None, f"expected no sound, got {len(result.pcm)} samples"


def test_short_sound_is_not_padded(engine: ScriptedEngine) -> None:
    session = engine.start("a", ALOUD, HELLO, HELLO)
    engine.end_with(session, None)
    for waits in (HELD_BACK, 0):  # the vocoder holds back the newest sound of a turn
        n_windows = len(engine.record("a").voiced)
        [result] = results(engine.run(session, 1))
        n_speech_tokens = sum(len(window.speech_tokens) - 3 for window in engine.record("a").voiced[n_windows:])
        n_samples = SAMPLES_PER_TOKEN * n_speech_tokens - waits
        assert 0 < n_samples < 24_000, f"expected less than a second, got {n_samples} samples"
        assert len(result.pcm) == n_samples, (
            f"samples: expected those of {n_speech_tokens} speech tokens, got {len(result.pcm)}"
        )
        assert result.pcm[:100].any(), "expected sound from the first sample on, got zeros"
