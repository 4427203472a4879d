"""Where speech begins and ends in one session's sound.

Knows windows, how likely each is speech, and the rules that make segments of them. Does not know sessions, turns or
what becomes of a segment.

A window of 32 ms with p at or above the threshold begins a segment. Windows below the threshold less a margin count
as silence, any other window breaks it; enough silence ends the segment and belongs to it.
"""

from dataclasses import dataclass

import numpy as np

from models.inputs.audio_sizes import CLIP_SAMPLES, SAMPLE_RATE
from models.sampling.settings import check_number
from worker.chat.vad_network import CONTEXT, WINDOW, SpeechNetwork, shared_network
from worker.loop.audio_buffer import checked

SAMPLES_PER_MS = SAMPLE_RATE // 1000

SILENCE_MARGIN = 0.15
# A threshold within the margin of 0 would leave nothing that counts as silence.
MIN_SILENCE_BOUND = 0.01
MIN_THRESHOLD = 0.05

MAX_SEGMENT = CLIP_SAMPLES  # what the audio encoder takes in one piece
MAX_BOUND_MS = 10_000
MAX_PAD_MS = 1_000


@dataclass(frozen=True)
class VoiceSettings:
    """When sound counts as speech.

    threshold: probability that begins a segment, 0.05 to 1.
    min_speech_ms: segments with less before their closing silence are discarded; up to 10 s.
    min_silence_ms: silence that ends a segment, up to 10 s. Both are counted in whole windows.
    speech_pad_ms: sound before the first window that belongs to the segment, up to 1 s; less where the sound begins
        or another segment ended.
    Raises: SettingsError for a value outside its range.
    """

    threshold: float = 0.7
    min_speech_ms: int = 128
    min_silence_ms: int = 500
    speech_pad_ms: int = 30

    def __post_init__(self) -> None:
        check_number("threshold", self.threshold, at_least=MIN_THRESHOLD, at_most=1)
        check_number("min_speech_ms", self.min_speech_ms, at_least=0, at_most=MAX_BOUND_MS, whole=True)
        check_number("min_silence_ms", self.min_silence_ms, at_least=0, at_most=MAX_BOUND_MS, whole=True)
        check_number("speech_pad_ms", self.speech_pad_ms, at_least=0, at_most=MAX_PAD_MS, whole=True)

    @property
    def silence_below(self) -> float:
        return max(self.threshold - SILENCE_MARGIN, MIN_SILENCE_BOUND)


@dataclass(frozen=True)
class SpeechStarted:
    """`at_sample`: the segment's first sample, counted from the detector's start or last reset."""

    at_sample: int


@dataclass(frozen=True, eq=False)
class SpeechEnded:
    """`samples`: [n] float32 at 16 kHz, from `at_sample` of the start to the end of the closing silence."""

    samples: np.ndarray

    @property
    def duration_ms(self) -> float:
        return len(self.samples) / SAMPLES_PER_MS


@dataclass(frozen=True)
class SpeechDiscarded:
    """What had started was too short to be speech."""


VoiceEvent = SpeechStarted | SpeechEnded | SpeechDiscarded


class VoiceDetector:
    """One session's sound in, of any lengths; speech segments out. What it holds is bounded by the longest segment."""

    def __init__(self, settings: VoiceSettings | None = None, network: SpeechNetwork | None = None):
        self.settings = settings or VoiceSettings()
        self._network = network or shared_network()
        self._n_pad = self.settings.speech_pad_ms * SAMPLES_PER_MS
        self._n_closing = max(self.settings.min_silence_ms * SAMPLES_PER_MS, 1)
        self.reset()

    def reset(self) -> None:
        """Forget all sound, as before the first push; an open segment goes without an event."""
        self._state = self._network.start()
        self._rest = np.zeros(0, np.float32)  # less than a window
        self._before = np.zeros(max(CONTEXT, self._n_pad), np.float32)  # the sound before the next window
        self._at = 0  # the next window's first sample
        self._ended_at = 0  # where the last segment ended; no later segment reaches behind it
        self._segment: list[np.ndarray] | None = None
        self._n_segment = 0
        self._spoken_from = 0
        self._n_silence = 0

    def push(self, samples: np.ndarray) -> list[VoiceEvent]:
        """Hear more sound; what is left of the last window waits for the next push.

        Args:
            samples: [n] float in [-1, 1] at 16 kHz, n >= 1; copied.
        Returns: everything that happened, in order. How the sound is cut into pushes makes no difference.
        Raises: AudioError for what is no such sound; nothing of it is heard then.
        """
        sound = np.concatenate([self._rest, checked(samples)])
        n_whole = len(sound) // WINDOW * WINDOW
        self._rest = sound[n_whole:].copy()
        events = (self._hear(window) for window in sound[:n_whole].reshape(-1, WINDOW))
        return [event for event in events if event is not None]

    def _hear(self, window: np.ndarray) -> VoiceEvent | None:
        p, self._state = self._network.probability(np.concatenate([self._before[-CONTEXT:], window]), self._state)
        event = None
        if self._segment is not None:
            event = self._continue(self._segment, window, p)
        elif p >= self.settings.threshold:
            event = self._begin(window)
        self._before = np.concatenate([self._before, window])[-len(self._before) :]
        self._at += WINDOW
        return event

    def _begin(self, window: np.ndarray) -> SpeechStarted:
        n_pad = min(self._n_pad, self._at - self._ended_at)
        # Copies: a window of a long push would keep all of its sound in memory.
        self._segment = [self._before[len(self._before) - n_pad :], window.copy()]
        self._n_segment = n_pad + WINDOW
        self._spoken_from = self._at
        self._n_silence = 0
        return SpeechStarted(self._at - n_pad)

    def _continue(self, segment: list[np.ndarray], window: np.ndarray, p: float) -> VoiceEvent | None:
        segment.append(window.copy())
        self._n_segment += WINDOW
        self._n_silence = self._n_silence + WINDOW if p < self.settings.silence_below else 0
        if self._n_silence < self._n_closing and self._n_segment + WINDOW <= MAX_SEGMENT:
            return None
        self._segment = None
        self._ended_at = self._at + WINDOW
        if self._ended_at - self._n_silence - self._spoken_from < self.settings.min_speech_ms * SAMPLES_PER_MS:
            return SpeechDiscarded()
        return SpeechEnded(np.concatenate(segment))
