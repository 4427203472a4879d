"""Slot cache of keys and values: where rows are written, which rows a query sees, and moving rows.

Does not contain the meaning of rows, or which session leases a slot.

Schema, one entry per layer, allocated once and not moved while sessions are open (S slots plus one scratch slot):
    k, v       [S + 1, kv_heads, max_len + spare, head_dim]  model dtype; rows 0..length-1 of a slot are valid
    lengths    [S + 1] int64  valid rows; advanced by the caller of `view` with `advance`
    positions  [S + 1] int64  rotary position of the next row; equals lengths unless a slot skips positions
    windows    [S + 1] int64  rows from before a call that its queries still see; max_len = all
Writes of padding go to the scratch slot, so that padding never changes a session's rows. Spare rows are never written:
with one of them no call attends to all rows of the tensor, so that torch.compile needs no separate graph for that case.

With a pool of pages (`PageSizes`), k and v are [n_stored, kv_heads, rows of a page, head_dim], and row r of a slot is
row r % rows of page `pages.table[slot, r // rows]`. Otherwise every slot is a page, and the first axis is the slot.

With one session, all layers can share one scratch slot (`shared_scratch`): a second slot in every layer would double
the session's memory, and its content is never used. The keys of all layers are then consecutive in memory, with the
scratch slot after the last, and so are the values. k and v of one layer have the same strides, but each layer has its
own: torch.compile would compile every layer separately, so this is for layers that Triton kernels run.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from models.layers.kv_pages import PageSizes, PageTable
from models.layers.rotary import rotary_phases, rotate


class CacheView(NamedTuple):
    """Addresses of one call in a cache: T new rows for each of B slots."""

    slots: Tensor  # [B]
    row_slots: Tensor  # [B, T] slot, or page of a pool, that each new row is written to; scratch for padding
    row_index: Tensor  # [B, T] row within that slot or page
    positions: Tensor  # [B, T] rotary positions
    mask: Tensor | None  # [B, T, kv_len] bool, true = visible; None in a view with first and last
    kv_len: int
    first: Tensor | None = None  # [B] oldest visible row
    last: Tensor | None = None  # [B, T] newest visible row of each query
    pages: Tensor | None = None  # [B, n] pages of each slot; None without a pool
    only_slot: int | None = None  # of a call with one slot, whose rows are read as a view; None: they are copied

    def write(self, cache: Tensor, rows: Tensor) -> None:
        """Write rows [B, T, kv_heads, head_dim] to one layer's keys or values, in place."""
        cache[self.row_slots, :, self.row_index] = rows

    def read(self, cache: Tensor) -> Tensor:
        """The first kv_len rows of each slot: [B, kv_heads, kv_len, head_dim]."""
        # `narrow` instead of a slice: a slice makes torch.compile guard on the number of rows.
        if self.pages is not None:
            return joined(cache, self.pages).narrow(2, 0, self.kv_len)
        if self.only_slot is not None:
            return cache.narrow(0, self.only_slot, 1).narrow(2, 0, self.kv_len)
        return cache.narrow(2, 0, self.kv_len).index_select(0, self.slots)


def joined(cache: Tensor, pages: Tensor) -> Tensor:
    """Copies of the rows of pages [B, n]: [B, kv_heads, n * rows of a page, head_dim]."""
    return cache.index_select(0, pages.flatten()).unflatten(0, pages.shape).transpose(1, 2).flatten(2, 3)


class SavedRows(NamedTuple):
    """Copies of a slot's first rows: keys and values [layers, kv_heads, n, head_dim], in memory of their own."""

    keys: Tensor
    values: Tensor

    @property
    def n_rows(self) -> int:
        return self.keys.shape[2]


class KVCache:
    """Keys and values of all slots of one decoder; see the module's schema.

    runs_eager: calls run on a CPU without compiling, so that the host may read index tensors.
    has_windows: slots may have a window, see `windows` in the schema. Kernels over pages read it only then.
    """

    def __init__(
        self,
        *,
        n_layers: int,
        n_slots: int,
        max_len: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        spare: int = 0,
        shared_scratch: bool = False,
        page_sizes: PageSizes | None = None,
        has_windows: bool = False,
    ):
        """
        Args:
            shared_scratch: with one session slot, all layers share one scratch slot; see the module's schema.
            page_sizes: of a pool that the slots share; None: each slot has `max_len` rows of its own.
        """
        self.n_slots, self.max_len, self.scratch = n_slots, max_len, n_slots
        self.pages = PageTable(n_slots, max_len, spare, device, page_sizes)
        self._n_rows = self.pages.table.shape[1] * self.pages.rows
        has_own = not shared_scratch or n_slots > 1 or self.pages.is_pool
        allocate = _own_scratch if has_own else _shared_scratch
        shape = (self.pages.n_stored, kv_heads, self.pages.rows, head_dim)
        self.k, self.v = (allocate(n_layers, shape, dtype=dtype, device=device) for _ in range(2))
        self.lengths = torch.zeros(n_slots + 1, dtype=torch.int64, device=device)
        self.positions = torch.zeros_like(self.lengths)
        self.windows = torch.full_like(self.lengths, max_len)
        self.runs_eager, self.has_windows = False, has_windows
        self._memory: tuple[int, Tensor] | None = None

    def tensors(self) -> list[Tensor]:
        return [*self.k, *self.v, self.lengths, self.positions, self.windows]

    def memory(self) -> Tensor:
        """Where a kernel finds the keys of all layers, then their values, from the first layer's keys on.

        Returns: [2, 2 * layers] int64 on the device: numbers from `k[0]` to each, and the strides of the first axis.
        """
        like, caches = self.k[0], (*self.k, *self.v)
        if self._memory is None or self._memory[0] != like.data_ptr():
            places = [(cache.data_ptr() - like.data_ptr()) // like.element_size() for cache in caches]
            rows = torch.tensor([places, [cache.stride(0) for cache in caches]], device=self.lengths.device)
            self._memory = like.data_ptr(), rows
        return self._memory[1]

    def split_scratch(self) -> None:
        """Give every layer its own scratch slot if they share one. The tensors are new, their content is the same."""
        if not all(tensor.is_contiguous() for tensor in self.k):
            # Layers with contiguous strides are cloned too: a view would keep the memory of all layers.
            self.k = [tensor.clone(memory_format=torch.contiguous_format) for tensor in self.k]
            self.v = [tensor.clone(memory_format=torch.contiguous_format) for tensor in self.v]

    def view(
        self, slots: Tensor, n_new: Tensor, n_rows: int, kv_len: int, causal: bool = True, masked: bool = True
    ) -> CacheView:
        """Addresses for feeding `n_rows` padded rows per slot, `n_new` [B] of them valid.

        Args:
            slots: [B] int64, distinct except for the scratch slot.
            kv_len: cache rows to attend to; static.
            causal: a row sees its slot's earlier rows and the new rows up to itself; otherwise all new rows.
            masked: express visibility as a mask, for PyTorch's attention; otherwise as first and last rows.
        """
        offset = torch.arange(n_rows, device=slots.device)
        valid = offset < n_new[:, None]
        start = self.lengths[slots][:, None]
        index = start + offset
        first = start - self.windows[slots][:, None]
        newest = start + n_new[:, None] - 1
        last = index if causal else newest.expand(-1, n_rows)
        positions = self.positions[slots][:, None] + offset
        row_slots, index = self.places(slots, index.clamp(max=self.max_len - 1), valid)
        pages = self.pages_read(slots, kv_len)
        if not masked:
            first, last = first[:, 0].clamp(min=0), torch.minimum(last, newest)
            return CacheView(slots, row_slots, index, positions, None, kv_len, first, last, pages)
        columns = torch.arange(kv_len, device=slots.device)
        # At least one column stays visible, so that a padding row is finite.
        mask = (columns <= last[:, :, None].clamp(min=0)) & (columns >= first[:, :, None])
        only_slot = int(slots.numpy()[0]) if self.runs_eager and len(slots) == 1 else None
        return CacheView(slots, row_slots, index, positions, mask, kv_len, pages=pages, only_slot=only_slot)

    def places(self, slots: Tensor, index: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """Where rows are written, as `CacheView.row_slots` and `row_index`.

        Args:
            slots: [B].
            index: [B, T] rows within the slots.
            valid: [B, T] bool; others go to scratch.
        """
        if not self.pages.is_pool:
            return torch.where(valid, slots[:, None], self.scratch), index
        own = self.pages.table[slots].gather(1, index // self.pages.rows)
        return torch.where(valid, own, self.pages.scratch), index % self.pages.rows

    def pages_read(self, slots: Tensor, kv_len: int) -> Tensor | None:
        """Pages of the first kv_len rows of `slots` [B], as `CacheView.pages`."""
        return self.pages.table[slots, : -(-kv_len // self.pages.rows)] if self.pages.is_pool else None

    def advance(self, slots: Tensor, n_new: Tensor) -> None:
        """Add n_new [B] to the lengths and positions of `slots` [B]."""
        self.lengths.index_add_(0, slots, n_new)
        self.positions.index_add_(0, slots, n_new)

    def reset(self, slots: Tensor) -> None:
        """Empty `slots` [B] and zero their rows: a masked row is multiplied by a zero weight, and 0 * NaN is NaN."""
        pages = self._stored(slots).flatten()
        for tensor in (*self.k, *self.v):
            tensor.index_fill_(0, pages, 0)
        for tensor in (self.lengths, self.positions):
            tensor.index_fill_(0, slots, 0)
        self.windows.index_fill_(0, slots, self.max_len)

    def wipe(self, slots: Tensor, lengths: Tensor) -> None:
        """Zero the rows of `slots` [B] from `lengths` [B] on, for the reason in `reset`. Counters are not changed."""
        row = torch.arange(self._n_rows, device=slots.device)
        beyond = (row >= lengths[:, None])[:, None, :, None]
        for cache in (*self.k, *self.v):
            self._replace(cache, slots, joined(cache, self._stored(slots)).masked_fill(beyond, 0))

    def set_length(self, slots: Tensor, lengths: Tensor) -> None:
        """Set the lengths of `slots` [B] to `lengths` [B]; positions change by the same difference.

        Rows stay in memory: those beyond the length are invalid until they are written or the length is raised again.
        """
        # Copied, not added: padding repeats the scratch slot, and its difference would be added once per repetition.
        self.positions.index_copy_(0, slots, self.positions[slots] + lengths - self.lengths[slots])
        self.lengths.index_copy_(0, slots, lengths)

    def evict(self, slots: Tensor, keep: Tensor, drop: Tensor, frequencies: Tensor, rotates: bool = True) -> None:
        """Drop rows [keep, keep + drop) of each slot and close the gap; positions decrease by `drop`.

        Args:
            keep, drop: [B] int64; a drop of 0 changes no bit of a slot.
            slots, frequencies, rotates: as for `shift`.
        """
        self.shift(slots, keep + drop, -drop, frequencies, rotates)

    def shift(self, slots: Tensor, first: Tensor, by: Tensor, frequencies: Tensor, rotates: bool = True) -> None:
        """Move rows [first, length) of each slot by `by` rows; lengths and positions change by the same number.

        Moving forward opens a gap of zeros; moving back overwrites earlier rows; rows after the last are zeroed. Moved
        keys are rotated by the difference of their rotary angles, in float32, so that they equal keys computed at their
        new positions. Values are not changed.

        Args:
            slots: [B] int64, distinct.
            first: [B] int64.
            by: [B] int64 of either sign, at least -first; the moved rows must fit the slot; 0 changes no bit.
            frequencies: [head_dim / 2] float32 of the decoder that owns this cache.
            rotates: False moves the keys without rotating them.
        """
        row = torch.arange(self._n_rows, device=slots.device)
        target, end, touched = first + by, self.lengths[slots] + by, (by != 0)[:, None]
        moved = touched & (row >= target[:, None]) & (row < end[:, None])  # [B, L]
        empty = (touched & ~moved & (row >= torch.minimum(first, target)[:, None]))[:, None, :, None]
        source = torch.where(moved, row - by[:, None], row)
        # Rows of a session are in range; the counters of the scratch slot are arbitrary.
        index = source.clamp(0, self.max_len - 1)[:, None, :, None]
        phase = (rotary_phases(row, frequencies) - rotary_phases(source, frequencies))[:, None]  # for all heads
        cos, sin = phase.cos(), phase.sin()
        for cache, is_key in [(k, True) for k in self.k] + [(v, False) for v in self.v]:
            old = joined(cache, self._stored(slots))
            new = old.gather(2, index.expand_as(old))
            new = rotate(new, cos, sin) if is_key and rotates else new
            self._replace(cache, slots, torch.where(moved[:, None, :, None], new, old).masked_fill(empty, 0))
        self.lengths.index_add_(0, slots, by)
        self.positions.index_add_(0, slots, by)

    def move_positions(self, slots: Tensor, first: Tensor, by: Tensor, frequencies: Tensor) -> None:
        """Rotate the keys of rows [first, length) by `by` positions, in place; the next row's position changes too.

        Args:
            slots: [B] int64, distinct.
            first, by: [B] int64.
            frequencies: as for `shift`.
        """
        row = torch.arange(self._n_rows, device=slots.device)
        rotated = ((row >= first[:, None]) & (row < self.lengths[slots][:, None]))[:, None, :, None]
        phase = rotary_phases(by, frequencies)[:, None, None]
        cos, sin = phase.cos(), phase.sin()
        for cache in self.k:
            old = joined(cache, self._stored(slots))
            self._replace(cache, slots, torch.where(rotated, rotate(old, cos, sin), old))
        self.positions.index_add_(0, slots, by)

    def restore_keys(self, slot: int, keys: Tensor, n: int, by: int, frequencies: Tensor) -> None:
        """Write the first n rows of saved keys to a slot's first rows again, rotated by `by` positions."""
        phase = rotary_phases(torch.tensor(by, device=frequencies.device), frequencies)
        cos, sin = phase.cos(), phase.sin()
        for cache, rows in zip(self.k, keys, strict=True):
            self.write_front(cache, slot, rotate(rows[:, :n], cos, sin))

    def save(self, slot: int, n: int) -> SavedRows:
        """A copy of a slot's first n rows."""
        return SavedRows(self.save_keys(slot, n), self._copied(self.v, slot, n))

    def save_keys(self, slot: int, n: int) -> Tensor:
        """A copy of the keys alone, as `SavedRows.keys`."""
        return self._copied(self.k, slot, n)

    def _copied(self, caches: Sequence[Tensor], slot: int, n: int) -> Tensor:
        assert 0 <= n <= self.max_len, f"rows to save: expected at most {self.max_len}, got {n}"
        like = caches[0]
        copied = like.new_empty(len(caches), like.shape[1], n, like.shape[3])
        # Without a pool there is one page, of which only the rows that are asked for are copied.
        pages = self.pages.table[slot : slot + 1, : max(-(-n // self.pages.rows), 1)]
        for to, cache in zip(copied, caches, strict=True):
            page = cache.narrow(2, 0, min(n, self.pages.rows))
            to.copy_(joined(page, pages)[0, :, :n])
        return copied

    def write_front(self, cache: Tensor, slot: int, rows: Tensor) -> None:
        """Write rows [kv_heads, n, head_dim] to the first rows of a slot in one layer's keys or values."""
        target = cache.shape[1], min(rows.shape[1], self.pages.capacity(slot)), cache.shape[3]
        assert target == rows.shape, f"saved rows: expected {target}, got {tuple(rows.shape)}"
        size, (n_whole, n_rest) = self.pages.rows, divmod(rows.shape[1], self.pages.rows)
        if n_whole:
            whole = rows[:, : n_whole * size].unflatten(1, (n_whole, size)).transpose(0, 1)
            cache.index_copy_(0, self.pages.table[slot, :n_whole], whole)
        if n_rest:
            page = self.pages.table[slot, n_whole : n_whole + 1]
            cache.narrow(2, 0, n_rest).index_copy_(0, page, rows[None, :, n_whole * size :])

    def _stored(self, slots: Tensor) -> Tensor:
        """Pages [B, n] of `slots` [B], by the first axis of keys and values."""
        return self.pages.table[slots] if self.pages.is_pool else slots[:, None]

    def _replace(self, cache: Tensor, slots: Tensor, rows: Tensor) -> None:
        """Write all rows [B, kv_heads, L, head_dim] of `slots`."""
        pages = self._stored(slots)
        parts = rows.unflatten(2, (pages.shape[1], self.pages.rows)).transpose(1, 2).flatten(0, 1)
        cache.index_copy_(0, pages.flatten(), parts)

    def load(self, slot: int, saved: SavedRows) -> None:
        """Copy saved rows to a slot's first rows; they become its only valid rows, at positions from 0 on.

        Later rows keep their content.
        """
        self.write_rows(slot, saved)
        self.lengths[slot] = self.positions[slot] = saved.n_rows

    def write_rows(self, slot: int, saved: SavedRows) -> None:
        """Copy saved rows to a slot's first rows; the counters stay."""
        for cache, rows in zip((*self.k, *self.v), (*saved.keys, *saved.values), strict=True):
            self.write_front(cache, slot, rows)


def _own_scratch(n_layers: int, shape: tuple[int, ...], **options: Any) -> list[Tensor]:
    return [torch.zeros(shape, **options) for _ in range(n_layers)]


def _shared_scratch(n_layers: int, shape: tuple[int, ...], **options: Any) -> list[Tensor]:
    """Two slots for each layer: its own, and the last one, which all layers share."""
    slots = torch.zeros(n_layers + 1, *shape[1:], **options)
    return [slots[layer :: n_layers - layer] for layer in range(n_layers)]
