"""Moves rows of a slot cache: closes gaps, and writes saved keys again, in all layers by one kernel each.

They replace dozens of small operations for each layer: `KVCache.evict` without rotation, and `KVCache.restore_keys`.
Requires Triton.
"""

import triton
import triton.language as tl
from torch import Tensor

from models.layers.kv_cache import KVCache

ROWS = 64  # that a program moves at once


@triton.jit
def _close_gaps_kernel(
    memory, table, slots, keep, drop, lengths, first_keys, n_tensors, table_stride,
    HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, PAGE: tl.constexpr,
    IS_POOL: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """One head of the keys or values of one layer of one slot, from the oldest row on."""
    tensor, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    b = tl.program_id(1)
    slot, first, gap = tl.load(slots + b), tl.load(keep + b), tl.load(drop + b)
    end = tl.load(lengths + slot)
    if gap <= 0:
        end = first
    rows = first_keys + tl.multiple_of(tl.load(memory + tensor), ALIGNED) + head * (PAGE * D)
    stride = tl.multiple_of(tl.load(memory + n_tensors + tensor), ALIGNED)
    d = tl.arange(0, BLOCK)[None, :]
    for start in range(first, end, ROWS):
        to = start + tl.arange(0, ROWS)
        source = to + gap
        is_row, is_moved = to < end, source < end
        own, other = slot + tl.zeros((ROWS,), tl.int64), slot + tl.zeros((ROWS,), tl.int64)
        if IS_POOL:
            own = tl.load(table + slot * table_stride + to // PAGE, mask=is_row, other=0)
            other = tl.load(table + slot * table_stride + source // PAGE, mask=is_moved, other=0)
        place = other * stride + (source % PAGE) * D
        values = tl.load(rows + place[:, None] + d, mask=is_moved[:, None] & (d < D), other=0.0)
        tl.debug_barrier()  # all threads have read rows that others overwrite now
        place = own * stride + (to % PAGE) * D
        tl.store(rows + place[:, None] + d, values, mask=is_row[:, None] & (d < D))


@triton.jit(do_not_specialize=["slot", "n", "by"])
def _restore_keys_kernel(
    memory, table, first_keys, keys, frequencies, slot, n, by, keys_layer, keys_head, n_tensors, table_stride,
    HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, PAGE: tl.constexpr,
    IS_POOL: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """A tile of rows of one head of one layer."""
    layer, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    half: tl.constexpr = D // 2
    d = tl.arange(0, BLOCK)[None, :]
    is_row = row < n
    inside = is_row[:, None] & (d < half)
    source = keys + layer * keys_layer + head * keys_head + row.to(tl.int64)[:, None] * D + d
    left = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
    phase = by.to(tl.float32) * tl.load(frequencies + d, mask=d < half, other=0.0)
    c, s = tl.cos(phase), tl.sin(phase)
    own = slot + tl.zeros((ROWS,), tl.int64)
    if IS_POOL:
        own = tl.load(table + slot * table_stride + row // PAGE, mask=is_row, other=0)
    rows = first_keys + tl.multiple_of(tl.load(memory + layer), ALIGNED) + head * (PAGE * D)
    stride = tl.multiple_of(tl.load(memory + n_tensors + layer), ALIGNED)
    place = own * stride + (row % PAGE) * D
    to = rows + place[:, None] + d
    tl.store(to, (left * c - right * s).to(keys.dtype.element_ty), mask=inside)
    tl.store(to + half, (right * c + left * s).to(keys.dtype.element_ty), mask=inside)


def close_gaps(cache: KVCache, slots: Tensor, keep: Tensor, drop: Tensor) -> None:
    """Drop rows [keep, keep + drop) of each slot and close the gap without rotating keys; as `KVCache.evict`.

    Args:
        slots: [B] int64, distinct except for the scratch slot.
        keep, drop: [B] int64; a drop of 0 changes nothing. Of the scratch slot, 0.
    """
    memory, like = cache.memory(), cache.k[0]
    _, heads, _, dim = like.shape
    pages = cache.pages
    if len(slots):
        _close_gaps_kernel[(memory.shape[1] * heads, len(slots))](
            memory, pages.table, slots.contiguous(), keep.contiguous(), drop.contiguous(), cache.lengths, like,
            memory.shape[1], pages.table.stride(0),
            HEADS=heads, D=dim, BLOCK=triton.next_power_of_2(dim), ROWS=ROWS, PAGE=pages.rows, IS_POOL=pages.is_pool,
            ALIGNED=_alignment(cache), num_warps=4,
        )  # fmt: skip
    cache.lengths.index_add_(0, slots, -drop)
    cache.positions.index_add_(0, slots, -drop)


def restore_keys(cache: KVCache, slot: int, keys: Tensor, n: int, by: int, frequencies: Tensor) -> None:
    """Write the first n rows of keys [layers, kv_heads, n or more, head_dim] to a slot's first rows, rotated.

    Args:
        slot, by, frequencies: as for `KVCache.restore_keys`.
    """
    layers, heads, n_saved, dim = keys.shape
    expected = len(cache.k), cache.k[0].shape[1], min(n_saved, cache.pages.capacity(slot)), cache.k[0].shape[3]
    assert (layers, heads, n_saved, dim) == expected and n <= n_saved and keys.stride()[2:] == (dim, 1), (
        f"saved keys: expected {expected} with at least {n} rows, got {tuple(keys.shape)}"
    )
    if not n:
        return
    memory, pages = cache.memory(), cache.pages
    _restore_keys_kernel[(layers * heads, triton.cdiv(n, ROWS))](
        memory, pages.table, cache.k[0], keys, frequencies, slot, n, by, keys.stride(0), keys.stride(1),
        memory.shape[1], pages.table.stride(0),
        HEADS=heads, D=dim, BLOCK=triton.next_power_of_2(dim // 2), ROWS=ROWS, PAGE=pages.rows, IS_POOL=pages.is_pool,
        ALIGNED=_alignment(cache), num_warps=4,
    )  # fmt: skip


def _alignment(cache: KVCache) -> int:
    """Numbers by which all entries of `KVCache.memory` can be divided, at most 16."""
    slot_size = cache.k[0][0].numel()
    return next(size for size in (16, 8, 4, 2, 1) if slot_size % size == 0)
