"""Slot cache: addresses, masks, eviction and emptying, on made-up keys and values."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.kv_cache import CacheView, KVCache
from models.layers import attend
from models.rotary import rotary_angles, rotary_frequencies, rotate
from tests.models.compare import assert_close, assert_same
from tests.models.slow_transformer import rope

N_SLOTS, MAX_LEN, HEADS, DIM = 4, 320, 2, 8
NAN = float("nan")


def make_cache(max_len: int = MAX_LEN, dtype: torch.dtype = torch.float32) -> KVCache:
    return KVCache(
        n_layers=2, n_slots=N_SLOTS, max_len=max_len, kv_heads=HEADS, head_dim=DIM, dtype=dtype, device="cpu"
    )


class Session:
    """A cache fed with rotated keys, and what was fed to each slot before rotation."""

    def __init__(self, seed: int = 0, max_len: int = MAX_LEN, theta: float = 1e4, dtype: torch.dtype = torch.float32):
        self.cache, self.dtype = make_cache(max_len, dtype), dtype
        self.frequencies = rotary_frequencies(DIM, theta, "cpu")
        self.generator = torch.Generator().manual_seed(seed)
        # Per slot and layer, [n, heads, dim].
        self.keys = [[self.noise(0), self.noise(0)] for _ in range(N_SLOTS)]
        self.values = [[self.noise(0), self.noise(0)] for _ in range(N_SLOTS)]

    def noise(self, *shape: int) -> Tensor:
        return torch.randn(*shape, HEADS, DIM, generator=self.generator).to(self.dtype)

    def feed(self, counts: dict[int, int], padding: int = 3, poison: float = NAN) -> CacheView:
        """slot -> new rows, all slots in one call of a bucket `padding` rows longer than the longest."""
        slots, n_new = torch.tensor(list(counts)), torch.tensor(list(counts.values()))
        bucket = max(counts.values()) + padding
        view = self.cache.view(slots, n_new, bucket, self.cache.max_len)
        cos, sin = (part.unsqueeze(2) for part in rotary_angles(view.positions, self.frequencies))
        inside = (torch.arange(bucket) < n_new[:, None])[..., None, None]
        for layer in range(2):
            k, v = self.noise(len(slots), bucket), self.noise(len(slots), bucket)
            for row, (slot, n) in enumerate(counts.items()):
                self.keys[slot][layer] = torch.cat((self.keys[slot][layer], k[row, :n]))
                self.values[slot][layer] = torch.cat((self.values[slot][layer], v[row, :n]))
            view.write(self.cache.k[layer], torch.where(inside, rotate(k, cos, sin), poison))
            view.write(self.cache.v[layer], torch.where(inside, v, poison))
        self.cache.advance(slots, n_new)
        return view

    def evict(self, gaps: dict[int, tuple[int, int]]) -> None:
        """slot -> (keep, drop)."""
        keep, drop = torch.tensor(list(gaps.values())).reshape(-1, 2).unbind(1)
        self.cache.evict(torch.tensor(list(gaps)), keep, drop, self.frequencies)
        for slot, (kept, dropped) in gaps.items():
            for fed in (self.keys[slot], self.values[slot]):
                fed[:] = [torch.cat((rows[:kept], rows[kept + dropped :])) for rows in fed]

    def check(self, tolerance: float) -> None:
        """Every session slot holds what it was fed, keys turned to where they stand now, and nothing else."""
        for slot in range(N_SLOTS):
            n = len(self.keys[slot][0])
            for name in ("lengths", "positions"):
                got = int(getattr(self.cache, name)[slot])
                assert got == n, f"slot {slot} {name}: expected {n}, got {got}"
            cos, sin = (part.unsqueeze(1) for part in rotary_angles(torch.arange(n), self.frequencies))
            for layer in range(2):
                what = f"slot {slot} layer {layer}"
                k, v = (cache[layer][slot].transpose(0, 1) for cache in (self.cache.k, self.cache.v))
                assert_close(k[:n], rotate(self.keys[slot][layer], cos, sin), tolerance, f"{what} keys")
                assert_same(v[:n], self.values[slot][layer], f"{what} values")
                for rows in (k, v):
                    assert rows[n:].eq(0).all(), f"{what}: expected zeros from row {n} on, got {rows[n:]}"


def slot_rows(cache: KVCache, slot: int) -> list[Tensor]:
    return [tensor[slot].clone() for tensor in cache.tensors()]


def assert_slot(cache: KVCache, slot: int, expected: list[Tensor]) -> None:
    for number, (got, wanted) in enumerate(zip(slot_rows(cache, slot), expected, strict=True)):
        assert_same(got, wanted, f"slot {slot}, state tensor {number}")


@st.composite
def gaps(draw: st.DrawFn, lengths: list[int]) -> dict[int, tuple[int, int]]:
    """Some slots in some order, each with a gap that lies inside its rows; often an empty one."""
    chosen = draw(st.permutations(range(N_SLOTS)))[: draw(st.integers(1, N_SLOTS))]
    result = {}
    for slot in chosen:
        keep = draw(st.integers(0, lengths[slot]))
        result[slot] = keep, draw(st.just(0) | st.integers(0, lengths[slot] - keep))
    return result


@settings(max_examples=30)
@given(data=st.data(), seed=st.integers(0, 2**20), theta=st.sampled_from([1e4, 1e6]))
def test_eviction_closes_the_gap_in_every_slot_of_the_call(data, seed, theta):
    """Float32 and positions up to 320: 1e-5, a few roundings of keys about 4 long."""
    session = Session(seed, theta=theta)
    lengths = data.draw(st.lists(st.integers(1, MAX_LEN), min_size=N_SLOTS, max_size=N_SLOTS))
    session.feed(dict(enumerate(lengths)))
    gap = data.draw(gaps(lengths))
    before = {slot: slot_rows(session.cache, slot) for slot in range(N_SLOTS)}
    session.evict(gap)
    session.check(1e-5)
    for slot in range(N_SLOTS):
        if gap.get(slot, (0, 0))[1] == 0:
            assert_slot(session.cache, slot, before[slot])
        else:
            keep = gap[slot][0]
            for cache, old in zip(session.cache.k + session.cache.v, before[slot], strict=False):
                assert_same(cache[slot, :, :keep], old[:, :keep], f"slot {slot}: rows before the gap")


@settings(max_examples=15)
@given(data=st.data(), seed=st.integers(0, 2**20))
def test_feeding_and_evicting_in_turn(data, seed):
    """Turning errors add up over six evictions: 2e-5."""
    session = Session(seed)
    for _ in range(6):
        lengths = [len(keys[0]) for keys in session.keys]
        room = MAX_LEN - max(lengths)
        session.feed({slot: data.draw(st.integers(0, min(80, room))) for slot in range(N_SLOTS)}, padding=0)
        session.evict(data.draw(gaps([len(keys[0]) for keys in session.keys])))
        session.check(2e-5)


@pytest.mark.parametrize("theta", [1e4, 1e6])
def test_eviction_thousands_of_rows_in(theta):
    """The difference of two angles near 8000 rad is rounded at 2 ** -12 rad at worst: 2e-4, measured 1e-4."""
    session = Session(max_len=8192, theta=theta)
    session.feed({0: 8000, 1: 8000})
    session.evict({0: (150, 7000), 1: (3, 1)})
    session.check(2e-4)


def test_eviction_of_a_slot_that_skipped_positions():
    """Rows stand `skipped` positions behind their index; the gap closes by as many positions as rows."""
    skipped, n, keep, drop = 7, 200, 20, 90
    session = Session()
    session.cache.positions[1] += skipped
    session.feed({1: n})
    session.evict({1: (keep, drop)})
    assert int(session.cache.positions[1]) == n + skipped - drop
    cos, sin = rotary_angles(torch.arange(n - drop) + skipped, session.frequencies)
    expected = rotate(session.keys[1][0], cos[:, None], sin[:, None])
    # Angles here are not differences of those the keys were turned by, so their own rounding shows.
    assert_close(session.cache.k[0][1, :, : n - drop].transpose(0, 1), expected, 1e-4)


def test_eviction_removes_what_it_drops_even_if_it_is_nan():
    session = Session()
    session.feed({2: 60})
    for cache in session.cache.k + session.cache.v:
        cache[2, :, 10:30] = NAN
    session.evict({2: (10, 20)})
    session.check(1e-5)


def test_an_empty_gap_changes_no_bit_of_any_slot():
    """Not even where turning by nothing would: negative zeros, infinities, rows behind the length."""
    session = Session()
    session.feed({1: 30, 2: 30})
    for cache in session.cache.k + session.cache.v:
        cache[1, :, 8], cache[1, :, 9, 0], cache[1, :, 12, 1], cache[1, :, 40] = -0.0, float("inf"), NAN, 7.0
        cache[1, :, 8, 4:] = -1.0
    before = slot_rows(session.cache, 1)
    session.evict({1: (5, 0), 2: (5, 10)})
    assert_slot(session.cache, 1, before)


def test_eviction_of_bfloat16_rounds_once():
    """Each turned key is the exact one rounded to eight bits."""
    session, drop = Session(dtype=torch.bfloat16), 200
    session.feed({0: 300, 1: 300})
    old = [cache[0].double() for cache in session.cache.k]
    session.evict({0: (20, drop), 1: (0, 0)})
    for layer in range(2):
        rows = old[layer][:, 220:300].flatten(0, 1)
        expected = rope(rows, torch.full((len(rows),), -drop), 1e4).view(HEADS, 80, DIM)
        got = session.cache.k[layer][0, :, 20:100]
        excess = (got.double() - expected).abs() - 2**-8 * expected.abs()
        assert_close(excess.clamp(min=0), torch.zeros_like(excess), 1e-4, f"layer {layer}: error beyond one rounding")


def test_eviction_from_a_full_slot_leaves_zeros_behind():
    session = Session()
    session.feed({0: MAX_LEN, 1: MAX_LEN, 2: MAX_LEN, 3: MAX_LEN}, padding=0)
    session.evict({2: (10, 50), 0: (0, MAX_LEN), 3: (MAX_LEN - 1, 1)})
    session.check(1e-5)


def test_padding_of_an_evicting_batch_may_repeat_the_scratch_slot():
    session = Session()
    session.feed({0: 50})
    slots = torch.tensor([0, N_SLOTS, N_SLOTS])
    session.cache.evict(slots, torch.tensor([5, 0, 0]), torch.tensor([10, 0, 0]), session.frequencies)
    for fed in (session.keys[0], session.values[0]):
        fed[:] = [torch.cat((rows[:5], rows[15:])) for rows in fed]
    session.check(1e-5)


@settings(max_examples=20)
@given(data=st.data(), seed=st.integers(0, 2**20))
def test_padding_reaches_no_session_slot(data, seed):
    """Rows behind the valid ones are NaN: sessions hold exactly what was fed, whatever the buckets."""
    session = Session(seed, max_len=40)
    for _ in range(4):
        slots = data.draw(st.permutations(range(N_SLOTS)))[: data.draw(st.integers(1, N_SLOTS))]
        counts = {slot: data.draw(st.integers(0, min(12, 40 - len(session.keys[slot][0])))) for slot in slots}
        session.feed(counts, padding=data.draw(st.integers(0, 45)))
        session.check(0)


def test_a_padded_bucket_may_reach_past_the_last_row():
    session = Session(max_len=16)
    session.feed({0: 14, 1: 16}, padding=0)
    session.feed({0: 2, 1: 0}, padding=10)
    session.check(0)
    assert session.cache.k[0][N_SLOTS].isnan().any(), "expected the padding in the scratch slot"


def test_view_addresses():
    cache = make_cache(max_len=8)
    cache.lengths[:] = torch.tensor([3, 0, 8, 0, 0])
    cache.positions[:] = torch.tensor([5, 0, 8, 0, 0])
    view = cache.view(torch.tensor([2, 0, 1]), torch.tensor([0, 2, 3]), 3, 6)
    scratch = N_SLOTS
    assert view.row_slots.tolist() == [[scratch] * 3, [0, 0, scratch], [1, 1, 1]]
    assert view.row_index[1, :2].tolist() == [3, 4]
    assert view.row_index[2].tolist() == [0, 1, 2]
    assert view.positions[1].tolist() == [5, 6, 7]
    assert view.positions[2].tolist() == [0, 1, 2]
    assert view.kv_len == 6


@pytest.mark.parametrize(
    "causal, window, expected",
    [
        (True, 8, ["11110000", "11111000"]),
        (False, 8, ["11111000", "11111000"]),
        (True, 2, ["01110000", "01111000"]),
        (False, 2, ["01111000", "01111000"]),
        (True, 0, ["00010000", "00011000"]),
    ],
)
def test_what_two_new_rows_behind_three_may_see(causal, window, expected):
    cache = make_cache(max_len=8)
    cache.lengths[1], cache.windows[1] = 3, window
    view = cache.view(torch.tensor([0, 1]), torch.tensor([1, 2]), 4, 8, causal=causal)
    got = ["".join(str(int(seen)) for seen in row) for row in view.mask[1, :2]]
    assert got == expected
    assert view.mask.any(-1).all(), "every row of padding needs a column to stay finite"


def test_a_slot_that_sits_out_empty_still_sees_a_column():
    view = make_cache().view(torch.tensor([0]), torch.tensor([0]), 3, 16, causal=False)
    assert view.mask.any(-1).all(), f"expected a column per row, got {view.mask}"


@settings(max_examples=20)
@given(
    held=st.integers(0, 30),
    n_new=st.integers(1, 6),
    window=st.integers(0, 40),
    kv_len=st.sampled_from([36, 40]),
    causal=st.booleans(),
)
def test_a_window_equals_attention_over_only_those_rows(held, n_new, window, kv_len, causal):
    session = Session(max_len=40)
    if held:
        session.feed({1: held})
    session.cache.windows[1] = window
    slots, count = torch.tensor([1]), torch.tensor([n_new])
    q, k, v = (session.noise(1, n_new) for _ in range(3))
    view = session.cache.view(slots, count, n_new, kv_len, causal=causal)
    view.write(session.cache.k[0], k)
    view.write(session.cache.v[0], v)
    got = attend(q, view.read(session.cache.k[0]), view.read(session.cache.v[0]), view.mask)
    rows = slice(max(0, held - window), held + n_new)
    seen = torch.ones(1, n_new, min(window, held) + n_new, dtype=torch.bool)
    if causal:
        seen = seen.tril(min(window, held))
    expected = attend(q, session.cache.k[0][1:2, :, rows], session.cache.v[0][1:2, :, rows], seen)
    assert_close(got, expected, 1e-6)


def test_read_and_write_address_the_slots_named():
    cache = make_cache(max_len=8)
    rows = torch.randn(2, 3, HEADS, DIM)
    view = cache.view(torch.tensor([3, 1]), torch.tensor([3, 3]), 3, 5)
    view.write(cache.k[0], rows)
    got = view.read(cache.k[0])
    assert got.shape == (2, HEADS, 5, DIM)
    assert_same(got[:, :, :3].transpose(1, 2), rows)
    assert_same(cache.k[0][3, :, :3].transpose(0, 1), rows[0])
    assert cache.k[1].eq(0).all()


def test_advance_counts_only_the_slots_named():
    cache = make_cache()
    cache.positions[2] = 4
    cache.advance(torch.tensor([2, 0]), torch.tensor([5, 0]))
    assert cache.lengths.tolist() == [0, 0, 5, 0, 0]
    assert cache.positions.tolist() == [0, 0, 9, 0, 0]


def test_reset_leaves_slots_as_new_even_after_nan():
    session = Session()
    session.feed({0: 20, 1: 30, 2: 40})
    for tensor in session.cache.k + session.cache.v:
        tensor[1].fill_(NAN)
    session.cache.positions[1] += 3
    session.cache.windows[1] = 5
    session.cache.windows[2] = 9
    others = {slot: slot_rows(session.cache, slot) for slot in (0, 2, N_SLOTS)}
    session.cache.reset(torch.tensor([1, 3]))
    fresh = make_cache()
    for slot in (1, 3):
        assert_slot(session.cache, slot, slot_rows(fresh, slot))
    for slot, expected in others.items():
        assert_slot(session.cache, slot, expected)


def test_a_new_cache_is_empty_and_has_a_scratch_slot():
    cache = make_cache()
    assert cache.scratch == N_SLOTS
    assert {tuple(t.shape) for t in cache.k + cache.v} == {(N_SLOTS + 1, HEADS, MAX_LEN, DIM)}
    assert all(t.eq(0).all() for t in (*cache.k, *cache.v, cache.lengths, cache.positions))
    assert cache.windows.tolist() == [MAX_LEN] * (N_SLOTS + 1)
    assert len(cache.tensors()) == 2 * 2 + 3
