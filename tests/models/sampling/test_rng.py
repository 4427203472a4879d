"""Counter-based random numbers against known answers and plain integers, and draws by weight."""

from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.sampling import rng
from models.sampling.rng import (
    MAX_ON_HOST,
    N_STREAMS,
    STREAM_SPEECH,
    STREAM_STOP_PROBE,
    STREAM_TEXT,
    WEIGHT_ONE,
    draw_index,
    fixed_point_weights,
    philox2x32,
    uniform,
)

SIGNED64 = st.integers(-(2**63), 2**63 - 1)


@pytest.mark.parametrize(
    ("low", "high", "key", "expected"),
    [
        (0, 0, 0, (0xFF1DAE59, 0x6CD10DF2)),
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, (0x2C3F628B, 0xAB4FD7AD)),
        (0x243F6A88, 0x85A308D3, 0x13198A2E, (0xDD7CE038, 0xF62A4C12)),
    ],
)
def test_philox_known_answers(low, high, key, expected):
    got = tuple(int(word) for word in philox2x32(*(torch.tensor([word]) for word in (low, high, key))))
    assert got == expected, f"expected {[hex(w) for w in expected]}, got {[hex(w) for w in got]}"


def _plain_uniform(seed: int, draw: int, stream: int) -> float:
    low, high, key = (draw * N_STREAMS + stream) % 2**32, (seed >> 32) % 2**32, seed % 2**32
    for _ in range(10):
        product = 0xD256D193 * low
        low, high = (product >> 32) ^ key ^ high, product % 2**32
        key = (key + 0x9E3779B9) % 2**32
    return ((low << 21) + (high >> 11)) / 2**53


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(SIGNED64, st.integers(0, 2**31)), min_size=1, max_size=5), st.integers(0, N_STREAMS - 1))
def test_uniform_equals_plain_integers_in_any_batch(rows, stream):
    expected = [_plain_uniform(s, d, stream) for s, d in rows]
    for repeats in (1, MAX_ON_HOST + 1):  # by Python's numbers, and by tensors
        seed, draw = (torch.tensor(column * repeats) for column in zip(*rows, strict=True))
        got = uniform(seed, draw, stream).tolist()
        assert got == expected * repeats, f"expected {expected}, got {got}"


@pytest.mark.parametrize("n", [1, 1024, 2500])
def test_running_sum_in_blocks_equals_that_on_a_cpu(n):
    weights = torch.from_numpy(np.random.default_rng(n).integers(0, WEIGHT_ONE, (2, n)))
    with mock.patch.object(rng, "is_eager_on_cpu", return_value=False):
        in_blocks = rng.running_sum(weights)
    assert torch.equal(rng.running_sum(weights), in_blocks)
    assert in_blocks[:, -1].tolist() == [sum(row) for row in weights.tolist()]


def test_numbers_are_uniform_and_streams_uncorrelated():
    seed, draw = torch.full((20000,), 7), torch.arange(20000)
    streams = [uniform(seed, draw, stream) for stream in (STREAM_STOP_PROBE, STREAM_TEXT, STREAM_SPEECH)]
    streams.append(uniform(seed + 2**40, draw, STREAM_TEXT))
    for numbers in streams:
        assert numbers.min() >= 0 and numbers.max() < 1
        bins = torch.histc(numbers.float(), bins=20, min=0, max=1)
        chi_square = ((bins - 1000) ** 2 / 1000).sum().item()
        assert chi_square < 44, f"expected chi square < 44 (19 degrees of freedom, p 0.001), got {chi_square}"
    correlation = torch.corrcoef(torch.stack(streams)).fill_diagonal_(0).abs().max().item()
    assert correlation < 0.03, f"expected streams and seeds unrelated (< 0.03), got {correlation}"


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=12).filter(any),
    st.floats(0, 1, exclude_max=True),
)
def test_draw_index_inverts_the_cumulative_weights(weights, number):
    got = int(draw_index(torch.tensor([weights]), torch.tensor([number], dtype=torch.float64)))
    target = int(number * sum(weights))
    expected = next(index for index in range(len(weights)) if sum(weights[: index + 1]) > target)
    assert got == expected, f"weights {weights}, number {number}: expected {expected}, got {got}"


def test_draws_near_one_have_a_positive_weight():
    weights = torch.tensor([[0, 2**57, 2**57 - 1, 0], [0, 0, 0, 0]])
    got = draw_index(weights, torch.full((2,), 1 - 2.0**-53, dtype=torch.float64)).tolist()
    assert got == [2, 0], f"expected [2, 0], got {got}"


def test_weights_are_exact_at_the_peak_and_zero_in_bad_rows():
    inf, nan = float("inf"), float("nan")
    scores = torch.tensor([[3.0, -inf, 3.0], [nan, 0.0, 1.0], [-inf, -inf, -inf], [inf, 0.0, 0.0]])
    got = fixed_point_weights(scores, scores.amax(1)).tolist()
    expected = [[WEIGHT_ONE, 0, WEIGHT_ONE], [0, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert got == expected, f"expected {expected}, got {got}"
