"""Slot cache: moving rows and rotating their keys: eviction, moves in both directions, replacing rows in the middle."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.layers.kv_cache import KVCache
from models.layers.rotary import rotary_angles, rotary_frequencies, rotate
from tests.models.compare import assert_close, assert_same
from tests.models.layers.cache_sessions import (
    DIM,
    HEADS,
    MAX_LEN,
    N_SLOTS,
    NAN,
    Session,
    assert_slot,
    make_cache,
    slot_rows,
)
from tests.models.layers.transformer_reference import rope


@st.composite
def gaps(draw: st.DrawFn, lengths: list[int]) -> dict[int, tuple[int, int]]:
    """Some slots in some order, each with a gap within its rows; often an empty one."""
    chosen = draw(st.permutations(range(N_SLOTS)))[: draw(st.integers(1, N_SLOTS))]
    result = {}
    for slot in chosen:
        keep = draw(st.integers(0, lengths[slot]))
        result[slot] = keep, draw(st.just(0) | st.integers(0, lengths[slot] - keep))
    return result


@settings(max_examples=30)
@given(data=st.data(), seed=st.integers(0, 2**20), theta=st.sampled_from([1e4, 1e6]))
def test_eviction_closes_the_gap_in_every_slot_of_the_call(data, seed, theta):
    """Tolerance 1e-5: float32, positions up to 320, a few roundings of keys of length about 4."""
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
def test_feeding_and_evicting_alternately(data, seed):
    """Tolerance 2e-5: rotation errors add up over six evictions."""
    session = Session(seed)
    for _ in range(6):
        lengths = [len(keys[0]) for keys in session.keys]
        room = MAX_LEN - max(lengths)
        session.feed({slot: data.draw(st.integers(0, min(80, room))) for slot in range(N_SLOTS)}, padding=0)
        session.evict(data.draw(gaps([len(keys[0]) for keys in session.keys])))
        session.check(2e-5)


@pytest.mark.parametrize("theta", [1e4, 1e6])
def test_eviction_at_positions_in_the_thousands(theta):
    """Tolerance 2e-4, measured 1e-4: the difference of two angles near 8000 rad is off by up to 2 ** -12 rad."""
    session = Session(max_len=8192, theta=theta)
    session.feed({0: 8000, 1: 8000})
    session.evict({0: (150, 7000), 1: (3, 1)})
    session.check(2e-4)


def test_eviction_of_a_slot_that_skipped_positions():
    """Positions are `skipped` above the row index; the gap closes by as many positions as rows."""
    skipped, n, keep, drop = 7, 200, 20, 90
    session = Session()
    session.cache.positions[1] += skipped
    session.feed({1: n})
    session.evict({1: (keep, drop)})
    assert int(session.cache.positions[1]) == n + skipped - drop
    cos, sin = rotary_angles(torch.arange(n - drop) + skipped, session.frequencies)
    expected = rotate(session.keys[1][0], cos[:, None], sin[:, None])
    # These angles are not differences of the angles of the rotation, so they have a rounding error of their own.
    assert_close(session.cache.k[0][1, :, : n - drop].transpose(0, 1), expected, 1e-4)


def test_eviction_removes_nan():
    session = Session()
    session.feed({2: 60})
    for cache in session.cache.k + session.cache.v:
        cache[2, :, 10:30] = NAN
    session.evict({2: (10, 20)})
    session.check(1e-5)


def test_empty_gap_changes_no_bit():
    """Not even bits that a rotation by zero would change: negative zeros, infinities, rows beyond the length."""
    session = Session()
    session.feed({1: 30, 2: 30})
    for cache in session.cache.k + session.cache.v:
        cache[1, :, 8], cache[1, :, 9, 0], cache[1, :, 12, 1], cache[1, :, 40] = -0.0, float("inf"), NAN, 7.0
        cache[1, :, 8, 4:] = -1.0
    before = slot_rows(session.cache, 1)
    session.evict({1: (5, 0), 2: (5, 10)})
    assert_slot(session.cache, 1, before)


def test_eviction_of_bfloat16_rounds_once():
    """Each rotated key is the exact one rounded to eight bits."""
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


def test_eviction_from_a_full_slot_zeroes_the_freed_rows():
    session = Session()
    session.feed({0: MAX_LEN, 1: MAX_LEN, 2: MAX_LEN, 3: MAX_LEN}, padding=0)
    session.evict({2: (10, 50), 0: (0, MAX_LEN), 3: (MAX_LEN - 1, 1)})
    session.check(1e-5)


def test_eviction_accepts_a_repeated_scratch_slot():
    session = Session()
    session.feed({0: 50})
    slots = torch.tensor([0, N_SLOTS, N_SLOTS])
    session.cache.evict(slots, torch.tensor([5, 0, 0]), torch.tensor([10, 0, 0]), session.frequencies)
    for fed in (session.keys[0], session.values[0]):
        fed[:] = [torch.cat((rows[:5], rows[15:])) for rows in fed]
    session.check(1e-5)


@settings(max_examples=40)
@given(data=st.data(), seed=st.integers(0, 2**20), theta=st.sampled_from([1e4, 1e6]))
def test_rows_move_forward_and_back_in_every_slot(data, seed, theta):
    """Keys equal those computed at the new positions; tolerance as for an eviction."""
    session = Session(seed, theta=theta)
    lengths = data.draw(st.lists(st.integers(1, MAX_LEN), min_size=N_SLOTS, max_size=N_SLOTS))
    session.feed(dict(enumerate(lengths)))
    moves = {}
    for slot in data.draw(st.permutations(range(N_SLOTS)))[: data.draw(st.integers(1, N_SLOTS))]:
        first = data.draw(st.integers(0, lengths[slot]))
        moves[slot] = first, data.draw(st.just(0) | st.integers(-first, MAX_LEN - lengths[slot]))
    before = {slot: slot_rows(session.cache, slot) for slot in range(N_SLOTS)}
    session.shift(moves)
    session.check(1e-5)
    for slot in range(N_SLOTS):
        first, by = moves.get(slot, (0, 0))
        if by == 0:
            assert_slot(session.cache, slot, before[slot])
        for cache, old in zip(session.cache.k + session.cache.v, before[slot], strict=False):
            front = first + min(by, 0)
            assert_same(cache[slot, :, :front], old[:, :front], f"slot {slot}: rows before the moved ones")


def test_moving_rows_there_and_back_restores_them():
    session = Session()
    session.feed({1: 100, 2: 50})
    session.shift({1: (40, 170), 2: (50, 9)})
    assert session.cache.lengths.tolist() == [0, 270, 59, 0, 0]
    assert session.cache.k[0][1, :, 40:210].eq(0).all(), "expected zeros where the gap opened"
    session.shift({2: (59, -9), 1: (210, -170)})
    assert session.cache.lengths.tolist() == [0, 100, 50, 0, 0]
    session.check(1e-5)


def test_moving_rows_of_a_slot_that_skipped_positions():
    """Positions keep their distance to lengths; keys rotate by as many positions as rows move."""
    skipped, n, first, by = 7, 200, 20, 90
    session = Session()
    session.cache.positions[1] += skipped
    session.feed({1: n})
    session.shift({1: (first, by)})
    got = int(session.cache.lengths[1]), int(session.cache.positions[1])
    assert got == (n + by, n + by + skipped), f"expected {(n + by, n + by + skipped)}, got {got}"
    cos, sin = rotary_angles(torch.arange(first + by, n + by) + skipped, session.frequencies)
    expected = rotate(session.keys[1][0][first + by :], cos[:, None], sin[:, None])
    assert_close(session.cache.k[0][1, :, first + by : n + by].transpose(0, 1), expected, 1e-4)


def test_keys_move_without_rotation():
    session = Session()
    session.feed({0: 30})
    held = [cache[0, :, 10:30].clone() for cache in session.cache.k]
    session.cache.shift(torch.tensor([0]), torch.tensor([10]), torch.tensor([5]), session.frequencies, rotates=False)
    for cache, rows in zip(session.cache.k, held, strict=True):
        assert_same(cache[0, :, 15:35], rows)
    session.cache.evict(torch.tensor([0]), torch.tensor([3]), torch.tensor([12]), session.frequencies, rotates=False)
    for cache, rows in zip(session.cache.k, held, strict=True):
        assert_same(cache[0, :, 3:23], rows)


def test_arbitrary_scratch_counters_are_harmless():
    """Moving the scratch slot stays in range for any counters that padding left there."""
    session = Session()
    session.feed({0: 50})
    session.cache.lengths[N_SLOTS] = session.cache.positions[N_SLOTS] = MAX_LEN + 50
    slots = torch.tensor([0, N_SLOTS])
    session.cache.shift(slots, torch.tensor([20, 100]), torch.tensor([0, -60]), session.frequencies)
    session.check(0)


@settings(max_examples=20)
@given(
    seed=st.integers(0, 2**20),
    front=st.integers(0, 20),
    gone=st.integers(0, 30),
    new=st.integers(0, 30),
    kept=st.integers(0, 40),
)
def test_rows_in_the_middle_can_be_replaced(seed, front, gone, new, kept):
    """Move the kept rows, lower the length, feed, raise it: the slot equals one fed front, new and kept rows."""
    session, one = Session(seed), torch.tensor([1])
    session.feed({1: front + gone + kept, 2: 30})
    session.shift({1: (front + gone, new - gone)})
    tail = [[rows[front + new :] for rows in fed] for fed in (session.keys[1], session.values[1])]
    for fed in (session.keys[1], session.values[1]):
        fed[:] = [rows[:front] for rows in fed]
    session.cache.set_length(one, torch.tensor([front]))
    session.feed({1: new})
    session.cache.set_length(one, torch.tensor([front + new + kept]))
    for fed, rest in zip((session.keys[1], session.values[1]), tail, strict=True):
        fed[:] = [torch.cat(parts) for parts in zip(fed, rest, strict=True)]
    session.check(1e-5)


def every_move(cache: KVCache, slots: Tensor, first: Tensor, by: Tensor, lengths: Tensor) -> None:
    frequencies = rotary_frequencies(DIM, 1e4, slots.device)
    cache.shift(slots, first, by, frequencies)
    cache.evict(slots, first, (-by).clamp(min=0), frequencies)
    cache.set_length(slots, lengths)
    cache.wipe(slots, lengths)


def test_moving_rows_compiles_as_one_graph():
    """There is no graph break, and the bits equal those of eager mode."""
    sessions = Session(max_len=40), Session(max_len=40)
    compiled = torch.compile(every_move, backend="eager", fullgraph=True, dynamic=False)
    for session, run in zip(sessions, (every_move, compiled), strict=True):
        session.feed({0: 30, 1: 20, 2: 25})
        slots, first, by = torch.tensor([2, 0, N_SLOTS]), torch.tensor([10, 12, 0]), torch.tensor([6, -5, 0])
        run(session.cache, slots, first, by, torch.tensor([28, 15, 0]))
    for slot in range(N_SLOTS):
        assert_slot(sessions[1].cache, slot, slot_rows(sessions[0].cache, slot))


def test_moving_rows_never_synchronizes():
    """On the meta device `.item()` and branches on tensors raise."""
    cache = make_cache(device="meta")
    slots, first, by, lengths = torch.zeros(4, 3, dtype=torch.int64, device="meta")
    every_move(cache, slots, first, by, lengths)
