"""Static key/value buffers in slots: where rows go, which rows a query may see, eviction with rotated keys.

Knows positions and lengths. Does not know what the rows mean, nor which session leases a slot.

Schema, one entry per layer, allocated once and never moved (S slots plus one scratch slot):
    k, v       [S + 1, kv_heads, max_len, head_dim]  model dtype; rows 0..length-1 of a slot are valid
    lengths    [S + 1] int64  valid rows; advanced by whoever feeds rows
    positions  [S + 1] int64  rotary position of the next row; equals lengths unless a slot skips positions
    windows    [S + 1] int64  rows held before a call that its queries still see; max_len = all
The scratch slot takes the writes of padding, so that padding never touches a session's rows.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from models.rotary import rotary_phases, rotate


class CacheView(NamedTuple):
    """One call's addresses into a cache: T new rows for each of B slots."""

    slots: Tensor  # [B]
    row_slots: Tensor  # [B, T] slot each new row is written to; padding goes to the scratch slot
    row_index: Tensor  # [B, T] row inside that slot
    positions: Tensor  # [B, T] rotary positions
    mask: Tensor  # [B, T, kv_len] bool, true = may look
    kv_len: int

    def write(self, cache: Tensor, rows: Tensor) -> None:
        """Put rows [B, T, kv_heads, head_dim] into one layer's keys or values, in place."""
        cache[self.row_slots, :, self.row_index] = rows

    def read(self, cache: Tensor) -> Tensor:
        """The first kv_len rows of each slot. Returns: [B, kv_heads, kv_len, head_dim]."""
        return cache[:, :, : self.kv_len].index_select(0, self.slots)


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
    ):
        self.n_slots, self.max_len, self.scratch = n_slots, max_len, n_slots
        shape = (n_slots + 1, kv_heads, max_len, head_dim)
        self.k = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(n_layers)]
        self.v = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(n_layers)]
        self.lengths = torch.zeros(n_slots + 1, dtype=torch.int64, device=device)
        self.positions = torch.zeros_like(self.lengths)
        self.windows = torch.full_like(self.lengths, max_len)

    def tensors(self) -> list[Tensor]:
        return [*self.k, *self.v, self.lengths, self.positions, self.windows]

    def view(self, slots: Tensor, n_new: Tensor, n_rows: int, kv_len: int, causal: bool = True) -> CacheView:
        """Addresses for feeding `n_rows` padded rows per slot, `n_new` of them valid.

        A row sees what its slot holds and, if `causal`, the new rows up to itself, else all new ones.
        """
        offset = torch.arange(n_rows, device=slots.device)
        valid = offset < n_new[:, None]
        start = self.lengths[slots][:, None]
        index = start + offset
        row_slots = torch.where(valid, slots[:, None], self.scratch)
        columns = torch.arange(kv_len, device=slots.device)
        first = (self.lengths[slots] - self.windows[slots])[:, None, None]
        last = index if causal else (start + n_new[:, None] - 1).expand(-1, n_rows)
        # At least one column stays visible, so that a row of padding is finite; nobody reads it.
        mask = (columns <= last[:, :, None].clamp(min=0)) & (columns >= first)
        positions = self.positions[slots][:, None] + offset
        return CacheView(slots, row_slots, index.clamp(max=self.max_len - 1), positions, mask, kv_len)

    def advance(self, slots: Tensor, n_new: Tensor) -> None:
        """Count n_new [B] more rows in `slots` [B]."""
        self.lengths.index_add_(0, slots, n_new)
        self.positions.index_add_(0, slots, n_new)

    def reset(self, slots: Tensor) -> None:
        """Empty `slots` [B]. Rows are zeroed too: a masked row still meets a zero weight, and 0 * NaN is NaN."""
        for tensor in (*self.k, *self.v, self.lengths, self.positions):
            tensor.index_fill_(0, slots, 0)
        self.windows.index_fill_(0, slots, self.max_len)

    def evict(self, slots: Tensor, keep: Tensor, drop: Tensor, frequencies: Tensor, turn: bool = True) -> None:
        """Drop rows [keep, keep + drop) of each slot and close the gap; positions go back by `drop` too.

        Keys behind the gap are turned by the difference of their rotary angles, in float32, so that they
        equal keys computed at their new positions; values stay as they are.

        Args:
            slots: [B] distinct. keep, drop: [B] int64; drop 0 leaves a slot bit for bit as it was.
            frequencies: [head_dim / 2] float32 of the decoder that owns this cache.
            turn: False leaves the keys as they are.
        """
        row = torch.arange(self.max_len, device=slots.device)
        moved = (row >= keep[:, None]) & (drop[:, None] > 0)  # [B, L]
        source = torch.where(moved, row + drop[:, None], row)
        gone = (moved & (row >= (self.lengths[slots] - drop)[:, None]))[:, None, :, None]
        index = source.clamp(max=self.max_len - 1)[:, None, :, None]
        phase = (rotary_phases(row, frequencies) - rotary_phases(source, frequencies))[:, None]  # for all heads
        cos, sin = phase.cos(), phase.sin()
        for cache, is_key in [(k, True) for k in self.k] + [(v, False) for v in self.v]:
            old = cache.index_select(0, slots)
            new = old.gather(2, index.expand_as(old))
            new = rotate(new, cos, sin) if is_key and turn else new
            cache.index_copy_(0, slots, torch.where(moved[:, None, :, None], new, old).masked_fill(gone, 0))
        self.lengths.index_add_(0, slots, -drop)
        self.positions.index_add_(0, slots, -drop)
