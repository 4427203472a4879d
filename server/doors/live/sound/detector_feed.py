"""Runs the detector of one session off the event loop, in the order of the sound."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from server.doors.live.sound.detector import RATE_MS, DetectorSettings, Heard, SpeechDetector
from server.doors.live.sound.recent_sound import RecentSound
from worker.vad_network import WINDOW, shared_network

CHUNK = 16_000  # samples at once at most, so that sessions with much sound do not delay the others
MAX_WAITING = 60 * 16_000  # samples; the oldest beyond are skipped, if the detector is slower than real time
# The network takes 0.2 ms for 32 ms of sound, without Python's lock.
_POOL = ThreadPoolExecutor(max_workers=2, thread_name_prefix="detector")


class DetectorFeed:
    """Passes one session's sound to its detector.

    pushed_ms: length of all sound so far.
    """

    def __init__(self, settings: DetectorSettings):
        self._settings = settings
        self._waiting: list[np.ndarray] = []
        self._n_waiting = 0
        self.pushed_ms = 0.0
        self._n_taken = 0  # samples that the detector got
        self._n_needed = WINDOW  # samples that complete its next window
        self._has_window = asyncio.Event()
        self._detector: SpeechDetector | None = None
        self._heard_ms = 0.0
        self._recent: RecentSound | None = None

    def configure(self, settings: DetectorSettings) -> None:
        """Change the settings from the next sound on."""
        self._settings = settings
        if self._detector is not None:
            self._detector.settings = settings

    def forget(self) -> None:
        """Drop a turn that was reported and has not ended: speech from now on is another one."""
        if self._detector is not None:
            self._detector.forget()

    def push(self, samples: np.ndarray) -> None:
        """Add sound. samples: [n] float32 at 16 kHz."""
        n = len(samples)
        self.pushed_ms += n / RATE_MS
        self._waiting.append(samples)
        self._n_waiting += n
        while self._n_waiting > MAX_WAITING and len(self._waiting) > 1:
            self._n_waiting -= len(self._waiting.pop(0))
        if self._recent is not None:
            self._recent.push(samples)
        if self._n_waiting >= self._n_needed:
            self._has_window.set()

    def keep_in(self, recent: RecentSound) -> None:
        """Pass on all sound from now on."""
        self._recent = recent

    async def run(self, listener: Callable[[Heard], None]) -> None:
        """Process sound until cancelled. listener: gets what is detected, on the event loop."""
        loop = asyncio.get_running_loop()
        while True:
            await self._has_window.wait()
            self._has_window.clear()
            if self._detector is None:
                self._detector = await loop.run_in_executor(_POOL, self._make)
            while self._n_waiting >= self._n_needed:
                sound = np.concatenate(self._waiting)
                self._n_taken += self._n_waiting
                self._n_needed = WINDOW - self._n_taken % WINDOW
                self._waiting, self._n_waiting = [], 0
                for start in range(0, len(sound), CHUNK):
                    chunk = sound[start : start + CHUNK]
                    for heard in await loop.run_in_executor(_POOL, self._detector.push, chunk):
                        listener(heard)
                    self._heard_ms += len(chunk) / RATE_MS
                    if self._recent is not None:
                        self._recent.advance(self._heard_ms)

    def _make(self) -> SpeechDetector:
        return SpeechDetector(shared_network(), self._settings)
