"""Rows of a slot cache that are moved by one kernel, against the cache's own operations."""

from functools import partial

import pytest
import torch

from models.layers.kv_cache import KVCache, SavedRows
from models.layers.kv_pages import PageSizes
from models.layers.rotary import rotary_frequencies
from tests.models.compare import assert_close, assert_same

pytest.importorskip("triton")

from models.kernels.moved_rows import close_gaps, restore_keys

DEVICES = (
    pytest.param("cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are built for the GPU")),
    pytest.param("cuda", marks=pytest.mark.gpu),
)
N_SLOTS, MAX_LEN, DIM = 4, 300, 16
LENGTHS, AHEAD = (255, 9, 130, 300), (0, 3, 40_000, 2)  # of the slots; positions that they have skipped
SHAPES = [(0, 0), (64, 0), (0, 1)]  # rows of a page; whether one slot shares its scratch slot among layers


def filled_cache(device: str, page: int, shares: int) -> KVCache:
    """Random rows; those after the last are zero."""
    cache = KVCache(
        n_layers=3,
        n_slots=1 if shares else N_SLOTS,
        max_len=MAX_LEN,
        kv_heads=2,
        head_dim=DIM,
        dtype=torch.bfloat16 if device == "cuda" else torch.float32,
        device=device,
        spare=1,
        shared_scratch=bool(shares),
        page_sizes=PageSizes(page, 22) if page else None,
    )
    generator = torch.Generator().manual_seed(3)
    for rows in (64, MAX_LEN):  # the second pages of slots come after the first of all
        for slot in range(cache.n_slots):
            cache.pages.reserve(slot, min(rows, LENGTHS[slot]))
    for slot, length in enumerate(LENGTHS[: cache.n_slots]):
        rows = torch.randn(2, 3, 2, length, DIM, generator=generator).to(cache.k[0])
        cache.load(slot, SavedRows(*rows))
        cache.positions[slot] += AHEAD[slot]
    return cache


def assert_caches(got: KVCache, expected: KVCache, tolerance: float = 0.0) -> None:
    for slot in range(expected.n_slots):
        what = f"slot {slot}"
        for counter in ("lengths", "positions"):
            assert_same(getattr(got, counter)[slot], getattr(expected, counter)[slot], f"{what} {counter}")
        n = got.pages.capacity(slot)  # zeros after the last row are compared, too
        for own, other in zip(got.save(slot, n), expected.save(slot, n), strict=True):
            assert_close(own.float(), other.float(), tolerance, what)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("page", "shares"), SHAPES)
def test_gaps_close_as_the_cache_closes_them(device: str, page: int, shares: int) -> None:
    expected, cache = (filled_cache(device, page, shares) for _ in range(2))
    given = [(0, 130, 7), (N_SLOTS, 0, 0), (3, 64, 129), (1, 0, 9), (N_SLOTS, 0, 0), (2, 17, 0)]
    given = [(0, 3, 70), (1, 0, 0)] if shares else given
    slots, keep, drop = torch.tensor(given, device=device).unbind(1)
    expected.evict(slots, keep, drop, rotary_frequencies(DIM, 1e4, device), rotates=False)
    close_gaps(cache, slots, keep, drop)
    assert_caches(cache, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("page", "shares"), SHAPES)
@pytest.mark.parametrize(("n", "by"), [(70, 5), (64, -8000), (1, 0), (0, 3)])
def test_saved_keys_are_written_rotated(device: str, page: int, shares: int, n: int, by: int) -> None:
    expected, cache = (filled_cache(device, page, shares) for _ in range(2))
    keys, frequencies = cache.save_keys(0, 100), rotary_frequencies(DIM, 1e4, device)
    expected.restore_keys(0, keys, n, by, frequencies)
    restore_keys(cache, 0, keys, n, by, frequencies)
    assert_caches(cache, expected, tolerance=2e-2 if device == "cuda" else 1e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("page", "shares"), SHAPES)
def test_keys_of_the_scratch_slot_change_no_session(device: str, page: int, shares: int) -> None:
    """As `ContextMover.load_kernel` calls it."""
    expected, cache = (filled_cache(device, page, shares) for _ in range(2))
    scratch, frequencies = cache.scratch, rotary_frequencies(DIM, 1e4, device)
    keys = torch.full_like(cache.save_keys(scratch, 1), 7)
    for restore in (partial(restore_keys, cache), cache.restore_keys):
        restore(scratch, keys, 1, 0, frequencies)
        assert_same(cache.save_keys(scratch, 1), keys, "scratch slot")
        assert_caches(cache, expected)


def test_more_rows_than_were_saved_are_refused() -> None:
    cache = filled_cache("cpu", 0, 0)
    with pytest.raises(AssertionError, match=r"saved keys: expected \(3, 2, 5, 16\) with at least 6 rows"):
        restore_keys(cache, 0, cache.save_keys(0, 5), 6, 1, rotary_frequencies(DIM, 1e4, "cpu"))
