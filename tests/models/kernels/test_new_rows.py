"""Addresses of new rows by one kernel, against the cache's own."""

import pytest
import torch

from models.layers.kv_cache import KVCache
from models.layers.kv_pages import PageSizes
from models.layers.rotary import rotary_angles, rotary_frequencies
from tests.models.compare import assert_close, assert_same

pytest.importorskip("triton")

from models.kernels.new_rows import new_rows

DEVICES = (
    pytest.param("cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are built for the GPU")),
    pytest.param("cuda", marks=pytest.mark.gpu),
)
N_SLOTS, MAX_LEN, KV_LEN = 4, 300, 256
SLOTS = (2, 0, N_SLOTS, 1, N_SLOTS, N_SLOTS, 3)  # with padding rows
LENGTHS, AHEAD = (255, 0, 130, 295), (0, 0, 40_000, 2)  # of the slots; positions that they have skipped


def filled_cache(device: str, page: int) -> KVCache:
    cache = KVCache(
        n_layers=1,
        n_slots=N_SLOTS,
        max_len=MAX_LEN,
        kv_heads=1,
        head_dim=16,
        dtype=torch.float32,
        device=device,
        spare=1,
        page_sizes=PageSizes(page, 20) if page else None,
    )
    for slot, length in enumerate(LENGTHS):
        if page:
            cache.pages.reserve(slot, min(length + 40, MAX_LEN))
    cache.lengths[:N_SLOTS] = torch.tensor(LENGTHS, device=device)
    cache.positions[:N_SLOTS] = cache.lengths[:N_SLOTS] + torch.tensor(AHEAD, device=device)
    cache.windows[2] = 50
    return cache


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("page", [0, 64])
@pytest.mark.parametrize(
    ("n_rows", "n_new"),
    [(1, (1, 1, 0, 1, 0, 0, 0)), (13, (13, 3, 0, 1, 0, 0, 5)), (20, (17, 3, 0, 20, 0, 0, 5)), (2, (0,) * 7)],
)
def test_equals_the_view_of_the_cache(device: str, page: int, n_rows: int, n_new: tuple[int, ...]) -> None:
    expected, cache = (filled_cache(device, page) for _ in range(2))
    slots, counts = torch.tensor(SLOTS, device=device), torch.tensor(n_new, device=device)
    frequencies = rotary_frequencies(16, 1e4, device)
    view = expected.view(slots, counts, n_rows, KV_LEN, masked=False)
    expected.advance(slots, counts)
    new = new_rows(cache, slots, counts, n_rows, KV_LEN, frequencies)
    for name in ("row_slots", "row_index", "first", "last"):
        assert_same(getattr(new, name), getattr(view, name), name)
    assert (new.pages is None) == (view.pages is None)
    if new.pages is not None and view.pages is not None:
        assert_same(new.pages, view.pages, "pages")
    assert_close(
        torch.stack((new.cos, new.sin)), torch.stack(rotary_angles(view.positions, frequencies)), 1e-5, "angles"
    )
    assert_same(cache.lengths, expected.lengths, "lengths")
    assert_same(cache.positions, expected.positions, "positions")


def test_no_slots() -> None:
    cache, none = filled_cache("cpu", 0), torch.empty(0, dtype=torch.int64)
    assert new_rows(cache, none, none, 3, KV_LEN, rotary_frequencies(16, 1e4, "cpu")).cos.shape == (0, 3, 8)
