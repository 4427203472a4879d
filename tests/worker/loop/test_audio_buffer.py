"""Samples of each unit for any sequence of pushes, the counts of the public implementation, and refused input."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.errors import AudioError
from models.inputs.audio_sizes import FIRST_UNIT_PADDED, FIRST_UNIT_SAMPLES, SAMPLE_RATE, UNIT_SAMPLES
from worker.loop.audio_buffer import AudioBuffer, checked

LEAD, LEFT = 560, 80
# Counts around every boundary: first and later units, with and without padding.
EDGES = [n + by for n in (15_920, 16_000, 16_480, 16_560, 31_440, 31_920, 32_000, 32_480, 48_000) for by in (-1, 0, 1)]


def sound(n_samples: int, first: int = 1) -> np.ndarray:
    """Distinct non-zero samples, so that each can be identified."""
    return (np.arange(first, first + n_samples) * 2.0**-24).astype(np.float32)


def taken(audio_buffer: AudioBuffer) -> Iterator[np.ndarray]:
    """Take units until too few samples wait."""
    while (unit := audio_buffer.peek()) is not None:
        audio_buffer.commit()
        yield unit


def same(what: str, got: np.ndarray, expected: np.ndarray) -> None:
    assert got.dtype == np.float32, f"{what}: expected float32, got {got.dtype}"
    assert got.shape == expected.shape, f"{what}: expected shape {expected.shape}, got {got.shape}"
    differ = np.flatnonzero(got != expected)
    assert not differ.size, f"{what}: expected equal samples, got {differ.size} different from {differ[:1]} on"


def test_sizes() -> None:
    assert (FIRST_UNIT_PADDED, FIRST_UNIT_SAMPLES, UNIT_SAMPLES, SAMPLE_RATE) == (16_560, 16_480, 16_000, 16_000)


@pytest.mark.parametrize("reference", [False, True])
def test_one_second_per_unit(reference: bool) -> None:
    audio_buffer, all_sound = AudioBuffer(reference=reference), sound(5 * UNIT_SAMPLES)
    heard = np.concatenate((np.zeros(LEAD, dtype=np.float32), all_sound))
    for n, push in enumerate(np.split(all_sound, 5)):
        assert audio_buffer.peek() is None and audio_buffer.n_whole == 0, (
            f"unit {n}: expected too few samples, got a unit"
        )
        audio_buffer.push(push)
        assert audio_buffer.n_whole == 1
        [unit] = taken(audio_buffer)
        first = 0 if n == 0 else 480 + n * UNIT_SAMPLES
        same(f"unit {n}", unit, heard[first : 480 + (n + 1) * UNIT_SAMPLES])
        assert (audio_buffer.n_waiting, audio_buffer.n_units) == (LEFT, n + 1)
        assert audio_buffer.lag_s == LEFT / SAMPLE_RATE


@given(
    n_samples=st.integers(1, 80_000) | st.sampled_from(EDGES),
    cuts=st.lists(st.integers(0, 80_000) | st.sampled_from(EDGES), max_size=8),
    ask=st.sampled_from(["after each push", "at the end", "both"]),
)
def test_units_depend_on_the_samples_alone(n_samples: int, cuts: list[int], ask: str) -> None:
    all_sound = sound(n_samples)
    heard = np.concatenate((np.zeros(LEAD, dtype=np.float32), all_sound))
    audio_buffer, units = AudioBuffer(), []
    for push in np.split(all_sound, sorted(cut for cut in set(cuts) if 0 < cut < n_samples)):
        audio_buffer.push(push)
        if ask != "at the end":
            n_whole, before = audio_buffer.n_whole, len(units)
            units += taken(audio_buffer)
            assert len(units) - before == n_whole, f"expected n_whole {n_whole}, got {len(units) - before} units"
    n_whole, before = audio_buffer.n_whole, len(units)
    units += taken(audio_buffer)
    assert len(units) - before == n_whole

    n_units = max(0, (len(heard) - 480) // UNIT_SAMPLES)
    assert len(units) == n_units == audio_buffer.n_units, f"expected {n_units} units, got {len(units)}"
    ends = [480 + (n + 1) * UNIT_SAMPLES for n in range(n_units)]
    for n, (unit, expected) in enumerate(zip(units, np.split(heard, ends), strict=False)):
        same(f"unit {n}", unit, expected)
    assert audio_buffer.n_waiting == (len(heard) - ends[-1] if ends else n_samples)


@given(steps=st.lists(st.integers(1, 30_000) | st.sampled_from(["peek", "commit", "no sound"]), max_size=40))
def test_every_sample_is_taken_once(steps: list[int | str]) -> None:
    """Any order of pushes, peeks and commits; a peek may be repeated, and pushes may come before its commit."""
    audio_buffer, n_sent, peeked = AudioBuffer(max_waiting_s=10_000), 0, None
    heard = [np.zeros(0, dtype=np.float32)]
    for step in steps:
        if isinstance(step, int):
            audio_buffer.push(sound(step, first=n_sent + 1))
            n_sent += step
        elif step == "peek":
            peeked = audio_buffer.peek()
        elif step == "no sound":
            audio_buffer.skip_unit()
            peeked = None
        elif peeked is not None:
            audio_buffer.commit()
            heard.append(peeked)
            peeked = None
        n_heard = sum(map(len, heard))
        expected = n_sent - max(0, n_heard - LEAD)
        assert audio_buffer.n_waiting == expected, f"expected {expected} samples waiting, got {audio_buffer.n_waiting}"
    rest = list(taken(audio_buffer))
    everything = np.concatenate((np.zeros(LEAD, dtype=np.float32), sound(n_sent)))
    units = np.concatenate((*heard, *rest))
    same("all units", units, everything[: len(units)])
    assert len(everything) - len(units) < (UNIT_SAMPLES if audio_buffer.n_units else FIRST_UNIT_SAMPLES)


def test_peek_returns_a_copy_and_removes_nothing() -> None:
    audio_buffer = AudioBuffer()
    audio_buffer.push(sound(UNIT_SAMPLES))
    first = audio_buffer.peek()
    expected = first.copy()
    first[:] = 7
    same("second peek", audio_buffer.peek(), expected)
    audio_buffer.push(sound(UNIT_SAMPLES, first=UNIT_SAMPLES + 1))
    same("peek after a push", audio_buffer.peek(), expected)
    assert audio_buffer.n_waiting == 2 * UNIT_SAMPLES and audio_buffer.n_units == 0


def test_push_copies_the_samples() -> None:
    audio_buffer, push = AudioBuffer(), sound(UNIT_SAMPLES)
    audio_buffer.push(push)
    push[:] = 7
    same("unit", audio_buffer.peek()[LEAD:], sound(UNIT_SAMPLES - LEFT))


WITHOUT_PEEK: dict[str, Callable[[AudioBuffer], object]] = {
    "no peek": lambda audio_buffer: None,
    "peek already committed": lambda audio_buffer: (audio_buffer.peek(), audio_buffer.commit()),
    "unit skipped after the peek": lambda audio_buffer: (audio_buffer.peek(), audio_buffer.skip_unit()),
    "reset after the peek": lambda audio_buffer: (
        audio_buffer.peek(),
        audio_buffer.reset(),
        audio_buffer.push(sound(UNIT_SAMPLES)),
    ),
    "peek without enough sound": lambda audio_buffer: (audio_buffer.peek(), audio_buffer.commit(), audio_buffer.peek()),
}


@pytest.mark.parametrize("name", WITHOUT_PEEK)
def test_commit_requires_a_peek(name: str) -> None:
    audio_buffer = AudioBuffer()
    audio_buffer.push(sound(UNIT_SAMPLES))
    WITHOUT_PEEK[name](audio_buffer)
    with pytest.raises(AssertionError, match="expected a peek that gave a unit, got none"):
        audio_buffer.commit()


def test_reset_equals_a_new_buffer() -> None:
    for reference in (False, True):
        used = AudioBuffer(reference=reference)
        used.push(sound(50_000))
        used.peek()
        used.commit()
        used.skip_unit()
        used.push(sound(1_000))
        used.reset()
        assert (used.n_waiting, used.n_units, used.n_whole, used.lag_s) == (0, 0, 0, 0.0)
        new = AudioBuffer(reference=reference)
        for audio_buffer in (used, new):
            audio_buffer.push(sound(40_000))
        for n, (got, expected) in enumerate(zip(taken(used), taken(new), strict=True)):
            same(f"unit {n}", got, expected)


# --- counts of the public implementation ----------------------------------------------------------


def plain(pushes: list[int | None]) -> list[tuple[int | None, int, int]]:
    """The public arithmetic: per push (None: images only) samples taken or None, samples left, units."""
    buffer, index, mel_first, out = 0, 0, True, []
    for push in pushes:
        need = None
        if push is None:
            index += 1
        else:
            buffer += push
            if index == 0:
                buffer = max(buffer, 16_560)
            need = 16_480 if mel_first else 16_000
            if buffer < need:
                need = None
            else:
                buffer -= 16_480 if index == 0 else 16_000
                mel_first, index = False, index + 1
        out.append((need, buffer, index))
    return out


@given(pushes=st.lists(st.none() | st.integers(1, 40_000) | st.sampled_from([16_000, 480, 80, *EDGES]), max_size=12))
def test_reference_counts(pushes: list[int | None]) -> None:
    audio_buffer = AudioBuffer(reference=True, max_waiting_s=60)
    for n, (push, (need, left, index)) in enumerate(zip(pushes, plain(pushes), strict=True)):
        if push is None:
            audio_buffer.skip_unit()
        else:
            audio_buffer.push(sound(push))
            n_whole, unit = audio_buffer.n_whole, audio_buffer.peek()
            got = None if unit is None else len(unit)
            assert got == need, f"push {n}: expected a unit of {need}, got {got}"
            assert (n_whole > 0) == (unit is not None), f"push {n}: expected n_whole to tell, got {n_whole}"
            if unit is not None:
                audio_buffer.commit()
        assert (audio_buffer.n_waiting, audio_buffer.n_units) == (left, index), (
            f"push {n}: expected {left} left, {index} units"
        )


@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize("pictures_first", [False, True])
def test_n_whole_counts_the_units_that_can_be_taken(reference: bool, pictures_first: bool) -> None:
    for n_samples in (1, 79, 480, *EDGES):
        audio_buffer = AudioBuffer(reference=reference)
        if pictures_first:
            audio_buffer.skip_unit()
        audio_buffer.push(sound(n_samples))
        n_whole = audio_buffer.n_whole
        n_units = len(list(taken(audio_buffer)))
        assert n_whole == n_units, f"{n_samples} samples: expected {n_units} units foretold, got {n_whole}"
        assert audio_buffer.n_whole == 0, f"{n_samples} samples: expected none left, got {audio_buffer.n_whole}"


def test_reference_pads_a_short_start() -> None:
    audio_buffer = AudioBuffer(reference=True)
    audio_buffer.push(sound(8_000))
    unit = audio_buffer.peek()
    same("zeros in front", unit[:8_560], np.zeros(8_560, dtype=np.float32))
    same("sound after the padding", unit[8_560:], sound(7_920))
    assert audio_buffer.n_waiting == 8_000, "expected padding not to count as waiting"
    audio_buffer.commit()
    assert audio_buffer.n_waiting == LEFT


@pytest.mark.parametrize(("n_samples", "n_zeros", "n_left"), [(16_500, 60, 80), (16_560, 0, 80), (16_600, 0, 120)])
def test_reference_pads_up_to_its_first_unit(n_samples: int, n_zeros: int, n_left: int) -> None:
    audio_buffer = AudioBuffer(reference=True)
    audio_buffer.push(sound(n_samples))
    unit = audio_buffer.peek()
    same("zeros in front", unit[:n_zeros], np.zeros(n_zeros, dtype=np.float32))
    same("sound after the padding", unit[n_zeros:], sound(16_480 - n_zeros))
    audio_buffer.commit()
    assert audio_buffer.n_waiting == n_left, f"expected {n_left} samples left, got {audio_buffer.n_waiting}"


def test_images_before_sound() -> None:
    """Reference mode does not pad the sound after them and repeats 480 samples; otherwise it is the first unit."""
    reference, fixed = AudioBuffer(reference=True), AudioBuffer()
    for audio_buffer in (reference, fixed):
        audio_buffer.skip_unit()
        audio_buffer.push(sound(UNIT_SAMPLES))
    assert reference.peek() is None and (reference.n_units, fixed.n_units) == (1, 0)
    same("fixed", next(taken(fixed))[LEAD:], sound(UNIT_SAMPLES - LEFT))
    reference.push(sound(UNIT_SAMPLES, first=UNIT_SAMPLES + 1))
    first, *others = taken(reference)
    same("first", first, sound(16_480))
    [second] = others
    same("second", second, sound(UNIT_SAMPLES, first=16_001))


# --- refused input ------------------------------------------------------------------------------


def test_refuses_sound_beyond_max_waiting_s() -> None:
    audio_buffer = AudioBuffer(max_waiting_s=2)
    audio_buffer.push(sound(UNIT_SAMPLES))
    [_] = taken(audio_buffer)
    for _ in range(2):  # the lookahead that is left does not count
        audio_buffer.push(sound(UNIT_SAMPLES))
    before = audio_buffer.peek()
    with pytest.raises(AudioError, match=r"^sound: expected at most 2 s waiting, got 3\.005 s$"):
        audio_buffer.push(sound(UNIT_SAMPLES))
    assert audio_buffer.n_waiting == 2 * UNIT_SAMPLES + LEFT
    same("next unit", audio_buffer.peek(), before)
    list(taken(audio_buffer))
    audio_buffer.push(sound(UNIT_SAMPLES))


def test_bounds_memory() -> None:
    audio_buffer = AudioBuffer(max_waiting_s=4)
    for n in range(300):
        audio_buffer.push(sound(7_000 + n))
        if audio_buffer.n_whole > 2:
            list(taken(audio_buffer))
    assert audio_buffer._buffer.size <= 3 * 5 * SAMPLE_RATE, (
        f"expected at most 15 s of buffer, got {audio_buffer._buffer.size}"
    )


BAD: dict[str, tuple[Callable[[], object], str]] = {
    "list": (lambda: [0.0], "expected a NumPy array, got list"),
    "integers": (lambda: np.zeros(4, dtype=np.int16), r"expected float samples in \[-1, 1\], got int16"),
    "complex": (lambda: np.zeros(4, dtype=np.complex64), r"expected float samples in \[-1, 1\], got complex64"),
    "stereo": (lambda: np.zeros((4, 2), dtype=np.float32), r"expected mono, one dimension, got shape \(4, 2\)"),
    "scalar": (lambda: np.array(0.0), r"expected mono, one dimension, got shape \(\)"),
    "empty": (lambda: np.zeros(0, dtype=np.float32), "expected at least one sample, got none"),
    "nan": (lambda: np.array([0, np.nan, 1]), "expected finite samples, got 1 of 3 NaN or infinite"),
    "infinite": (lambda: np.array([np.inf, -np.inf]), "expected finite samples, got 2 of 2 NaN or infinite"),
    "loud": (lambda: np.array([0, -1.0001e4]), r"expected samples in \[-1, 1\], none beyond 10000, got 10001"),
    "beyond float32": (lambda: np.array([1e300]), r"none beyond 10000, got 1e\+300"),
}


@pytest.mark.parametrize("name", BAD)
def test_refuses_invalid_sound(name: str) -> None:
    make, text = BAD[name]
    with pytest.raises(AudioError, match=f"^sound: .*{text.removeprefix('expected ')}$"):
        checked(make())
    audio_buffer = AudioBuffer()
    with pytest.raises(AudioError):
        audio_buffer.push(make())
    assert audio_buffer.n_waiting == 0


@pytest.mark.parametrize("dtype", ["<f4", ">f4", "<f8", ">f8", "<f2"])
def test_accepts_every_float_type(dtype: str) -> None:
    samples = np.array([0, 0.5, -0.25, 1, 1e4], dtype=dtype)
    samples.setflags(write=False)
    got = checked(samples[::-1])
    assert got.dtype == np.dtype("=f4") and got.flags.c_contiguous
    same(dtype, got, np.array([1e4, 1, -0.25, 0.5, 0], dtype=np.float32))


def test_does_not_copy_float32_sound() -> None:
    samples = sound(100)
    assert checked(samples) is samples
