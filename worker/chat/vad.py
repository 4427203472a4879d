"""Voice activity detection for one session: sound in, segments of speech out.

Contains the rules that turn window probabilities into segments. Does not contain the network (`vad_network`), sessions
or turns.

A segment begins with a 32 ms window whose probability is at or above the threshold. Inside a segment, a window below
the threshold minus a margin counts as silence, and any other window resets the silence count. Enough silence in a row
ends the segment and is part of it.
"""

from dataclasses import dataclass

import numpy as np

from models.inputs.audio_sizes import CLIP_SAMPLES, SAMPLE_RATE
from models.sampling.settings import check_number
from worker.loop.audio_buffer import checked
from worker.vad_network import CONTEXT, WINDOW, SpeechNetwork, shared_network

SAMPLES_PER_MS = SAMPLE_RATE // 1000

SILENCE_MARGIN = 0.15
# With a threshold at or below the margin, no probability would count as silence.
MIN_SILENCE_BOUND = 0.01
MIN_THRESHOLD = 0.05

MAX_SEGMENT = CLIP_SAMPLES  # samples that the audio encoder takes in one clip
MAX_BOUND_MS = 10_000
MAX_PAD_MS = 1_000


@dataclass(frozen=True)
class VoiceSettings:
    """When sound counts as speech.

    Args:
        threshold: probability that begins a segment, 0.05 to 1.
        min_speech_ms: a segment with less speech before its closing silence is discarded; 0 to 10 000, counted in
            whole windows.
        min_silence_ms: silence that ends a segment; 0 to 10 000, counted in whole windows.
        speech_pad_ms: sound before the first speech window that belongs to the segment; 0 to 1000. Shorter where the
            sound begins or the previous segment ends.
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
        """A window with a lower probability counts as silence."""
        return max(self.threshold - SILENCE_MARGIN, MIN_SILENCE_BOUND)


@dataclass(frozen=True)
class SpeechStarted:
    """A segment began."""


@dataclass(frozen=True, eq=False)
class SpeechEnded:
    """A segment ended.

    Attributes:
        samples: [n] float32 at 16 kHz, from the padding before speech to the end of the silence.
        speech_ms: from its first speech window to the silence that closes it.
        end: number of samples since the last reset, up to its end.
    """

    samples: np.ndarray
    speech_ms: float
    end: int


@dataclass(frozen=True)
class SpeechDiscarded:
    """A segment ended with less speech than `min_speech_ms`."""


VoiceEvent = SpeechStarted | SpeechEnded | SpeechDiscarded


class VoiceDetector:
    """Speech segments of one session's sound. Memory is bounded by the longest segment, 30 s.

    Args:
        settings: default `VoiceSettings()`.
        network: default the process's shared network.
    """

    def __init__(self, settings: VoiceSettings | None = None, network: SpeechNetwork | None = None):
        self.settings = settings or VoiceSettings()
        self._network = network or shared_network()
        self._n_pad = self.settings.speech_pad_ms * SAMPLES_PER_MS
        self._n_closing = max(self.settings.min_silence_ms * SAMPLES_PER_MS, 1)
        self.reset()

    def reset(self) -> None:
        """Return to the state before the first push; an open segment is dropped without an event."""
        self._state = self._network.start()
        self._rest = np.zeros(0, np.float32)  # samples of an incomplete window
        self._before = np.zeros(max(CONTEXT, self._n_pad), np.float32)  # samples before the next window
        self._at = 0  # index of the next window's first sample
        self._ended_at = 0  # end of the last segment; the next segment's padding stops here
        self._segment: list[np.ndarray] | None = None  # parts of the open segment
        self._n_segment = 0  # its samples
        self._spoken_from = 0  # index of its first speech window's first sample
        self._n_silence = 0  # samples of silence at its end

    @property
    def speech_ms(self) -> float | None:
        """Speech of the open segment before its present silence, at least one window; None between segments."""
        return None if self._segment is None else (self._at - self._n_silence - self._spoken_from) / SAMPLES_PER_MS

    def push(self, samples: np.ndarray) -> list[VoiceEvent]:
        """Process more sound; samples of an incomplete window are kept for the next push.

        Args:
            samples: [n] float in [-1, 1] at 16 kHz, n >= 1; copied.
        Returns: all events, in order. Splitting the sound into other pushes gives the same events.
        Raises: AudioError for invalid samples; the detector's state is unchanged then.
        """
        sound = np.concatenate([self._rest, checked(samples)])
        n_whole = len(sound) // WINDOW * WINDOW
        self._rest = sound[n_whole:].copy()
        events = (self._process(window) for window in sound[:n_whole].reshape(-1, WINDOW))
        return [event for event in events if event is not None]

    def _process(self, window: np.ndarray) -> VoiceEvent | None:
        p, self._state = self._network.probability(np.concatenate([self._before[-CONTEXT:], window]), self._state)
        event: VoiceEvent | None = None
        if self._segment is not None:
            event = self._continue(self._segment, window, p)
        elif p >= self.settings.threshold:
            event = self._begin(window)
        self._before = np.concatenate([self._before, window])[-len(self._before) :]
        self._at += WINDOW
        return event

    def _begin(self, window: np.ndarray) -> SpeechStarted:
        n_pad = min(self._n_pad, self._at - self._ended_at)
        # Copies: a view of a window would keep the whole pushed array in memory.
        self._segment = [self._before[len(self._before) - n_pad :], window.copy()]
        self._n_segment = n_pad + WINDOW
        self._spoken_from = self._at
        self._n_silence = 0
        return SpeechStarted()

    def _continue(self, segment: list[np.ndarray], window: np.ndarray, p: float) -> VoiceEvent | None:
        segment.append(window.copy())
        self._n_segment += WINDOW
        self._n_silence = self._n_silence + WINDOW if p < self.settings.silence_below else 0
        if self._n_silence < self._n_closing and self._n_segment + WINDOW <= MAX_SEGMENT:
            return None
        self._segment = None
        self._ended_at = self._at + WINDOW
        speech_ms = (self._ended_at - self._n_silence - self._spoken_from) / SAMPLES_PER_MS
        if speech_ms < self.settings.min_speech_ms:
            return SpeechDiscarded()
        return SpeechEnded(np.concatenate(segment), speech_ms, self._ended_at)
