"""Adds new rows to the lengths of a slot cache, and computes their places, visible rows and angles, in one kernel.

It replaces about twenty small operations: `KVCache.view`, `rotary_angles` and `KVCache.advance`. Requires Triton.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from models.kernels.launch import launch_options
from models.layers.kv_cache import KVCache
from models.layers.rotary import rotary_angles

MAX_NEW_ROWS = 16  # of a slot, which one program handles at once; with more, the small operations run


class NewRows(NamedTuple):
    """Addresses of T new rows for each of B slots.

    row_slots, row_index: [B, T] int64 as in `CacheView`. first: [B], last: [B, T] int64, oldest and newest visible row.
    cos, sin: [B, T, head_dim / 2] float32. pages: as in `CacheView`.
    """

    row_slots: Tensor
    row_index: Tensor
    first: Tensor
    last: Tensor
    cos: Tensor
    sin: Tensor
    pages: Tensor | None


@triton.jit(do_not_specialize=["T", "scratch", "max_len"])
def _new_rows_kernel(
    slots, n_new, lengths, positions, windows, table, frequencies, row_slots, row_index, first, last, cos, sin,
    T, scratch, max_len, table_stride,
    HALF: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, PAGE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """All rows of one slot. PAGE: rows of a page of the pool; 0 = no pool."""
    b = tl.program_id(0)
    d = tl.arange(0, BLOCK)
    angle = tl.load(frequencies + d, mask=d < HALF, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    slot, count = tl.load(slots + b), tl.load(n_new + b)
    start, position = tl.load(lengths + slot), tl.load(positions + slot)
    tl.store(first + b, tl.maximum(start - tl.load(windows + slot), 0))
    t = tl.arange(0, ROWS)
    is_row = t < T
    index = start + t
    tl.store(last + b * T + t, tl.minimum(index, start + count - 1), mask=is_row)
    place = tl.minimum(index, max_len - 1)
    own = tl.zeros((ROWS,), tl.int64) + slot
    if PAGE > 0:
        own = tl.load(table + slot * table_stride + place // PAGE, mask=is_row, other=0)
        place = place % PAGE
    tl.store(row_slots + b * T + t, tl.where(t < count, own, scratch), mask=is_row)
    tl.store(row_index + b * T + t, place, mask=is_row)
    phase = (position + t).to(tl.float32)[:, None] * angle[None, :]
    to = (b * T + t)[:, None] * HALF + d[None, :]
    inside = is_row[:, None] & (d < HALF)[None, :]
    tl.store(cos + to, tl.cos(phase), mask=inside)
    tl.store(sin + to, tl.sin(phase), mask=inside)
    tl.debug_barrier()  # all threads have read the length
    tl.atomic_add(lengths + slot, count, sem="relaxed")
    tl.atomic_add(positions + slot, count, sem="relaxed")


def new_rows(cache: KVCache, slots: Tensor, n_new: Tensor, n_rows: int, kv_len: int, frequencies: Tensor) -> NewRows:
    """Advance the cache by n_new rows of each slot, of `n_rows` padded ones, and return their addresses.

    Args:
        slots, n_new: [B] int64 as for `KVCache.view`.
        kv_len: cache rows to attend to; static.
        frequencies: [head_dim / 2] float32.
    """
    B, half = len(slots), len(frequencies)
    if n_rows > MAX_NEW_ROWS:
        view = cache.view(slots, n_new, n_rows, kv_len, masked=False)
        assert view.first is not None and view.last is not None, "view: expected first and last rows, got a mask"
        cos, sin = rotary_angles(view.positions, frequencies)
        cache.advance(slots, n_new)
        return NewRows(view.row_slots, view.row_index, view.first, view.last, cos, sin, view.pages)

    def empty(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=slots.device)

    rows = NewRows(
        row_slots=empty(B, n_rows),
        row_index=empty(B, n_rows),
        first=empty(B),
        last=empty(B, n_rows),
        cos=empty(B, n_rows, half, dtype=torch.float32),
        sin=empty(B, n_rows, half, dtype=torch.float32),
        pages=cache.pages_read(slots, kv_len),
    )
    if not B:
        return rows
    pages = cache.pages
    _new_rows_kernel[(B,)](
        slots.contiguous(), n_new.contiguous(), cache.lengths, cache.positions, cache.windows, pages.table, frequencies,
        rows.row_slots, rows.row_index, rows.first, rows.last, rows.cos, rows.sin,
        n_rows, pages.scratch, cache.max_len, pages.table.stride(0),
        HALF=half, BLOCK=triton.next_power_of_2(half), ROWS=triton.next_power_of_2(n_rows),
        PAGE=pages.rows if pages.is_pool else 0, num_warps=1, **launch_options(slots.device),
    )  # fmt: skip
    return rows
