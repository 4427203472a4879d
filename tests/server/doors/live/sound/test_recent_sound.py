"""Spans of a session's sound, with samples that count from 0."""

import numpy as np
import pytest

from server.doors.live.sound.recent_sound import RecentSound

MAX_MS, IDLE_MS = 1000, 200


class Counted:
    """Sound whose samples are their own index, pushed in parts of 20 ms."""

    def __init__(self) -> None:
        self.sound, self._n = RecentSound(MAX_MS, IDLE_MS), 0

    def push(self, ms: int) -> None:
        for _ in range(0, ms, 20):
            self.sound.push(np.arange(self._n, self._n + 320, dtype=np.float32))
            self._n += 320
            self.sound.advance(self._n / 16)

    def cut(self, end_ms: float | None = None) -> tuple[float, float]:
        """First and last ms of the span; (0, 0) if it is empty."""
        found = self.sound.cut(end_ms)
        if not len(found):
            return 0.0, 0.0
        assert np.array_equal(np.diff(found), np.ones(len(found) - 1)), "expected sound without gaps"
        return float(found[0]) / 16, (float(found[-1]) + 1) / 16


@pytest.fixture
def counted() -> Counted:
    counted = Counted()
    counted.push(500)
    counted.sound.keep(is_kept=True)
    return counted


def test_a_turn_is_cut_from_its_begin_to_its_end(counted: Counted) -> None:
    counted.push(300)
    counted.sound.begin(650)
    counted.push(400)
    assert counted.cut(1050) == (650, 1050)
    counted.push(40)
    assert counted.cut() == (1050, 1240), "expected the sound since the turn before"


def test_old_sound_is_dropped(counted: Counted) -> None:
    counted.push(2000)
    assert counted.cut() == (2500 - IDLE_MS, 2500)
    counted.sound.begin(2500)
    counted.push(2 * MAX_MS)
    assert counted.cut() == (4500 - MAX_MS, 4500), "expected the newest sound of a long turn"


def test_sound_that_the_detector_has_not_heard_is_kept() -> None:
    sound = RecentSound(MAX_MS, IDLE_MS)
    sound.keep(is_kept=True)
    sound.push(np.arange(16 * 5000, dtype=np.float32))
    sound.advance(600)
    sound.begin(450)
    assert sound.cut(900)[[0, -1]].tolist() == [16 * 450, 16 * 900 - 1]
    sound.begin(1000)
    assert sound.cut()[[0, -1]].tolist() == [16 * (5000 - MAX_MS), 16 * 5000 - 1], "expected the end of a long turn"


def test_sound_that_is_cleared_or_not_kept_is_gone(counted: Counted) -> None:
    counted.push(100)
    counted.sound.clear()
    counted.push(60)
    assert counted.cut() == (600, 660)
    counted.push(100)
    counted.sound.keep(is_kept=False)
    counted.push(100)
    assert counted.cut() == (0, 0)
    counted.sound.keep(is_kept=True)
    counted.push(40)
    assert counted.cut() == (860, 900)
