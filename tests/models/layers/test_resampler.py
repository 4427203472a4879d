"""Resampler: equal to its formula, independent of padding, batch and the order of patches.

Tolerances: 1e-5 between two batchings, 1e-4 against float64, both for rows of size about 1.
"""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.layers.resampler import MAX_SIDE, Resampler
from models.load import load_model
from tests.models.compare import assert_close
from tests.models.layers import transformer_reference as slow

few = settings(max_examples=15)
WIDTH_IN = 32


@pytest.fixture(scope="session")
def tiny_resampler(tiny_model):
    return tiny_model.resampler


@pytest.fixture(scope="session")
def two_heads():
    """A random resampler with two heads; that of the tiny checkpoint has one."""
    generator = torch.Generator().manual_seed(0)
    module = Resampler(WIDTH_IN, 64, n_queries=5, heads=2).requires_grad_(False)
    for parameter in module.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    module.derive("cpu", torch.float32)
    return module


@pytest.fixture(scope="session", params=["tiny", "two heads"])
def resampler(request, tiny_resampler, two_heads):
    return tiny_resampler if request.param == "tiny" else two_heads


def patches(seed: int, rows: int, cols: int) -> tuple[Tensor, Tensor]:
    """Hidden rows [n, 32] and coordinates [n, 2] of a grid."""
    hidden = torch.randn(rows * cols, WIDTH_IN, generator=torch.Generator().manual_seed(seed))
    grid = torch.meshgrid(torch.arange(rows), torch.arange(cols), indexing="ij")
    return hidden, torch.stack(grid, dim=-1).reshape(-1, 2)


def batch(parts: list[tuple[Tensor, Tensor]], length: int, filler: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    hidden = torch.full((len(parts), length, WIDTH_IN), filler)
    coords, mask = torch.zeros(len(parts), length, 2, dtype=torch.int64), torch.zeros(len(parts), length).bool()
    for row, (states, places) in enumerate(parts):
        n = len(states)
        hidden[row, :n], coords[row, :n], mask[row, :n] = states, places, True
    return hidden, coords, mask


def position(width: int, row: int, col: int) -> Tensor:
    """[sin(col w), cos(col w), sin(row w), cos(row w)], w falling from 1 to nearly 1 / 10000."""
    quarter = width // 4
    speeds = [10000 ** (-i / quarter) for i in range(quarter)]
    values = [turn(place * speed) for place in (col, row) for turn in (math.sin, math.cos) for speed in speeds]
    return torch.tensor(values, dtype=torch.float64)


def plain(resampler: Resampler, hidden: Tensor, coords: Tensor) -> Tensor:
    w, width, heads = slow.weights_of(resampler), resampler.width, resampler.attn.heads
    values = slow.layer_norm(hidden.double() @ w("kv_proj.weight").T, w, "ln_kv", 1e-6)
    keys = values + torch.stack([position(width, *place) for place in coords.tolist()])
    queries = slow.layer_norm(w("query"), w, "ln_q", 1e-6)
    packed = zip((queries, keys, values), w("attn.in_proj_weight").split(width), strict=True)
    biases = w("attn.in_proj_bias").split(width)
    q, k, v = (
        slow.heads_of(x @ matrix.T + bias, width // heads) for (x, matrix), bias in zip(packed, biases, strict=True)
    )
    polled = torch.cat([slow.attention(*parts) for parts in zip(q, k, v, strict=True)], dim=1)
    return slow.layer_norm(slow.linear(polled, w, "attn.out_proj"), w, "ln_post", 1e-6) @ w("proj")


@few
@given(seed=st.integers(0, 2**20), rows=st.integers(1, 6), cols=st.integers(1, 6), padding=st.integers(0, 9))
def test_rows_equal_float64_reference(resampler, seed, rows, cols, padding):
    hidden, coords = patches(seed, rows, cols)
    got = resampler(*batch([(hidden, coords)], rows * cols + padding))[0]
    assert_close(got, plain(resampler, hidden, coords), 1e-4)


@few
@given(
    seed=st.integers(0, 2**20),
    sizes=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=4),
    padding=st.integers(0, 20),
    filler=st.sampled_from([0.0, 1.0, -1e3, 1e6]),
)
def test_result_does_not_depend_on_padding_or_batch(resampler, seed, sizes, padding, filler):
    parts = [patches(seed + i, *size) for i, size in enumerate(sizes)]
    together = resampler(*batch(parts, max(len(states) for states, _ in parts) + padding, filler))
    for row, part in enumerate(parts):
        assert_close(together[row], resampler(*batch([part], len(part[0])))[0], 1e-5, f"slice {row}")


def test_padding_is_masked_even_with_the_largest_scores(two_heads):
    """Queries and keys are so large that scores differ by tens: a moderate mask bias would not suffice."""
    sharp = copy.deepcopy(two_heads)
    sharp.attn.in_proj_weight[: 2 * sharp.width] *= 8
    part = patches(0, 3, 3)
    hidden, coords, mask = batch([part], 60)
    hidden[0, 9:] = patches(1, 51, 1)[0]
    expected = sharp(*batch([part], 9))
    assert_close(sharp(hidden, coords, mask), expected, 1e-5)
    seen = sharp(hidden, coords, torch.ones_like(mask))
    assert (seen - expected).abs().max() > 0.1, "expected masked patches to matter without the mask"


def test_result_depends_on_coordinates_and_not_on_patch_order(resampler):
    hidden, coords = patches(0, 4, 3)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    expected = resampler(*batch([(hidden, coords)], 12))
    assert_close(resampler(*batch([(hidden[order], coords[order])], 12)), expected, 1e-5)
    moved = resampler(*batch([(hidden, coords[order])], 12))
    assert (moved - expected).abs().max() > 1e-3, "expected other rows for other coordinates"


def test_nan_does_not_reach_other_slices(resampler):
    parts = [patches(i, 2, 3) for i in range(2)]
    clean = resampler(*batch(parts, 8))
    dirty = resampler(*batch([parts[0], (parts[1][0] * float("nan"), parts[1][1])], 8))
    assert dirty[1].isnan().all(), "expected NaN in the slice that was fed NaN"
    assert_close(dirty[0], clean[0], 0)


def test_row_without_patches_is_finite(resampler):
    nothing = torch.zeros(0, WIDTH_IN), torch.zeros(0, 2, dtype=torch.int64)
    assert resampler(*batch([patches(0, 2, 3), nothing], 8)).isfinite().all()


@pytest.mark.parametrize("row, col", [(0, 0), (1, 0), (0, 1), (3, 60), (69, 69), (200, 7), (MAX_SIDE - 1, 0)])
def test_position_rows_follow_their_formula(resampler, row, col):
    """In float32, an angle of thousands of radians is exact to 2 ** -12."""
    got = resampler.positions(torch.tensor([[[row, col]]]))[0, 0]
    assert_close(got, position(resampler.width, row, col), 1e-5 if max(row, col) < 100 else 3e-4)


def test_bfloat16_weights_keep_float32_positions(tiny):
    got = load_model(tiny, device="cpu", dtype=torch.bfloat16).resampler.positions(torch.tensor([[[11, 67]]]))
    assert got.dtype == torch.float32
    assert_close(got[0, 0], position(got.shape[-1], 11, 67), 1e-5)
