"""Pauses: the rules on given probabilities, and the network on recorded speech."""

from collections.abc import Sequence
from itertools import groupby, pairwise
from pathlib import Path

import numpy as np
import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st

from worker.early.pause import CERTAIN_MS, GAP_MS, WINDOW_MS, HeardPiece, PauseDetector, PauseFinder
from worker.vad_network import CONTEXT, WINDOW, SpeechNetwork, shared_network

SPEECH, UNSURE, SILENCE = 0.9, 0.4, 0.1
PAUSE_MS = 192
NEEDED = PAUSE_MS // WINDOW_MS
CERTAIN = CERTAIN_MS // WINDOW_MS


def pauses(probabilities: Sequence[float], pause_ms: int = PAUSE_MS) -> list[int]:
    """Indices of the windows at which a pause is reached."""
    finder = PauseFinder(pause_ms)
    return [number for number, p in enumerate(probabilities) if finder.push(p)]


@pytest.mark.parametrize(
    ("probabilities", "expected"),
    [
        ([SILENCE] * 40, []),
        ([SPEECH] * 40, []),
        ([SPEECH] * CERTAIN + [SILENCE] * 40, [CERTAIN + NEEDED - 1]),
        ([SPEECH] * (CERTAIN - 1) + [SILENCE] * 40, []),
        ([SPEECH] * CERTAIN + [SILENCE] * (NEEDED - 1) + [SPEECH] + [SILENCE] * NEEDED, [CERTAIN + 2 * NEEDED - 1]),
        ([SPEECH] * CERTAIN + [SILENCE] * (NEEDED - 1) + [UNSURE] + [SILENCE] * (NEEDED - 1), []),
        ([SPEECH] * CERTAIN + [SILENCE] * NEEDED + [SPEECH] * (CERTAIN - 1) + [SILENCE] * 40, [CERTAIN + NEEDED - 1]),
        (([SPEECH] * CERTAIN + [SILENCE] * NEEDED) * 2, [CERTAIN + NEEDED - 1, 2 * (CERTAIN + NEEDED) - 1]),
        # Short sounds add up to speech unless `GAP_MS` of silence is between them.
        (([SPEECH] + [SILENCE] * 2) * CERTAIN + [SILENCE] * NEEDED, [3 * CERTAIN + NEEDED - 3]),
        (([SPEECH] + [SILENCE] * (GAP_MS // WINDOW_MS)) * CERTAIN + [SILENCE] * NEEDED, []),
    ],
)
def test_pauses_of_a_row(probabilities: list[float], expected: list[int]) -> None:
    assert pauses(probabilities) == expected


@given(st.lists(st.sampled_from((SPEECH, UNSURE, SILENCE)), max_size=80), st.sampled_from((160, 192, 224, 288)))
def test_pause_follows_speech_and_enough_silence(probabilities: list[float], pause_ms: int) -> None:
    """At each pause exactly so much silence has passed, and since the one before so much speech was heard."""
    needed, last = pause_ms // WINDOW_MS, -1
    for at in pauses(probabilities, pause_ms):
        assert all(p == SILENCE for p in probabilities[at - needed + 1 : at + 1]), probabilities
        assert probabilities[last + 1 : at + 1].count(SPEECH) >= CERTAIN, probabilities
        last = at
    # A stretch of certain speech with a stretch of silence right after it always has a pause.
    runs = [(p, len(list(run))) for p, run in groupby(probabilities)]
    clear = any(
        (one[0], two[0]) == (SPEECH, SILENCE) and one[1] >= CERTAIN and two[1] >= needed for one, two in pairwise(runs)
    )
    assert pauses(probabilities, pause_ms) or not clear, f"expected a pause in {probabilities}"


class LoudnessNetwork(SpeechNetwork):
    """A window's probability is its last sample."""

    def __init__(self) -> None:
        pass

    def probability(self, sound: np.ndarray, state: np.ndarray) -> tuple[float, np.ndarray]:
        assert sound.shape == (CONTEXT + WINDOW,) and sound.dtype == np.float32
        return float(sound[-1]), state


def sound_of(probabilities: Sequence[float]) -> np.ndarray:
    return np.repeat(np.float32(probabilities), WINDOW)


def test_piece_with_speech_after_its_pause_has_no_pause() -> None:
    row = [SPEECH] * CERTAIN + [SILENCE] * NEEDED
    assert PauseDetector(LoudnessNetwork(), PAUSE_MS).push(sound_of(row)) == HeardPiece(True, True)
    assert PauseDetector(LoudnessNetwork(), PAUSE_MS).push(sound_of([*row, SPEECH])) == HeardPiece(True, False)


@given(
    st.lists(st.sampled_from((SPEECH, SILENCE)), min_size=10, max_size=40),
    st.lists(st.integers(1, 3 * WINDOW), min_size=1, max_size=6),
)
def test_pieces_do_not_depend_on_how_sound_is_split(row: list[float], lengths: list[int]) -> None:
    detector, sound, found = PauseDetector(LoudnessNetwork(), PAUSE_MS), sound_of(row), []
    at = number = 0
    while at < len(sound):
        n = lengths[number % len(lengths)]
        heard = detector.push(sound[at : at + n])
        at, number = at + n, number + 1
        found += [min(at, len(sound)) // WINDOW] if heard.is_pause else []
    # A piece may hold the start of the next speech, which hides its pause.
    assert set(found) <= {end for pause in pauses(row) for end in range(pause + 1, pause + 5)}, (found, pauses(row))


def test_sound_that_is_not_finite_is_left_out() -> None:
    detector = PauseDetector(LoudnessNetwork(), PAUSE_MS)
    detector.push(sound_of([SPEECH] * CERTAIN))
    bad = sound_of([SILENCE] * NEEDED)
    bad[5] = np.nan
    assert detector.push(bad) == HeardPiece(False, False)
    assert detector.push(sound_of([SILENCE] * NEEDED)) == HeardPiece(False, True)


def test_pause_after_a_sentence(root: Path) -> None:
    """Pieces of 100 ms of a recorded sentence and silence: the last pause comes 200 to 400 ms after its end."""
    greeting = soundfile.read(root / "tests/data/greeting.wav", dtype="float32")[0]
    sound = np.concatenate((greeting, np.zeros(16_000, np.float32)))
    detector = PauseDetector(shared_network(), 200)
    heard = [detector.push(sound[at : at + 1_600]) for at in range(0, len(sound), 1_600)]
    last_speech = max(number for number, piece in enumerate(heard) if piece.has_speech)
    after = [number - last_speech for number, piece in enumerate(heard) if piece.is_pause and number > last_speech]
    assert len(after) == 1 and 2 <= after[0] <= 4, f"expected one pause after the sentence, got pieces {after}"
