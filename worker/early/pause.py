"""Pauses in a user's sound: silence right after speech, found window by window. Contains no thread and no session."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from worker.vad_network import SpeechNetwork, SpeechWindows

WINDOW_MS = 32
THRESHOLD = 0.5  # probability of speech
SILENCE_BELOW = 0.35  # between the two a window is neither speech nor silence
CERTAIN_MS = 96  # of speech, until a pause can follow it
GAP_MS = 320  # of silence, after which speech of less than `CERTAIN_MS` is forgotten


class PauseFinder:
    """Pauses in a row of probabilities: one for each stretch of speech.

    A window is speech, silence or neither. A pause is reached when `pause_ms` of silence in a row follow at least
    `CERTAIN_MS` of speech; a window that is neither starts the count of silence again. After a pause, the same
    amount of speech is needed for the next one.
    """

    def __init__(self, pause_ms: int):
        """pause_ms: counted in whole windows."""
        self.pause_ms = pause_ms
        self._speech_ms = self._silence_ms = 0

    def push(self, p: float) -> bool:
        """Take the probability of the next window. Returns: whether a pause is reached with it."""
        if p >= THRESHOLD:
            self._speech_ms += WINDOW_MS
            self._silence_ms = 0
            return False
        if p >= SILENCE_BELOW:
            self._silence_ms = 0
            return False
        self._silence_ms += WINDOW_MS
        is_certain = self._speech_ms >= CERTAIN_MS
        if self._silence_ms < (self.pause_ms if is_certain else GAP_MS):
            return False
        self._speech_ms = 0
        return is_certain


class HeardPiece(NamedTuple):
    """A piece of sound.

    has_speech: some of it is speech. is_pause: a pause is reached in it, and no speech follows.
    """

    has_speech: bool
    is_pause: bool


NOTHING_HEARD = HeardPiece(False, False)


class PauseDetector:
    """Pauses of one session. windows: its sound in windows of 32 ms, and the network's state."""

    def __init__(self, network: SpeechNetwork, pause_ms: int):
        self.windows, self._finder = SpeechWindows(network), PauseFinder(pause_ms)

    def take(self, probabilities: Iterable[float]) -> HeardPiece:
        """What a piece contains whose windows have these probabilities."""
        has_speech = is_pause = False
        for p in probabilities:
            is_pause |= self._finder.push(p)
            if p >= THRESHOLD:
                has_speech, is_pause = True, False
        return HeardPiece(has_speech, is_pause)


def hear(network: SpeechNetwork, pieces: Sequence[tuple[PauseDetector, np.ndarray]]) -> list[HeardPiece]:
    """What each piece of sound contains, in the order of `pieces`.

    The network runs once for the first windows of all pieces, once for the second ones, and so on.

    Args:
        network: that of all detectors.
        pieces: detector and sound, [n] float32 at 16 kHz; at most one piece of each detector. Sound that is not finite
            counts as no sound: its unit is refused.
    """
    windows = [detector.windows.add(one) if np.isfinite(one).all() else [] for detector, one in pieces]
    probabilities: list[list[float]] = [[] for _ in pieces]
    for number in range(max(map(len, windows), default=0)):
        rows = [row for row, own in enumerate(windows) if number < len(own)]
        states = [pieces[row][0].windows for row in rows]
        found, after = network.probabilities(
            np.stack([windows[row][number] for row in rows]), np.concatenate([one.state for one in states], axis=1)
        )
        for at, (row, one) in enumerate(zip(rows, states, strict=True)):
            probabilities[row].append(float(found[at]))
            one.state = after[:, at : at + 1]
    return [detector.take(own) for (detector, _), own in zip(pieces, probabilities, strict=True)]
