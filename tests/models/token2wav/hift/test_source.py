"""Excitation: phases against interpolation and accumulation at sample rate, continuity, noise."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from models.token2wav.hift.source import (
    N_HARMONICS,
    NOISE_SAMPLES,
    PhaseLines,
    continued_lines,
    harmonic_rates,
    held_lines,
    phase_lines,
)
from tests.models.compare import assert_close, assert_same
from tests.models.token2wav.hift.hift_reference import slow_phase, slow_running_phase, slow_source
from tests.models.token2wav.hift.hifts import make_hift

HIFT = make_hift()
SOURCE = HIFT.m_source
# The upper harmonics of the last but one have more than one turn per sample, some of them almost a whole turn modulo
# one: 240 turns in float32 leave errors of 1e-5 in half a frame. Voices stay below 5e-6.
FAST, VOICE = 2e-5, 5e-6
F0 = torch.tensor([0.0, 120.0, 133.5, 9.99, 10.0, 10.01, 5000.0, 240.0], dtype=torch.float64)


def noise_like(n_rows: int, n_frames: int) -> torch.Tensor:
    return torch.randn(n_rows, 480 * n_frames, N_HARMONICS, generator=torch.Generator().manual_seed(5))


def turns(lines: PhaseLines) -> torch.Tensor:
    """[B, 480 T, 9] phases of lines, in turns."""
    k = torch.arange(240)[:, None] + lines.shift
    return (lines.start[:, :, :, None] + lines.rate[:, :, :, None] * k).flatten(1, 3)


def test_rows_of_one_bucket_equal_interpolation_of_each_alone():
    lengths = torch.tensor([8, 3, 0, 1])
    f0 = F0.roll(1).repeat(4, 1)
    f0[1, 3:] = float("nan")
    f0[2] = float("nan")
    noise = noise_like(4, 8)
    source, voiced = SOURCE(f0, phase_lines("interp", f0, lengths), SOURCE.mix(noise), lengths)
    assert voiced[0].tolist() == [True, False, True, True, False, False, True, True]
    for row, n in enumerate(lengths.tolist()):
        if n:
            expected = slow_source(HIFT, f0[row, :n], slow_phase(f0[row, :n]), noise[row, : 480 * n])
            assert_close(source[row, : 480 * n], expected, FAST, f"row {row}")
        assert not source[row, 480 * n :].any()


def test_cumsum_accumulates_at_sample_rate_from_start_phases():
    f0 = torch.stack((F0, F0.flip(0)))
    lengths = torch.tensor([8, 5])
    phase = torch.rand(2, N_HARMONICS, generator=torch.Generator().manual_seed(2)) * 2 * math.pi - math.pi
    noise = noise_like(2, 8)
    source, _ = SOURCE(f0, phase_lines("cumsum", f0, lengths, phase), SOURCE.mix(noise), lengths)
    for row, n in enumerate(lengths.tolist()):
        wide = slow_running_phase(f0[row], phase[row])
        expected = slow_source(HIFT, f0[row], wide, noise[row])[: 480 * n]
        assert_close(source[row, : 480 * n], expected, FAST, f"row {row}")
        assert not source[row, 480 * n :].any()


def test_long_rows_stay_precise():
    f0 = 300 + 200 * torch.rand(1, 1500, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    noise = torch.zeros(1, 480 * 1500, N_HARMONICS)
    source, _ = SOURCE(f0, phase_lines("interp", f0, torch.tensor([1500])), SOURCE.mix(noise), torch.tensor([1500]))
    assert_close(source[0], slow_source(HIFT, f0[0], slow_phase(f0[0]), noise[0]), VOICE)


@given(
    frequency=st.floats(11, 2600),
    cut=st.integers(1, 11),
    overlap=st.integers(0, 8),
    phase=st.floats(0, 0.999),
)
def test_a_constant_tone_continues_across_a_seam(frequency: float, cut: int, overlap: int, phase: float):
    """Two rows that share `overlap` frames; the second row continues at the end of the first row."""
    overlap = min(overlap, cut)
    n = torch.tensor([12])
    rate = harmonic_rates(torch.full((1, 12), frequency, dtype=torch.float64))
    start = torch.tensor([phase], dtype=torch.float64)
    whole, whole_end = continued_lines(rate, n, torch.tensor([0]), start)
    first, end = continued_lines(rate[:, :cut], torch.tensor([cut]), torch.tensor([0]), start)
    length = 12 - cut + overlap
    second, second_end = continued_lines(rate[:, :length], torch.tensor([length]), torch.tensor([overlap]), end)
    joined = torch.cat((turns(first), turns(second)[:, 480 * overlap :]), 1)
    assert_close((joined - turns(whole) + 0.5) % 1, torch.full_like(joined, 0.5), 1e-6)
    assert_close((second_end - whole_end + 0.5) % 1, torch.full_like(end, 0.5), 1e-6)


def test_phase_is_continuous_across_a_seam():
    """For any pitch, the rate of a harmonic across the seam lies between the rates of the frames around it."""
    generator = torch.Generator().manual_seed(4)
    f0 = 80 + 300 * torch.rand(1, 20, generator=generator, dtype=torch.float64)
    rate = harmonic_rates(f0)
    _, end = continued_lines(rate[:, :12], torch.tensor([12]), torch.tensor([0]), torch.zeros(1, dtype=torch.float64))
    first, _ = continued_lines(rate[:, :12], torch.tensor([12]), torch.tensor([0]), torch.zeros(1).double())
    second, _ = continued_lines(rate[:, 4:], torch.tensor([16]), torch.tensor([8]), end)
    step = (turns(second)[:, 480 * 8] - turns(first)[:, -1]) % 1
    fastest = rate[:, 11:13].amax(1)
    assert (step <= fastest + 1e-9).all() and (step >= rate[:, 11:13].amin(1) - 1e-9).all(), (step, fastest)


def test_phase_is_constant_or_continues_at_the_ends():
    rate = harmonic_rates(F0[1:4].repeat(1, 1))
    n = torch.tensor([3])
    held = turns(held_lines(rate, n))
    continued = turns(continued_lines(rate, n, torch.tensor([0]), torch.zeros(1, dtype=torch.float64))[0])
    for edge in (slice(0, 240), slice(-240, None)):
        assert not held[:, edge].diff(dim=1).any()
        assert (continued[:, edge].diff(dim=1) > 0).all()
    assert_close(held[:, 240:-240].diff(dim=1), continued[:, 240:-240].diff(dim=1), 1e-12)


def test_noise_table_is_fixed_and_repeats():
    table = SOURCE.mixed_noise(torch.tensor([0, 100, NOISE_SAMPLES - 50]), 150)
    assert_same(table[0, 100:], table[1, :50])
    assert_same(table[2, 50:], table[0, :100])
    assert_same(make_hift().m_source.noise, SOURCE.noise)
    # The level of nine independent noises, mixed.
    mixed = SOURCE.mix(torch.randn(1, 2**18, N_HARMONICS, generator=torch.Generator().manual_seed(0)))
    assert SOURCE.noise.std().item() == pytest.approx(mixed.std().item(), rel=0.01)
