import asyncio
import threading

import numpy as np
import pytest

from server.doors.live.sound import detector_feed
from server.doors.live.sound.detector import DetectorSettings, Heard
from server.doors.live.sound.detector_feed import DetectorFeed
from tests.server.live_gateway import run
from worker.vad_network import WINDOW


class StubDetector:
    """Hears nothing. got: all pieces of sound. whole: is set whenever a window is complete."""

    def __init__(self, *_: object):
        self.got: list[np.ndarray] = []
        self.whole = threading.Semaphore(0)

    def push(self, samples: np.ndarray) -> list[Heard]:
        n_before = sum(map(len, self.got))
        self.got.append(samples)
        for _ in range((n_before + len(samples)) // WINDOW - n_before // WINDOW):
            self.whole.release()
        return []


def test_the_detector_gets_each_window_with_the_append_that_completes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    detector = StubDetector()
    monkeypatch.setattr(detector_feed, "SpeechDetector", lambda *_: detector)
    sizes = [320] * 50 + [100, 3 * WINDOW, 1, 0, 240, 240, 1600]

    async def scenario() -> None:
        feed = DetectorFeed(DetectorSettings())
        running = asyncio.create_task(feed.run(lambda _: None))
        sound = np.arange(sum(sizes), dtype=np.float32)
        at = 0
        for n in sizes:
            feed.push(sound[at : at + n])
            for _ in range((at + n) // WINDOW - at // WINDOW):
                assert await asyncio.to_thread(detector.whole.acquire, timeout=60), f"expected a window at {at + n}"
            at += n
        running.cancel()
        heard = np.concatenate(detector.got)
        np.testing.assert_array_equal(heard, sound[: len(heard)])
        assert feed.pushed_ms == pytest.approx(len(sound) / 16)
        assert len(detector.got) <= len(sound) // WINDOW, "expected no piece without a window"

    run(scenario)
