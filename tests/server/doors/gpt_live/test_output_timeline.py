"""The timeline of a GPT-Live session's sound."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from server.doors.gpt_live.output_timeline import HOLD, RATE, OutputTimeline


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9000), st.integers(0, 9000)), max_size=12))
def test_all_sound_comes_out_once_and_in_order(steps: list[tuple[int, int]]) -> None:
    """Each step adds some samples and takes others; whatever is added comes out where `add` said."""
    timeline, taken, spans, n_added = OutputTimeline(), [], [], 0
    for n_in, n_out in steps:
        sound = np.arange(n_added + 1, n_added + 1 + n_in, dtype=np.float32)
        spans.append((timeline.add(sound), sound))
        n_added += n_in
        taken.append(timeline.take(n_out))
    taken.append(timeline.take(n_added + HOLD))
    out = np.concatenate(taken)
    assert np.array_equal(out[out != 0], np.arange(1, n_added + 1)), "expected every sample once, in order"
    for (start_ms, end_ms), sound in spans:
        if len(sound):
            at = int(np.flatnonzero(out == sound[0])[0])
            assert start_ms == at * 1000 // RATE, (start_ms, at)
            assert end_ms == (at + len(sound)) * 1000 // RATE


def test_speech_after_a_gap_is_held_back_once() -> None:
    """The first unit has 840 ms of sound; the second comes 1040 ms after it."""
    timeline, first, second = OutputTimeline(), RATE * 840 // 1000, RATE
    assert not timeline.take(RATE).any()
    assert timeline.add(np.ones(first, np.float32)) == (1200, 2040)
    out = [timeline.take(RATE * 1040 // 1000 - 1)]
    assert timeline.add(np.ones(second, np.float32)) == (2040, 3040)
    heard = np.flatnonzero(np.concatenate([*out, timeline.take(3 * RATE)]))
    assert (heard[0], heard[-1], len(heard)) == (HOLD, HOLD + first + second - 1, first + second)
