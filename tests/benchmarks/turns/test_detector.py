"""The detector of pauses on the spoken questions: which messages count as a wait, and which as a cut."""

from functools import partial

import numpy as np

from benchmarks.turns.detector import answered_seconds, found_pauses, measured, row
from benchmarks.turns.pieces import PieceEnds
from benchmarks.turns.questions import RATE, Conditions, PlacedQuestion, UserSound, load_questions, user_sound
from worker.config.session import SessionConfig

QUESTIONS = [PlacedQuestion(0, 0, 16_000, 48_000, "plain"), PlacedQuestion(1, 48_000, 64_000, 90_000, "plain")]


def test_rows_count_the_first_pause_after_the_end_and_cuts_before_it() -> None:
    figures = row(QUESTIONS, [8_000, 19_200, 40_000, 100_000])
    assert figures == {"questions": 2, "wait_ms": {"p50": 200.0, "p95": 200.0, "max": 200.0}, "cut_off": 0.5}
    answers = row(QUESTIONS, [8_000, 19_200, 72_000], are_answers=True)
    assert answers["wait_ms"]["p50"] == 500.0, f"expected no wait of a question that is cut off, got {answers}"


def test_messages_are_short_beside_speech() -> None:
    sound = user_sound(load_questions(), 1, Conditions(answer_s=1.0, lead_s=1.0), np.random.default_rng(0))
    (question,) = sound.questions
    pieces, ends = PieceEnds(sound.samples, 100, 40), [0]
    while (end := pieces.next(ends[-1])) is not None:
        ends.append(end)
    del ends[0]
    sizes = {end: end - begin for begin, end in zip([0, *ends], ends, strict=False)}
    assert {size for end, size in sizes.items() if end < question.begin - 1_600} == {1_600}
    near = [size for end, size in sizes.items() if question.begin + 8_000 < end < question.end + 4_800]
    assert near and set(near) == {640}, f"expected 40 ms up to 300 ms after speech, got {near}"
    assert sizes[ends[-1]] == 1_600 and ends[-1] > len(sound.samples) - 1_600
    assert [pieces.next(0, rest) for rest in (160, 1_600, 2_080, 2_240)] == [160, 1_600, 2_080, 1_600]


def test_default_pause_is_found_within_the_goal() -> None:
    """The detector's part of the wait, which no machine changes."""
    sound = user_sound(load_questions(), 12, Conditions(answer_s=1.0, lead_s=1.0), np.random.default_rng(0))
    pause_ms = SessionConfig().early_pause_ms
    figures = measured([sound], partial(found_pauses, pause_ms=pause_ms, piece_ms=(100, 40)))
    assert figures["questions"] == 12 and figures["wait_ms"]["p50"] < 270, f"expected below 270 ms, got {figures}"
    assert figures["cut_off"] <= 1 / 12, f"expected one cut at most, got {figures}"


def test_script_answers_at_the_end_of_a_second_that_ends_in_silence() -> None:
    """A pause of 180 ms at the first edge. What is said during an answer of two seconds is not heard."""
    samples = np.zeros(6 * RATE, np.float32)
    samples[: int(0.82 * RATE)] = samples[RATE : int(1.5 * RATE)] = samples[4 * RATE : int(4.5 * RATE)] = 0.1
    sound = UserSound(samples, ())
    assert answered_seconds(sound, 160) == [RATE, 5 * RATE]
    assert answered_seconds(sound, 200) == [2 * RATE, 5 * RATE]
