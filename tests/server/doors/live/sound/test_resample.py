import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.doors.live.sound.resample import STEP, StreamResampler, alaw, floats_of, pcm16_of, steps_of, ulaw
from server.doors.live.sound.wire_sound import SoundInput, SoundOutput, without_padding

SECOND = 24_000
RATES = [(24_000, 16_000), (16_000, 24_000), (24_000, 8000), (8000, 16_000), (44_100, 16_000)]


def tone(hz: float, n: int = 2 * SECOND, rate: int = SECOND) -> np.ndarray:
    return (0.5 * np.sin(2 * np.pi * hz * np.arange(n) / rate)).astype(np.float32)


def in_chunks(resampler: StreamResampler, sound: np.ndarray, n: int) -> np.ndarray:
    return np.concatenate([resampler.push(sound[at : at + n]) for at in range(0, len(sound), n)])


@pytest.mark.parametrize("hz", [100, 1000, 3000, 5000, 6900])
def test_a_round_trip_keeps_tones_below_7_khz(hz: float) -> None:
    there, back = StreamResampler(24_000, 16_000), StreamResampler(16_000, 24_000)
    sound = tone(hz)
    heard = in_chunks(back, in_chunks(there, sound, 480), 320)
    delay = round((there.delay_s + back.delay_s) * SECOND)
    assert there.delay_s <= 0.004 and back.delay_s <= 0.004
    settled = slice(2000, len(sound) - delay)
    error = heard[settled.start + delay : settled.stop + delay] - sound[settled]
    snr = 10 * np.log10(np.mean(sound[settled] ** 2) / np.mean(error**2))
    assert snr >= 60, f"expected 60 dB at {hz} Hz, got {snr:.1f}"


@pytest.mark.parametrize("hz", [9000, 10_000, 11_500])
def test_tones_that_would_alias_are_suppressed(hz: float) -> None:
    heard = StreamResampler(24_000, 16_000).push(tone(hz))[2000:]
    assert 20 * np.log10(np.sqrt(np.mean(heard**2)) / np.sqrt(0.125)) < -70


@given(st.lists(st.integers(0, 700) | st.just(9000), min_size=1, max_size=12), st.sampled_from(RATES))
def test_any_split_gives_the_sound_of_one_piece(sizes: list[int], rates: tuple[int, int]) -> None:
    sound = np.random.default_rng(1).uniform(-1, 1, sum(sizes)).astype(np.float32)
    whole, split = (StreamResampler(*rates) for _ in range(2))
    ends = np.cumsum(sizes)
    parts = [split.push(sound[end - n : end]) for n, end in zip(sizes, ends, strict=True)]
    expected = whole.push(sound)
    np.testing.assert_allclose(np.concatenate(parts), expected, atol=2e-6)
    assert abs(len(expected) - len(sound) * rates[1] / rates[0]) <= 1


@pytest.mark.parametrize("rate", [16_000, 24_000])
def test_steps_of_pcm16_give_the_sound_of_their_floats(rate: int) -> None:
    data = np.random.default_rng(3).bytes(2 * rate)
    of_steps = StreamResampler(rate, 16_000, STEP).push(steps_of(data))
    np.testing.assert_array_equal(of_steps, StreamResampler(rate, 16_000).push(floats_of(data)))


def test_24000_samples_are_a_unit() -> None:
    source = SoundInput("audio/pcm")
    assert sum(len(source.push(bytes(2 * 480))) for _ in range(50)) == 16_000


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8))
def test_odd_bytes_wait_for_the_next_append(sizes: list[int]) -> None:
    data = np.random.default_rng(2).bytes(sum(sizes))
    whole, split = SoundInput("audio/pcm"), SoundInput("audio/pcm")
    ends = np.cumsum(sizes)
    parts = [split.push(data[end - n : end]) for n, end in zip(sizes, ends, strict=True)]
    np.testing.assert_allclose(np.concatenate(parts), whole.push(data), atol=2e-6)


def test_pcm16_is_rounded_and_clipped() -> None:
    data = pcm16_of(np.array([0.0, 1.0, -1.0, 2.0, 0.4 / 32768, 0.6 / 32768], np.float32))
    assert np.frombuffer(data, "<i2").tolist() == [0, 32767, -32768, 32767, 0, 1]
    steps = np.arange(-32768, 32768, 7, dtype="<i2").tobytes()
    assert pcm16_of(floats_of(steps)) == steps


@pytest.mark.parametrize("law", [ulaw, alaw])
def test_g711_codes_survive_decoding(law) -> None:
    codes = bytes(range(256))
    decoded = law().decode(codes)
    np.testing.assert_array_equal(law().decode(law().encode(decoded)), decoded)
    sound = tone(440, 8000, 8000)
    error = law().decode(law().encode(sound)) - sound
    assert 10 * np.log10(np.mean(sound**2) / np.mean(error**2)) > 30


def test_g711_values_are_those_of_the_standard() -> None:
    """The extreme values and the first segment, from ITU-T G.711."""
    assert (ulaw().decode(bytes([0x00, 0x80, 0xFF, 0x7F])) * 32768).tolist() == [-32124, 32124, 0, 0]
    assert (alaw().decode(bytes([0x55, 0xD5, 0x2A, 0xAA])) * 32768).tolist() == [-8, 8, -32256, 32256]


def test_telephone_sound_passes_both_ways() -> None:
    sound = tone(440, 24_000)
    coded = SoundOutput("audio/pcmu").push(pcm16_of(sound))
    assert len(coded) == 8000
    assert len(SoundInput("audio/pcmu").push(coded)) == 16_000


def test_leading_zeros_of_a_short_unit_are_stripped() -> None:
    spoken = pcm16_of(np.array([0.5, 0.0, 0.25], np.float32))
    assert without_padding(bytes(200) + spoken) == spoken
    assert without_padding(spoken) == spoken and without_padding(bytes(8)) == b"" and without_padding(b"") == b""
