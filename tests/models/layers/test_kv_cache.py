"""Slot cache: addresses, masks, counters, reset, saved rows; with random keys and values."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.layers.kv_cache import SavedRows
from models.layers.transformer import attend
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


def test_set_length_changes_positions_equally_and_moves_no_row():
    session = Session()
    session.feed({0: 20, 1: 30, 2: 40})
    session.cache.positions[1] += 7
    rows = [tensor.clone() for tensor in session.cache.k + session.cache.v]
    scratch = torch.tensor([5, 8])
    session.cache.lengths[N_SLOTS], session.cache.positions[N_SLOTS] = scratch
    # Padding may repeat the scratch slot: it is set twice, not moved twice.
    slots = torch.tensor([1, 2, N_SLOTS, N_SLOTS])
    session.cache.set_length(slots, torch.tensor([12, 55, 0, 0]))
    assert session.cache.lengths.tolist() == [20, 12, 55, 0, 0]
    assert session.cache.positions.tolist() == [20, 19, 55, 0, 3]
    for got, expected in zip(session.cache.k + session.cache.v, rows, strict=True):
        assert_same(got, expected)


def test_wipe_removes_nan_beyond_the_length():
    session = Session()
    session.feed({0: 20, 1: 30, 2: 40})
    for cache in session.cache.k + session.cache.v:
        cache[1, :, 18:].fill_(NAN)
        cache[2, :, 50], cache[0, :, 25] = NAN, NAN
    others = {slot: slot_rows(session.cache, slot) for slot in (0, 3)}
    slots, lengths = torch.tensor([1, N_SLOTS, 2, N_SLOTS]), torch.tensor([18, 0, 40, 0])
    session.cache.wipe(slots, lengths)
    assert session.cache.lengths.tolist() == session.cache.positions.tolist() == [20, 30, 40, 0, 0]
    for slot, expected in others.items():
        assert_slot(session.cache, slot, expected)
    session.cache.set_length(slots, lengths)
    for fed in (session.keys[1], session.values[1]):
        fed[:] = [rows[:18] for rows in fed]
    for cache in session.cache.k + session.cache.v:
        cache[0, :, 25] = 0
    session.check(0)


@pytest.mark.parametrize("n", [0, 1, 25, 40])
def test_saved_rows_load_into_another_slot(n):
    """The same bits, at positions 0 .. n - 1; nothing else of any slot changes."""
    session = Session(max_len=40)
    session.feed({0: 40, 2: 33, 3: 7}, padding=0)
    session.cache.positions[2] += 7
    session.cache.windows[2] = 9
    expected = slot_rows(session.cache, 2)
    saved = session.cache.save(0, n)
    assert [tuple(rows.shape) for rows in saved] == [(2, HEADS, n, DIM)] * 2 and saved.n_rows == n
    assert_same(session.cache.save_keys(0, n), saved.keys)
    for target, rows in zip(expected, (*saved.keys, *saved.values), strict=False):
        target[:, :n] = rows
    expected[4].fill_(n), expected[5].fill_(n)
    # Later changes of the slot they came from do not affect the saved rows.
    for cache in session.cache.k + session.cache.v:
        cache[0].fill_(NAN)
    others = {slot: slot_rows(session.cache, slot) for slot in (0, 1, 3, N_SLOTS)}
    session.cache.load(2, saved)
    assert_slot(session.cache, 2, expected)
    for slot, rows in others.items():
        assert_slot(session.cache, slot, rows)
    for rows in saved:
        rows.fill_(5.0)
    assert_slot(session.cache, 2, expected)


def test_refuses_saved_rows_of_another_shape():
    cache = make_cache(max_len=8)
    with pytest.raises(AssertionError, match="expected at most 8, got 9"):
        cache.save(0, 9)
    with pytest.raises(AssertionError, match="saved rows"):
        cache.load(0, SavedRows(*(rows[:, :1] for rows in cache.save(0, 4))))
    with pytest.raises(AssertionError, match="saved rows"):
        cache.load(0, make_cache(max_len=9).save(0, 9))


@settings(max_examples=20)
@given(data=st.data(), seed=st.integers(0, 2**20))
def test_padding_never_writes_to_a_session_slot(data, seed):
    """Padding rows are NaN; session slots contain exactly the rows fed, for every bucket."""
    session = Session(seed, max_len=40)
    for _ in range(4):
        slots = data.draw(st.permutations(range(N_SLOTS)))[: data.draw(st.integers(1, N_SLOTS))]
        counts = {slot: data.draw(st.integers(0, min(12, 40 - len(session.keys[slot][0])))) for slot in slots}
        session.feed(counts, padding=data.draw(st.integers(0, 45)))
        session.check(0)


def test_padding_may_extend_past_the_last_row():
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
def test_mask_of_two_new_rows_after_three(causal, window, expected):
    cache = make_cache(max_len=8)
    cache.lengths[1], cache.windows[1] = 3, window
    view = cache.view(torch.tensor([0, 1]), torch.tensor([1, 2]), 4, 8, causal=causal)
    got = ["".join(str(int(seen)) for seen in row) for row in view.mask[1, :2]]
    assert got == expected
    assert view.mask.any(-1).all(), "expected a visible column in every padding row"


def test_empty_slot_without_new_rows_sees_one_column():
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
def test_window_equals_attention_over_its_rows_alone(held, n_new, window, kv_len, causal):
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


def test_read_and_write_address_the_given_slots():
    cache = make_cache(max_len=8)
    rows = torch.randn(2, 3, HEADS, DIM)
    view = cache.view(torch.tensor([3, 1]), torch.tensor([3, 3]), 3, 5)
    view.write(cache.k[0], rows)
    got = view.read(cache.k[0])
    assert got.shape == (2, HEADS, 5, DIM)
    assert_same(got[:, :, :3].transpose(1, 2), rows)
    assert_same(cache.k[0][3, :, :3].transpose(0, 1), rows[0])
    assert cache.k[1].eq(0).all()


def test_advance_changes_only_the_given_slots():
    cache = make_cache()
    cache.positions[2] = 4
    cache.advance(torch.tensor([2, 0]), torch.tensor([5, 0]))
    assert cache.lengths.tolist() == [0, 0, 5, 0, 0]
    assert cache.positions.tolist() == [0, 0, 9, 0, 0]


def test_reset_clears_slots_that_contain_nan():
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


def test_new_cache_is_empty_and_has_a_scratch_slot():
    cache = make_cache()
    assert cache.scratch == N_SLOTS
    assert {tuple(t.shape) for t in cache.k + cache.v} == {(N_SLOTS + 1, HEADS, MAX_LEN, DIM)}
    assert all(t.eq(0).all() for t in (*cache.k, *cache.v, cache.lengths, cache.positions))
    assert cache.windows.tolist() == [MAX_LEN] * (N_SLOTS + 1)
    assert len(cache.tensors()) == 2 * 2 + 3
