"""Pauses: the rules on given probabilities, and the network on recorded speech."""

from collections.abc import Sequence
from itertools import groupby, pairwise
from pathlib import Path

import numpy as np
import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st

from worker.early.pause import CERTAIN_MS, GAP_MS, WINDOW_MS, HeardPiece, PauseDetector, PauseFinder, hear
from worker.vad_network import CONTEXT, STATE_SHAPE, WINDOW, SpeechNetwork, shared_network

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
    """A window's probability is its last sample. The state is the last window's; its end is the next one's context."""

    def __init__(self) -> None:
        self.batches: list[int] = []

    def probabilities(self, sounds: np.ndarray, states: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        n = len(sounds)
        assert sounds.shape == (n, CONTEXT + WINDOW) and sounds.dtype == np.float32
        assert states.shape == (STATE_SHAPE[0], n, STATE_SHAPE[2])
        assert np.array_equal(sounds[:, CONTEXT - 1], states[0, :, 0]), "expected the state of the window before"
        self.batches.append(n)
        return sounds[:, -1], np.broadcast_to(sounds[None, :, -1:], states.shape)


def heard_of(detector: PauseDetector, samples: np.ndarray, network: SpeechNetwork | None = None) -> HeardPiece:
    """What one piece contains."""
    return hear(network or LoudnessNetwork(), [(detector, samples)])[0]


def sound_of(probabilities: Sequence[float]) -> np.ndarray:
    return np.repeat(np.float32(probabilities), WINDOW)


def test_piece_with_speech_after_its_pause_has_no_pause() -> None:
    row = [SPEECH] * CERTAIN + [SILENCE] * NEEDED
    assert heard_of(PauseDetector(LoudnessNetwork(), PAUSE_MS), sound_of(row)) == HeardPiece(True, True)
    assert heard_of(PauseDetector(LoudnessNetwork(), PAUSE_MS), sound_of([*row, SPEECH])) == HeardPiece(True, False)


@given(
    st.lists(st.sampled_from((SPEECH, SILENCE)), min_size=10, max_size=40),
    st.lists(st.integers(1, 3 * WINDOW), min_size=1, max_size=6),
)
def test_pieces_do_not_depend_on_how_sound_is_split(row: list[float], lengths: list[int]) -> None:
    detector, sound, found = PauseDetector(LoudnessNetwork(), PAUSE_MS), sound_of(row), []
    at = number = 0
    while at < len(sound):
        n = lengths[number % len(lengths)]
        heard = heard_of(detector, sound[at : at + n])
        at, number = at + n, number + 1
        found += [min(at, len(sound)) // WINDOW] if heard.is_pause else []
    # A piece may hold the start of the next speech, which hides its pause.
    assert set(found) <= {end for pause in pauses(row) for end in range(pause + 1, pause + 5)}, (found, pauses(row))


def test_sound_that_is_not_finite_is_left_out() -> None:
    detector = PauseDetector(LoudnessNetwork(), PAUSE_MS)
    heard_of(detector, sound_of([SPEECH] * CERTAIN))
    bad = sound_of([SILENCE] * NEEDED)
    bad[5] = np.nan
    assert heard_of(detector, bad) == HeardPiece(False, False)
    assert heard_of(detector, sound_of([SILENCE] * NEEDED)) == HeardPiece(False, True)


@given(st.lists(st.lists(st.sampled_from((SPEECH, UNSURE, SILENCE)), max_size=12), min_size=1, max_size=6))
def test_pieces_of_several_sessions_are_heard_as_each_alone(rows: list[list[float]]) -> None:
    network = LoudnessNetwork()
    detectors = [PauseDetector(network, PAUSE_MS) for _ in rows]
    for _ in range(2):  # the second pieces go on from the states of the first ones
        network.batches.clear()
        got = hear(network, [(one, sound_of(row)) for one, row in zip(detectors, rows, strict=True)])
        assert network.batches == [sum(len(row) > n for row in rows) for n in range(max(map(len, rows)))]
    alone = [PauseDetector(network, PAUSE_MS) for _ in rows]
    expected = [[heard_of(one, sound_of(row)) for _ in range(2)][1] for one, row in zip(alone, rows, strict=True)]
    assert got == expected


def test_pause_after_a_sentence(root: Path) -> None:
    """Pieces of 100 ms of a recorded sentence and silence: the last pause comes 200 to 400 ms after its end."""
    greeting = soundfile.read(root / "tests/data/greeting.wav", dtype="float32")[0]
    sound = np.concatenate((greeting, np.zeros(16_000, np.float32)))
    network = shared_network()
    detector = PauseDetector(network, 200)
    heard = [heard_of(detector, sound[at : at + 1_600], network) for at in range(0, len(sound), 1_600)]
    last_speech = max(number for number, piece in enumerate(heard) if piece.has_speech)
    after = [number - last_speech for number, piece in enumerate(heard) if piece.is_pause and number > last_speech]
    assert len(after) == 1 and 2 <= after[0] <= 4, f"expected one pause after the sentence, got pieces {after}"
