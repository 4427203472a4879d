"""Silence at the end of a reply's sound, and the bound of its speech tokens."""

import numpy as np

from worker.chat.sound_end import KEPT_S, LIMITS, SoundEnd
from worker.loop.results import SOUND_RATE

KEPT = round(KEPT_S * SOUND_RATE)
SECOND = SOUND_RATE


def sound(n: int, level: float = 0.5) -> np.ndarray:
    return np.full(n, level, np.float32)


def silence(n: int) -> np.ndarray:
    return sound(n, 0.0)


def test_a_pause_is_passed_on_with_the_sound_after_it() -> None:
    end = SoundEnd()
    given = [sound(100), silence(SECOND), silence(SECOND), sound(100), silence(50)]
    got = [end.push(one, text_is_read=True) for one in given]
    assert [len(one) for one in got] == [100, KEPT, 0, 2 * SECOND - KEPT + 100, 50]
    assert np.array_equal(np.concatenate(got), np.concatenate(given)) and not end.is_over


def test_little_silence_stays_at_the_end_and_much_of_it_ends_a_reply() -> None:
    end = SoundEnd()
    quiet = sound(SECOND, 0.004)  # 42 dB below the loudest sample
    got = [end.push(one, text_is_read=True) for one in (np.append(sound(100), silence(10)), quiet, quiet, quiet)]
    assert sum(map(len, got)) == 100 + KEPT and not end.is_over
    assert len(end.push(quiet, text_is_read=True)) == 0 and end.is_over


def test_silence_is_not_held_before_the_text_is_read() -> None:
    end = SoundEnd()
    assert len(end.push(silence(5 * SECOND), text_is_read=False)) == 5 * SECOND and not end.is_over
    assert len(end.push(silence(10), text_is_read=True)) == 0


def test_the_bound_grows_with_the_text() -> None:
    assert [LIMITS.frame_cap(n) for n in (1, 10)] == [90, 225]
