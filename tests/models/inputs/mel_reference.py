"""Reference log-mel by its definition: NumPy, float64, the whole window on every call."""

import numpy as np

from models.inputs.audio import mel_filters

HANN = np.hanning(401)[:400]
FILTERS = mel_filters().numpy()


def raw_frames(window: np.ndarray) -> np.ndarray:
    """[n // 160, 80] log10 power of [n] samples that are mirrored at both ends."""
    mirrored = np.pad(window.astype(np.float64), 200, mode="reflect")
    frames = np.lib.stride_tricks.sliding_window_view(mirrored, 400)[::160][: len(window) // 160]
    power = np.abs(np.fft.rfft(frames * HANN, axis=1)) ** 2
    return np.log10(np.maximum(power @ FILTERS, 1e-10))


def clip(raw: np.ndarray, dynamic: bool) -> np.ndarray:
    return (np.maximum(raw, raw.max() - 8 if dynamic else -10) + 4) / 4


class WholeWindow:
    """The window of one session; each unit is computed from the whole window."""

    def __init__(self, redundancy: int):
        self.redundancy, self.window, self.base, self.emitted = redundancy, np.zeros(0, np.float32), 0, 0

    def push(self, samples: np.ndarray) -> None:
        self.window = np.concatenate((self.window, samples))
        if len(self.window) >= 480_000:
            self.window, self.base = self.window[160_000:], self.base + 1000

    def skip(self) -> None:
        """Emit the next 100 frames of a unit without computing them."""
        self.emitted += 100

    def emit(self, last: bool = False) -> np.ndarray | None:
        """[80, frames] with the next 100 frames and their context, or None until they are stable."""
        n = len(self.window)
        wanted = self.emitted + 100 + self.redundancy
        existing = self.base + n // 160
        stable = self.base + (n - 200) // 160 + 1 if n >= 200 else 0
        if existing <= self.emitted if last else stable < wanted:
            return None
        frames = clip(raw_frames(self.window), dynamic=n >= 80_000)
        first = max(self.emitted - self.redundancy, 0) - self.base
        self.emitted = min(self.emitted + 100, existing)
        return frames[first : wanted - self.base].T
