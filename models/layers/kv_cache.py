"""Static key/value buffers in slots: where rows go, which rows a query may see, moving rows with their keys turned.

Knows positions and lengths. Does not know what the rows mean, nor which session leases a slot.

Schema, one entry per layer, allocated once and not moved while there are sessions (S slots plus one scratch slot):
    k, v       [S + 1, kv_heads, max_len + spare, head_dim]  model dtype; rows 0..length-1 of a slot are valid
    lengths    [S + 1] int64  valid rows; advanced by whoever feeds rows
    positions  [S + 1] int64  rotary position of the next row; equals lengths unless a slot skips positions
    windows    [S + 1] int64  rows held before a call that its queries still see; max_len = all
The scratch slot takes the writes of padding, so that padding never touches a session's rows. Spare rows take nothing:
with one of them no call ever looks at all rows there are, and all numbers of rows are one case to a compiler.

One scratch slot for all layers where there is one session (`one_scratch`): a second slot in every layer would double
what the session takes, and nothing that counts is read from it. The keys of all layers lie one behind the other, their
scratch slot behind the last, and so do the values. k and v of a layer then have one stride, each layer has another:
layers that compile would compile once for each, so this is for layers that kernels run.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from models.layers.rotary import rotary_phases, rotate


class CacheView(NamedTuple):
    """One call's addresses into a cache: T new rows for each of B slots."""

    slots: Tensor  # [B]
    row_slots: Tensor  # [B, T] slot each new row is written to; padding goes to the scratch slot
    row_index: Tensor  # [B, T] row inside that slot
    positions: Tensor  # [B, T] rotary positions
    mask: Tensor | None  # [B, T, kv_len] bool, true = may look; None where kernels go by first and last
    kv_len: int
    first: Tensor | None = None  # [B] oldest row that queries see
    last: Tensor | None = None  # [B, T] newest row that each query sees

    def write(self, cache: Tensor, rows: Tensor) -> None:
        """Put rows [B, T, kv_heads, head_dim] into one layer's keys or values, in place."""
        cache[self.row_slots, :, self.row_index] = rows

    def read(self, cache: Tensor) -> Tensor:
        """The first kv_len rows of each slot. Returns: [B, kv_heads, kv_len, head_dim]."""
        # Not a slice, which asks a compiler whether there are as many rows.
        return cache.narrow(2, 0, self.kv_len).index_select(0, self.slots)


class KVCache:
    """All slots' keys and values of one decoder; see the module's schema."""

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
        one_scratch: bool = False,
    ):
        """one_scratch: let layers share their scratch slot if there is just one other; see the module's schema."""
        self.n_slots, self.max_len, self.scratch = n_slots, max_len, n_slots
        self._n_rows = max_len + spare
        allocate = _one_scratch if one_scratch and n_slots == 1 else _own_scratch
        shape = (n_slots + 1, kv_heads, self._n_rows, head_dim)
        self.k, self.v = (allocate(n_layers, shape, dtype=dtype, device=device) for _ in range(2))
        self.lengths = torch.zeros(n_slots + 1, dtype=torch.int64, device=device)
        self.positions = torch.zeros_like(self.lengths)
        self.windows = torch.full_like(self.lengths, max_len)

    def tensors(self) -> list[Tensor]:
        return [*self.k, *self.v, self.lengths, self.positions, self.windows]

    def split_scratch(self) -> None:
        """Give every layer a scratch slot of its own, where they share one; what slots hold stays. Tensors are new."""
        if not all(tensor.is_contiguous() for tensor in self.k):
            # Clones even of a layer that has the strides already: it would keep the memory of all.
            self.k = [tensor.clone(memory_format=torch.contiguous_format) for tensor in self.k]
            self.v = [tensor.clone(memory_format=torch.contiguous_format) for tensor in self.v]

    def view(
        self, slots: Tensor, n_new: Tensor, n_rows: int, kv_len: int, causal: bool = True, masked: bool = True
    ) -> CacheView:
        """Addresses for feeding `n_rows` padded rows per slot, `n_new` of them valid.

        A row sees what its slot holds and, if `causal`, the new rows up to itself, else all new ones. masked: say so by
        a mask, as PyTorch's attention takes it; otherwise by the first and the last row.
        """
        offset = torch.arange(n_rows, device=slots.device)
        valid = offset < n_new[:, None]
        start = self.lengths[slots][:, None]
        index = start + offset
        row_slots = torch.where(valid, slots[:, None], self.scratch)
        first = start - self.windows[slots][:, None]
        newest = start + n_new[:, None] - 1
        last = index if causal else newest.expand(-1, n_rows)
        positions = self.positions[slots][:, None] + offset
        index = index.clamp(max=self.max_len - 1)
        if not masked:
            first, last = first[:, 0].clamp(min=0), torch.minimum(last, newest)
            return CacheView(slots, row_slots, index, positions, None, kv_len, first, last)
        columns = torch.arange(kv_len, device=slots.device)
        # At least one column stays visible, so that a row of padding is finite; nobody reads it.
        mask = (columns <= last[:, :, None].clamp(min=0)) & (columns >= first[:, :, None])
        return CacheView(slots, row_slots, index, positions, mask, kv_len)

    def advance(self, slots: Tensor, n_new: Tensor) -> None:
        """Count n_new [B] more rows in `slots` [B]."""
        self.lengths.index_add_(0, slots, n_new)
        self.positions.index_add_(0, slots, n_new)

    def reset(self, slots: Tensor) -> None:
        """Empty `slots` [B]. Rows are zeroed too: a masked row still meets a zero weight, and 0 * NaN is NaN."""
        for tensor in (*self.k, *self.v, self.lengths, self.positions):
            tensor.index_fill_(0, slots, 0)
        self.windows.index_fill_(0, slots, self.max_len)

    def wipe(self, slots: Tensor, lengths: Tensor) -> None:
        """Zero the rows at and beyond `lengths` [B] of `slots` [B]; `reset` says why. Counts stay as they are."""
        row = torch.arange(self._n_rows, device=slots.device)
        beyond = (row >= lengths[:, None])[:, None, :, None]
        for cache in (*self.k, *self.v):
            cache.index_copy_(0, slots, cache.index_select(0, slots).masked_fill(beyond, 0))

    def set_length(self, slots: Tensor, lengths: Tensor) -> None:
        """Let `slots` [B] hold `lengths` [B] rows; positions move by the same difference.

        Rows stay in place: those beyond are forgotten until they are fed again or the length goes back up.
        """
        # Set, not added: padding repeats the scratch slot, and its difference would be added every time.
        self.positions.index_copy_(0, slots, self.positions[slots] + lengths - self.lengths[slots])
        self.lengths.index_copy_(0, slots, lengths)

    def evict(self, slots: Tensor, keep: Tensor, drop: Tensor, frequencies: Tensor, turn: bool = True) -> None:
        """Drop rows [keep, keep + drop) of each slot and close the gap; positions go back by `drop` too.

        Args:
            keep, drop: [B] int64; drop 0 leaves a slot bit for bit as it was.
            slots, frequencies, turn: as `shift` takes them.
        """
        self.shift(slots, keep + drop, -drop, frequencies, turn)

    def shift(self, slots: Tensor, first: Tensor, by: Tensor, frequencies: Tensor, turn: bool = True) -> None:
        """Move rows [first, length) of each slot by `by` rows; lengths and positions go along.

        Moving forward opens a gap of zeros, moving back overwrites what is in front; behind the last row are zeros.
        Keys that move are turned by the difference of their rotary angles, in float32, so that they equal keys
        computed at their new positions; values stay as they are.

        Args:
            slots: [B] distinct. first: [B] int64. by: [B] int64 of either sign, at least -first; the moved rows must
                fit the slot; 0 leaves it bit for bit as it was.
            frequencies: [head_dim / 2] float32 of the decoder that owns this cache.
            turn: False leaves the keys as they are.
        """
        row = torch.arange(self._n_rows, device=slots.device)
        target, end, touched = first + by, self.lengths[slots] + by, (by != 0)[:, None]
        moved = touched & (row >= target[:, None]) & (row < end[:, None])  # [B, L]
        empty = (touched & ~moved & (row >= torch.minimum(first, target)[:, None]))[:, None, :, None]
        source = torch.where(moved, row - by[:, None], row)
        # Rows of a session lie inside; the scratch slot's counts mean nothing.
        index = source.clamp(0, self.max_len - 1)[:, None, :, None]
        phase = (rotary_phases(row, frequencies) - rotary_phases(source, frequencies))[:, None]  # for all heads
        cos, sin = phase.cos(), phase.sin()
        for cache, is_key in [(k, True) for k in self.k] + [(v, False) for v in self.v]:
            old = cache.index_select(0, slots)
            new = old.gather(2, index.expand_as(old))
            new = rotate(new, cos, sin) if is_key and turn else new
            cache.index_copy_(0, slots, torch.where(moved[:, None, :, None], new, old).masked_fill(empty, 0))
        self.lengths.index_add_(0, slots, by)
        self.positions.index_add_(0, slots, by)

    def turn(self, slots: Tensor, first: Tensor, by: Tensor, frequencies: Tensor) -> None:
        """Move rows [first, length) of each slot by `by` positions, keeping their places; the next row's goes along.

        Args: slots: [B] distinct. first, by: [B] int64. frequencies: as in `shift`.
        """
        row = torch.arange(self._n_rows, device=slots.device)
        turned = ((row >= first[:, None]) & (row < self.lengths[slots][:, None]))[:, None, :, None]
        phase = rotary_phases(by, frequencies)[:, None, None]
        cos, sin = phase.cos(), phase.sin()
        for cache in self.k:
            old = cache.index_select(0, slots)
            cache.index_copy_(0, slots, torch.where(turned, rotate(old, cos, sin), old))
        self.positions.index_add_(0, slots, by)

    def put_keys(self, slot: int, keys: list[Tensor], n: int, by: int, frequencies: Tensor) -> None:
        """Write the first n rows that `save_keys` gave to a slot's front again, `by` positions from where they were."""
        phase = rotary_phases(torch.tensor(by, device=frequencies.device), frequencies)
        cos, sin = phase.cos(), phase.sin()
        for cache, rows in zip(self.k, keys, strict=True):
            cache[slot, :, :n] = rotate(rows[:, :n], cos, sin)

    def save(self, slot: int, n: int) -> list[Tensor]:
        """Copies of a slot's first n rows: keys of every layer, then values, [kv_heads, n, head_dim] each."""
        return self._copied((*self.k, *self.v), slot, n)

    def save_keys(self, slot: int, n: int) -> list[Tensor]:
        """The first half of what `save` gives."""
        return self._copied(self.k, slot, n)

    def _copied(self, caches: Iterable[Tensor], slot: int, n: int) -> list[Tensor]:
        assert 0 <= n <= self.max_len, f"rows to save: expected at most {self.max_len}, got {n}"
        return [cache[slot, :, :n].clone() for cache in caches]

    def load(self, slot: int, saved: list[Tensor]) -> None:
        """Copy rows that `save` gave to a slot's front, which then has just these, at positions from 0 on.

        Nothing else is touched: rows beyond keep what they hold.
        """
        n = saved[0].shape[1]
        for cache, rows in zip((*self.k, *self.v), saved, strict=True):
            front = cache[slot, :, :n]
            assert front.shape == rows.shape, f"saved rows: expected {tuple(front.shape)}, got {tuple(rows.shape)}"
            front.copy_(rows)
        self.lengths[slot] = self.positions[slot] = n


def _own_scratch(n_layers: int, shape: tuple[int, ...], **options: Any) -> list[Tensor]:
    return [torch.zeros(shape, **options) for _ in range(n_layers)]


def _one_scratch(n_layers: int, shape: tuple[int, ...], **options: Any) -> list[Tensor]:
    """Two slots for each layer: its own, and the last one of all."""
    slots = torch.zeros(n_layers + 1, *shape[1:], **options)
    return [slots[layer :: n_layers - layer] for layer in range(n_layers)]
