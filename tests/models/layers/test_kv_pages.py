"""A slot cache over a pool of pages: the same rows and counters as one with rows for each slot, bit for bit."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from models.errors import SlotError
from models.layers.kv_cache import KVCache, joined
from models.layers.kv_pages import PageSizes, PageTable
from tests.models.compare import assert_same
from tests.models.layers.cache_sessions import MAX_LEN, N_SLOTS, Session, make_cache

PAGE = 64
CAPACITY = (2 * PAGE, 3 * PAGE, PAGE, MAX_LEN)


def pooled() -> Session:
    """A session over a pool in which no slot's pages are in order; all but one page are taken."""
    session = Session()
    n = 3 + sum(-(-rows // PAGE) for rows in CAPACITY)
    session.cache = make_cache(page_sizes=PageSizes(PAGE, n))
    pages = session.cache.pages
    for rows in (PAGE, 2 * PAGE):
        for slot in range(N_SLOTS):
            pages.reserve(slot, min(rows, CAPACITY[slot]))
    for slot, rows in enumerate(CAPACITY):
        pages.reserve(slot, rows)
    for tensor in (*session.cache.k, *session.cache.v):
        tensor[n - 3 :] = torch.nan  # pages without an owner, and scratch
        tensor[-1] = 0
    return session


def rows_of(cache: KVCache, slot: int) -> list[torch.Tensor]:
    """Valid rows of each layer's keys and values."""
    n = int(cache.lengths[slot])
    view = cache.view(torch.tensor([slot]), torch.tensor([0]), 1, cache.max_len)
    return [view.read(tensor)[0, :, :n] for tensor in (*cache.k, *cache.v)]


def test_rows_are_those_of_a_cache_without_a_pool() -> None:
    plain, paged = Session(), pooled()
    saved = []
    for session in (plain, paged):
        cache = session.cache
        session.feed({0: 70, 1: 150, 2: 10, 3: 300})
        session.feed({1: 1, 3: 5})
        session.evict({1: (20, 100), 3: (64, 64)})
        session.shift({0: (30, 40)})
        cache.move_positions(torch.tensor([1]), torch.tensor([8]), torch.tensor([-3]), session.frequencies)
        saved.append([*cache.save(3, 130), *cache.save(1, 9)])
        cache.load(2, cache.save(1, 50))
        cache.load(1, cache.save(3, 130))
        cache.restore_keys(1, cache.save_keys(3, 70), 66, 5, session.frequencies)
        cache.set_length(torch.tensor([3]), torch.tensor([100]))
        cache.wipe(torch.tensor([3]), torch.tensor([100]))
        cache.set_length(torch.tensor([3]), torch.tensor([200]))  # wiped rows are zero
    for counter in ("lengths", "positions"):
        assert_same(getattr(paged.cache, counter)[:N_SLOTS], getattr(plain.cache, counter)[:N_SLOTS], counter)
    for got, expected in zip(saved[1], saved[0], strict=True):
        assert_same(got, expected, "saved rows")
    for slot in range(N_SLOTS):
        for got, expected in zip(rows_of(paged.cache, slot), rows_of(plain.cache, slot), strict=True):
            assert_same(got, expected, f"slot {slot}")
    paged.cache.reset(torch.tensor([1, 3]))
    table = paged.cache.pages.table
    assert all(joined(tensor, table[[1, 3]]).eq(0).all() for tensor in (*paged.cache.k, *paged.cache.v))
    assert rows_of(paged.cache, 0)[0].ne(0).any(), "expected other slots to keep their rows"


def test_pages_are_reserved_and_returned() -> None:
    pages = PageTable(2, 300, 1, "cpu", PageSizes(64, 6))
    assert pages.table.tolist() == [[7] * 5, [7] * 5, [6] * 5]
    assert [pages.n_fitting(n) for n in (1, 64, 65, 300, 9999)] == [6, 6, 3, 1, 1]
    pages.reserve(0, 200)
    assert (pages.capacity(0), pages.capacity(1), pages.n_free_rows) == (256, 0, 128)
    assert pages.capacity(2) == 64, "expected the scratch slot to have one page"
    with pytest.raises(SlotError, match="slot 1: expected at most 128 more rows, which are free, got 192"):
        pages.reserve(1, 150)
    assert pages.capacity(1) == 0, "expected nothing to change by a refused reservation"
    pages.reserve(0, 9999)
    assert (pages.capacity(0), pages.n_free_rows) == (300, 64), "expected no more rows than a slot may hold"
    pages.release(0)
    pages.reserve(1, 10)
    pages.reserve(1, 5)
    assert pages.table[0].eq(7).all() and pages.n_free_rows == 5 * 64
    assert PageTable(2, 300, 1, "cpu", None).capacity(1) == 300


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.integers(0, 350)), max_size=40))
def test_each_page_has_one_owner_or_is_free(steps: list[tuple[int, bool, int]]) -> None:
    """Slots begin and end turns, or drop rows, in any order."""
    pages, held = PageTable(3, 300, 1, "cpu", PageSizes(64, 9, "speech rows")), [0, 0, 0]
    for slot, is_begin, n_rows in steps:
        n_pages, n_free = -(-min(n_rows, 300) // 64), 9 - sum(held)
        assert pages.has_room(slot, n_rows) == (n_pages - held[slot] <= n_free)
        if not is_begin:
            pages.release(slot, n_rows)
            held[slot] = min(held[slot], -(-n_rows // 64))
        elif pages.has_room(slot, n_rows):
            pages.reserve(slot, n_rows)
            held[slot] = max(held[slot], n_pages)
        else:
            with pytest.raises(SlotError, match=f"speech rows of slot {slot}: expected at most {64 * n_free} more"):
                pages.reserve(slot, n_rows)
        owned = [page for one in pages.table[:3].tolist() for page in one if page != 10]
        assert len(owned) == len(set(owned)) == sum(held), f"expected {held} pages, got {pages.table.tolist()}"
        assert pages.n_free_rows == 64 * (9 - sum(held))
        assert [pages.capacity(one) for one in range(3)] == [min(64 * n, 300) for n in held]
