"""Caps and silence that end an answer which does not end by itself."""

import pytest

from models.errors import SettingsError
from models.qwen3_tts.runaway import RunawayLimits, SilenceWatch


def test_cap_grows_with_the_text() -> None:
    assert RunawayLimits().frame_cap(10) == 24 + 60
    assert RunawayLimits(max_frames=50).frame_cap(10) == 50
    assert RunawayLimits(max_frames=50).frame_cap(2) == 36
    with pytest.raises(SettingsError, match="max_frames"):
        RunawayLimits(max_frames=0)


def test_silence_counts_after_the_text_and_without_a_break() -> None:
    watch = SilenceWatch(RunawayLimits(silent_seconds=0.4))  # 5 frames
    quiet, loud = 0.001, 0.1
    before = [watch.push(quiet, text_is_read=False) for _ in range(20)]
    assert not any(before)
    frames = [*[quiet] * 4, loud, *[quiet] * 5]
    assert [watch.push(peak, text_is_read=True) for peak in frames] == [False] * 9 + [True]
