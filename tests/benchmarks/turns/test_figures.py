"""The turns benchmark's arithmetic: questions and answers, parts of a wait, shares; and its sound."""

from typing import Any

import numpy as np
import pytest

from benchmarks.turns.figures import PARTS, figures, outcomes, summary
from benchmarks.turns.questions import KINDS, RATE, SPEECH_LEVEL, Conditions, load_questions, user_sound

QUESTIONS = [
    {"index": 0, "begin": 1000 * 16, "end": 3000 * 16, "until": 6000 * 16, "kind": "plain"},
    {"index": 1, "begin": 6000 * 16, "end": 8000 * 16, "until": 11000 * 16, "kind": "filled"},
]


def turn(at_ms: float, sound_at: float | None, **given: Any) -> dict[str, Any]:
    """A turn whose first unit ran `at_ms` into the sound."""
    held = {"early": False, "shift_ms": 0.0, "model": 80.0, "vocoder": 20.0, "playback": 0.0}
    return {"position": int(at_ms * 16), "sound_at": sound_at, **held, **given}


def run(*turns: dict[str, Any]) -> dict[str, Any]:
    held = {"errors": [], "late_sends_ms": [1.0], "n_units": 11, "n_late": 1}
    return {"questions": QUESTIONS, "turns": list(turns), **held}


def test_wait_is_split_into_its_parts() -> None:
    """From the end at 3000 ms: 340 ms to the piece, 80 + 20 ms in the worker, 4 ms on the way."""
    [first, _], n_strays = outcomes(run(turn(3340, 3444.0, early=True, shift_ms=460.0)))
    assert (first.wait, first.saved, first.early, n_strays) == (444.0, 460.0, True, 0)
    assert first.parts == pytest.approx({"alignment": 340, "model": 80, "vocoder": 20, "transport": 4})
    assert sum(first.parts.values()) == first.wait and tuple(first.parts) == PARTS


def test_turn_that_begins_before_the_end_is_a_false_start() -> None:
    """Also if an answer follows in time. A turn outside of all questions is a stray."""
    early, late, stray = turn(2900, 3010.0), turn(4000, 4100.0), turn(500, 600.0)
    [first, second], n_strays = outcomes(run(stray, early, late))
    assert first.is_false_start and first.wait is None and n_strays == 1
    assert not second.is_false_start and second.wait is None


def test_rows_count_shares_of_all_questions() -> None:
    row = figures(
        [run(turn(3500, 3600.0), turn(7000, 7100.0, early=True)), run(turn(3200, 3300.0, early=True), turn(9000, None))]
    )
    assert (row["questions"], row["answered"], row["strays"]) == (4, 2, 0)
    assert row["turn_ms"] == {"p50": 450.0, "p95": 585.0, "max": 600.0}
    assert (row["early_rate"], row["false_starts"], row["missed"]) == (0.5, 0.25, 0.25)
    plain, filled = row["kinds"].values()
    assert (plain["answered"], plain["false_starts"], filled["answered"], filled["missed"]) == (2, 0.0, 0, 0.5)
    assert (filled["false_starts"], filled["false_starts_early"], row["false_starts_early"]) == (0.5, 0.5, 0.25)
    assert (row["units"], row["late_units"]) == (22, 2)
    slow = figures([run(turn(3500, 3600.0, playback=160.0), turn(7000, 7100.0, playback=900.0))])
    assert slow["playback_ms"] == {"p50": 160.0, "p95": 160.0, "max": 160.0}, "expected answers' delays alone"
    none = figures([run()])
    assert none["turn_ms"] is None and none["early_rate"] is None and none["missed"] == 1


def test_summary_is_that_of_the_fewest_sessions_with_early_units() -> None:
    rows = [
        {"sessions": n, "early_unit": mode, "missed": 0.0, "early_rate": 1.0, "false_starts": n / 100}
        | {"turn_ms": {"p50": 100.0 * n, "p95": 200.0 * n}}
        for n in (8, 1)
        for mode in ("off", "auto")
    ]
    assert summary(rows) | {"command": 0} == {
        **{"turn_p50_ms": 100.0, "turn_p95_ms": 200.0, "false_starts": 0.01, "missed": 0.0, "early_rate": 1.0},
        "command": 0,
    }
    assert summary(rows[:1])["turn_p50_ms"] == 800 and summary([])["turn_p50_ms"] is None


def test_questions_are_placed_where_they_are_heard() -> None:
    """Speech reaches to the end that is noted, and nothing but noise follows it."""
    questions = load_questions()
    assert len(questions) == 24 and sum(len(one.phrases) > 1 for one in questions) >= 10
    conditions = Conditions(pauses_ms=(100, 100), hesitations=0.5, snr_db=36.0, answer_s=0.5, lead_s=0.5)
    sound = user_sound(questions, 48, conditions, np.random.default_rng(1))
    assert len(sound.questions) == 48 and {one.index for one in sound.questions} == set(range(24))
    assert {one.kind for one in sound.questions} == set(KINDS)
    for one in sound.questions:
        phrases, fillers = questions[one.index].phrases, [len(filler) for filler in questions[one.index].fillers]
        beside_ms, n = (one.end - one.begin - sum(map(len, phrases))) / 16, len(phrases)
        low, high = {
            "plain": (0, 0),
            "phrases": (100 * (n - 1), 100 * (n - 1)),
            "silent": (250 + 100 * (n - 2), 700 * (n - 1)),
            "filled": (250 + min(fillers) / 16 + 100 * (n - 2), n * (1400 + max(fillers) / 16)),
        }[one.kind]
        assert low - 1 <= beside_ms <= high + 1, f"{one}: expected {low} to {high} ms beside phrases, got {beside_ms}"
        frames = sound.samples[one.end - 1600 : one.end + 1600].reshape(2, -1)
        last, after = np.sqrt(np.square(frames).mean(1))
        assert last > 2 * after, f"question {one.index}: expected speech up to its end, got {last:.4f}, {after:.4f}"
        assert after < 1.2 * SPEECH_LEVEL * 10 ** (-36 / 20)
        assert 0.5 <= (one.until - one.end) / RATE < 1.51
