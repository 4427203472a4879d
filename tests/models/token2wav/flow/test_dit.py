"""The flow's estimator against its formulas; the order of cached rows, the halves and the tails."""

from typing import NamedTuple

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.token2wav.flow.dit import CONV_TAIL, N_CONVS, DiTContext, Modulation
from tests.models.compare import assert_close, assert_same
from tests.models.token2wav.flow.flow_reference import Estimator
from tests.models.token2wav.flow.flows import ESTIMATOR, random_flow

FLOW = random_flow()
DIT, N_MELS = FLOW.decoder.estimator, FLOW.config.n_mels
TIME = 0.3
TOLERANCE = 2e-5  # float32 against float64 through two blocks; measured 4e-6


class Inputs(NamedTuple):
    """Tensors [B, T, n_mels], except `speaker` [B, n_mels]."""

    x: Tensor
    mu: Tensor
    speaker: Tensor
    prompt: Tensor


class Cache(NamedTuple):
    rows: Tensor  # [depth, 2, 2, n_rows, H, hd]
    tails: Tensor  # [depth, 2B, convs, 2, D]


def inputs(seed: int, B: int, T: int) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    return Inputs(*(torch.randn(*shape, N_MELS, generator=generator) for shape in ((B, T), (B, T), (B,), (B, T))))


def empty(B: int) -> Cache:
    rows = torch.zeros(ESTIMATOR.depth, 2, 2, 0, ESTIMATOR.heads, ESTIMATOR.head_dim)
    return Cache(rows, torch.zeros(ESTIMATOR.depth, 2 * B, N_CONVS, CONV_TAIL, ESTIMATOR.width))


def call(given_: Inputs, n: list[int], cache: Cache, rows: Tensor | None = None, n_cached: list[int] | None = None):
    """One call at TIME with cached rows [B, width], `n_cached` of them valid. Returns: as `DiT.forward`."""
    B, T, _ = given_.x.shape
    modulation = Modulation(*(part[0] for part in DIT.modulation(torch.tensor([TIME]))))
    condition = DIT.condition(given_.mu, given_.speaker, given_.prompt)
    rows = torch.zeros(B, 0, dtype=torch.int64) if rows is None else rows
    cached = torch.arange(rows.shape[1]) < torch.tensor(n_cached or [rows.shape[1]] * B)[:, None]
    fresh = torch.arange(T) < torch.tensor(n)[:, None]
    mask = torch.cat((cached, fresh), dim=1).repeat(2, 1)[:, None, None]
    x, counts = torch.cat((given_.x, given_.x)), torch.tensor(n).repeat(2)
    return DIT(x, modulation, DiTContext(condition, counts, rows, mask), *cache)


def slow_call(pair: tuple[Estimator, Estimator], given_: Inputs, row: int, n: int) -> tuple[Tensor, Tensor]:
    x, mu, speaker, prompt = (part[row] for part in given_)
    nothing = torch.zeros_like(mu[:n])
    conditional = pair[0](TIME, x[:n], mu[:n], speaker, prompt[:n])
    return conditional, pair[1](TIME, x[:n], nothing, torch.zeros_like(speaker), nothing)


@settings(max_examples=10)
@given(
    first=st.lists(st.integers(1, 9), min_size=2, max_size=2),
    second=st.lists(st.integers(1, 9), min_size=2, max_size=2),
)
def test_two_chunks_equal_the_formulas(first, second):
    """Two sessions in one call, both halves; the second chunk uses the caches of the first."""
    given_, more = inputs(0, 2, 10), inputs(1, 2, 9)
    out, rows, tails = call(given_, first, empty(2))
    pool = rows.flatten(3, 4)  # row i of session b is row 10 b + i
    seen = torch.arange(10) + torch.tensor([[0], [10]])
    again, _, _ = call(more, second, Cache(pool, tails), seen, first)
    for row in range(2):
        pair = Estimator(DIT), Estimator(DIT)
        for got, chunk, n in ((out, given_, first[row]), (again, more, second[row])):
            for half, expected in enumerate(slow_call(pair, chunk, row, n)):
                what = f"row {row} half {half}, {n} frames"
                assert_close(got[row + 2 * half, :n], expected.float(), TOLERANCE, what)


def cached(seed: int, B: int, n_rows: int) -> Cache:
    """Random keys, values and tails of realistic magnitude."""
    generator = torch.Generator().manual_seed(seed)
    rows, tails = empty(B)
    rows = torch.randn(*rows.shape[:3], n_rows, *rows.shape[4:], generator=generator)
    return Cache(rows, torch.randn(tails.shape, generator=generator))


@given(order=st.permutations(range(12)), seed=st.integers(0, 99))
def test_order_of_cached_rows_has_no_effect(order, seed):
    """Sums in a different order: 1e-5."""
    chunk, cache = inputs(seed, 1, 5), cached(seed, 1, 12)
    expected = call(chunk, [5], cache, torch.arange(12)[None])
    got = call(chunk, [5], cache, torch.tensor([order]))
    for a, b, what in zip(got, expected, ("velocity", "rows", "tails"), strict=True):
        assert_close(a, b, 1e-5, what)


def test_velocity_depends_on_the_set_of_cached_rows():
    chunk, cache = inputs(0, 1, 5), cached(0, 1, 12)
    velocity = [call(chunk, [5], cache, torch.arange(n)[None])[0] for n in (11, 12)]
    assert (velocity[0] - velocity[1]).abs().max() > 1e-3, "expected a velocity that depends on the twelfth row"


@given(seed=st.integers(0, 99))
def test_second_half_is_unconditional(seed):
    """With equal state in both halves, the second half equals the first half for mu, speaker and prompt of zero."""
    chunk, cache = inputs(seed, 2, 6), cached(seed, 2, 4)
    rows, tails = cache
    twin = Cache(
        rows[:, :, :1].expand_as(rows), tails.unflatten(1, (2, 2))[:, :1].expand(-1, 2, -1, -1, -1, -1).flatten(1, 2)
    )
    seen = torch.tensor([[0, 2, 3], [1, 0, 2]])
    nothing = Inputs(chunk.x, *(torch.zeros_like(part) for part in chunk[1:]))
    got, expected = call(chunk, [6, 4], twin, seen), call(nothing, [6, 4], twin, seen)
    assert_close(got[0][2:], expected[0][:2], 1e-6, "velocity")
    assert_close(got[1][:, :, 1], expected[1][:, :, 0], 1e-6, "keys and values")
    assert_close(got[2][:, 2:], expected[2][:, :2], 1e-6, "tails")
    assert (got[0][:2] - got[0][2:]).abs().max() > 1e-3, "expected halves that differ"


@given(n=st.lists(st.integers(0, 6), min_size=2, max_size=2), seed=st.integers(0, 99))
def test_tails_end_at_the_last_valid_frame(n, seed):
    """Independent of padding; unchanged without new frames."""
    chunk, cache = inputs(seed, 2, 6), cached(seed, 2, 3)
    seen = torch.tensor([[0, 1, 2], [2, 1, 0]])
    velocity, rows, tails = call(chunk, n, cache, seen)
    for row in range(2):
        here = slice(row, row + 1)
        own = Cache(cache.rows, cache.tails.unflatten(1, (2, 2))[:, :, row])
        if n[row] == 0:
            assert_same(tails.unflatten(1, (2, 2))[:, :, row], own.tails, f"row {row} of {n}")
            continue
        alone = Inputs(*(part[here] if part.ndim == 2 else part[here, : n[row]] for part in chunk))
        expected = call(alone, [n[row]], own, seen[here])
        got = (
            velocity.unflatten(0, (2, 2))[:, row, : n[row]],
            rows[:, :, :, row, : n[row]],
            tails.unflatten(1, (2, 2))[:, :, row],
        )
        alone = (expected[0], expected[1][:, :, :, 0], expected[2])
        for a, b, what in zip(got, alone, ("velocity", "keys and values", "tails"), strict=True):
            assert_close(a, b, 1e-5, f"{what} of row {row} of {n}")


def test_padding_frames_have_no_effect():
    chunk, cache, n = inputs(0, 2, 8), cached(0, 2, 3), [5, 2]
    inside = (torch.arange(8) < torch.tensor(n)[:, None])[..., None]
    loud = Inputs(*(part if part.ndim == 2 else torch.where(inside, part, 1e3) for part in chunk))
    seen = torch.tensor([[0, 1, 2], [2, 1, 0]])
    got, expected = call(loud, n, cache, seen), call(chunk, n, cache, seen)
    for row in range(2):
        frames = slice(0, n[row])
        assert_same(got[0][row::2, frames], expected[0][row::2, frames], "velocity")
        assert_same(got[1][:, :, :, row, frames], expected[1][:, :, :, row, frames], "keys and values")
    assert_same(got[2], expected[2], "tails")


def test_conv_tails_hold_the_last_inputs():
    """After one frame: the newer frame of the old tail, then the new frame."""
    chunk, cache = inputs(0, 1, 3), cached(0, 1, 1)
    tails = call(chunk, [1], cache, torch.zeros(1, 1, dtype=torch.int64))[2]
    assert_same(tails[..., 0, :], cache.tails[..., 1, :])
