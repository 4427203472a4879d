"""Speech in the user's sound: when it begins, is certain, and ends. Contains no thread and no events of a session.

The network gives a probability for each window of 32 ms. A turn of the user begins with a window at or above the
threshold and is reported once enough of it is speech; silence below the threshold minus a margin ends it.
"""

from dataclasses import dataclass

import numpy as np

from worker.vad_network import WINDOW, SpeechNetwork, SpeechWindows

RATE_MS = 16  # samples a ms
WINDOW_MS = WINDOW / RATE_MS
SILENCE_MARGIN = 0.15
MIN_SILENCE_BOUND = 0.01
CERTAIN_MS = 96  # of speech, until it is reported
GAP_MS = 320  # of silence, after which speech that was not reported is forgotten


@dataclass(frozen=True)
class DetectorSettings:
    """As `turn_detection` of a session; see there."""

    threshold: float = 0.5
    prefix_padding_ms: int = 300
    silence_duration_ms: int = 500


@dataclass(frozen=True)
class SpeechHeard:
    """The user speaks. All times count from the first sample.

    start_ms: of the turn, padding included. speech_ms: speech in the turn so far. at_ms: where the sound so far ends.
    """

    start_ms: int
    speech_ms: float
    at_ms: float


@dataclass(frozen=True)
class SpeechContinues:
    """More of a turn that was reported. speech_ms: speech in the turn so far. at_ms: where the sound so far ends."""

    speech_ms: float
    at_ms: float


@dataclass(frozen=True)
class SpeechOver:
    """The user's turn has ended. end_ms: from the first sample, without the silence that ended it."""

    end_ms: int


Heard = SpeechHeard | SpeechContinues | SpeechOver


class SpeechDetector:
    """Turns in one session's sound."""

    def __init__(self, network: SpeechNetwork, settings: DetectorSettings):
        self.settings = settings
        self._windows = SpeechWindows(network)
        self._at = 0  # index of the next window's first sample
        self._turns = TurnFinder()

    def forget(self) -> None:
        """Drop a turn that has not ended."""
        self._turns = TurnFinder()

    def push(self, samples: np.ndarray) -> list[Heard]:
        """What the sound so far says. samples: [n] float32 at 16 kHz. Takes about 0.2 ms for a window."""
        found: list[Heard] = []
        for p in self._windows.push(samples):
            self._at += WINDOW
            found += self._turns.push(p, self._at / RATE_MS, self.settings)
        return found


class TurnFinder:
    """Turns in a row of probabilities."""

    def __init__(self) -> None:
        self._start_ms: float | None = None  # of speech that may be a turn
        self._speech_ms = self._silence_ms = 0.0
        self._is_reported = False
        self._floor_ms = 0.0  # the end of the turn before; padding stops here

    def push(self, p: float, end_ms: float, settings: DetectorSettings) -> list[Heard]:
        """What the next window says. p: probability of speech. end_ms: of the window, from the first sample."""
        if self._start_ms is None:
            if p < settings.threshold:
                return []
            self._start_ms = end_ms - WINDOW_MS
            self._speech_ms = self._silence_ms = 0.0
            self._is_reported = False
        if p >= max(settings.threshold - SILENCE_MARGIN, MIN_SILENCE_BOUND):
            self._speech_ms += WINDOW_MS
            self._silence_ms = 0.0
            return self._on_speech(self._start_ms, end_ms, settings)
        self._silence_ms += WINDOW_MS
        if not self._is_reported:
            if self._silence_ms >= GAP_MS:
                self._start_ms = None
            return []
        if self._silence_ms < settings.silence_duration_ms:
            return []
        self._start_ms, self._floor_ms = None, end_ms
        return [SpeechOver(round(end_ms - self._silence_ms))]

    def _on_speech(self, start_ms: float, end_ms: float, settings: DetectorSettings) -> list[Heard]:
        if self._is_reported:
            return [SpeechContinues(self._speech_ms, end_ms)]
        if self._speech_ms < CERTAIN_MS:
            return []
        self._is_reported = True
        padded = max(start_ms - settings.prefix_padding_ms, self._floor_ms)
        return [SpeechHeard(round(padded), self._speech_ms, end_ms)]
