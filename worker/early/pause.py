"""Pauses in a user's sound: silence right after speech, found window by window. Contains no thread and no session."""

from typing import NamedTuple

import numpy as np

from worker.vad_network import SpeechNetwork, SpeechWindows

WINDOW_MS = 32
THRESHOLD = 0.5  # probability of speech
SILENCE_BELOW = 0.35  # between the two a window is neither speech nor silence
CERTAIN_MS = 96  # of speech, until a pause can follow it
GAP_MS = 320  # of silence, after which less speech than that is forgotten


class PauseFinder:
    """Pauses in a row of probabilities: one for each stretch of speech.

    A window is speech, silence or neither. A pause is reached when `pause_ms` of silence in a row follow at least
    `CERTAIN_MS` of speech; a window that is neither keeps the silence from being counted. After a pause, the same
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
    """Pauses of one session."""

    def __init__(self, network: SpeechNetwork, pause_ms: int):
        self._windows, self._finder = SpeechWindows(network), PauseFinder(pause_ms)

    def push(self, samples: np.ndarray) -> HeardPiece:
        """What a piece of sound, [n] float32 at 16 kHz, contains.

        Sound that is not finite is left out: its unit is refused.
        """
        if not np.isfinite(samples).all():
            return NOTHING_HEARD
        has_speech = is_pause = False
        for p in self._windows.push(samples):
            is_pause |= self._finder.push(p)
            if p >= THRESHOLD:
                has_speech, is_pause = True, False
        return HeardPiece(has_speech, is_pause)
