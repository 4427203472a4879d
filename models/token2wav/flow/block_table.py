"""Block tables of sessions and voices over one pool of key/value rows.

Contains row ownership, row addresses and trimming. Does not contain heads, layers or the key/value tensors
(`[..., n_rows, heads, head_dim]`), which belong to `flow_state`. All layers and Euler steps of one part share one row
numbering.

The table of a slot lists the rows that the slot attends to, in the order that the trimming rules use. A voice has a
slot too. A session that starts a turn copies the table of its voice, so all sessions read the prompt's rows and no
session writes them. Rows never move. A row that no table lists is free. New rows go to free rows of the slot's ring.

A session has two slots that share one ring: a call reads the first and writes the second. New rows avoid the rows that
the first slot lists, so a failed call loses nothing.

Schema (S sessions, one scratch slot, V voices; n = 2 S + 1 + V slots in this order; slots s and S + s belong to one
session; allocated once):
    rows    [n, width] int64  row numbers in the pool; only the first `length` entries are valid
    length  [n] int64         rows that the slot attends to; advanced by `commit`
    start   [n] int64         first row of the slot's ring
Pool (n_rows rows in this order):
    ZERO_ROW                  never written; masked columns read it
    SPILL_ROW                 receives the writes of padding
    S rings of `ring` rows    the rows that a session may write; a circular region of the pool
    one ring of `ring` rows   the rows of the scratch slot
    n_voice_rows rows         the rows of all voices
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

ZERO_ROW = 0  # always zero, because a masked column still multiplies: 0 * NaN is NaN
SPILL_ROW = 1  # receives the writes of padding
FIRST_ROW = 2

HISTORY_FRAMES = 100  # mel frames of a turn that later chunks attend to, in addition to the prompt

# How a table that is longer than prompt + history is cut:
#   windowed      in order of age: keeps the prompt and the newest rows
#   newest_first  newest chunk first: keeps as many of the newest rows as the prompt has, and the prompt's last rows
#   doubled       in order of age: the list of rows is repeated twice, cut and halved; it stays constant after the cut
Trim = Literal["windowed", "newest_first", "doubled"]


class SlotMapping(NamedTuple):
    """Row addresses of one call: the rows that B slots attend to and the rows that receive their T new keys."""

    slots: Tensor  # [B]
    cached: Tensor  # [B, width] rows written before the call; ZERO_ROW beyond n_cached
    n_cached: Tensor  # [B]
    fresh: Tensor  # [B, T] rows that receive the new keys and values; SPILL_ROW beyond n_new
    n_new: Tensor  # [B]

    @property
    def mask(self) -> Tensor:
        """[B, width + T] bool: true for valid columns, the cached keys before the new ones."""
        cached = _columns(self.cached) < self.n_cached[:, None]
        fresh = _columns(self.fresh) < self.n_new[:, None]
        return torch.cat((cached, fresh), dim=1)


class BlockTable:
    """The tables of all slots over one pool of rows; see the schema at the head of the module."""

    def __init__(
        self, *, n_sessions: int, n_voices: int, ring: int, width: int, n_voice_rows: int, device: torch.device | str
    ):
        """
        Args:
            ring: rows that one session may write.
            width: length of the longest table.
            n_voice_rows: rows of all voices together.
        """
        n_slots = 2 * n_sessions + 1 + n_voices
        self.ring, self.width, self.scratch = ring, width, 2 * n_sessions
        self._scratch_row = FIRST_ROW + n_sessions * ring
        self.rows = torch.full((n_slots, width), ZERO_ROW, dtype=torch.int64, device=device)
        self.length = torch.zeros(n_slots, dtype=torch.int64, device=device)
        self.start = torch.full((n_slots,), FIRST_ROW, dtype=torch.int64, device=device)
        self.first_voice_row = self._scratch_row + ring
        self.n_rows = self.first_voice_row + n_voice_rows
        self.start[: self.scratch] = FIRST_ROW + ring * torch.arange(n_sessions, device=device).repeat(2)
        self.start[self.scratch] = self._scratch_row

    def empty_scratch(self) -> None:
        """Empty the scratch slot and restore its ring, which the example call of region `voice` moves."""
        self.length[self.scratch] = 0
        self.start[self.scratch] = self._scratch_row

    def tensors(self) -> list[Tensor]:
        return [self.rows, self.length, self.start]

    def slot_mapping(
        self, slots: Tensor, n_new: Tensor, n_rows: int, width: int, ring: int | None = None
    ) -> SlotMapping:
        """Row addresses of one call with `n_rows` new rows per slot, padding included.

        Args:
            slots: [B] int64.
            n_new: [B] int64 valid new rows of `n_rows`.
            width: cached columns to attend to, at least the length of every slot (static).
            ring: rows of the slots' rings; None = the ring of a session.
        """
        rows, n_cached = self.rows[slots], self.length[slots]
        listed = _columns(rows) < n_cached[:, None]
        ring = ring or self.ring
        # A row of the ring is taken if the table lists it. The free rows come first, each group in order.
        place = torch.where(listed, rows - self.start[slots][:, None], -1)
        place = torch.where((place >= 0) & (place < ring), place, ring)
        taken = torch.zeros(len(slots), ring + 1, dtype=torch.int64, device=slots.device)
        taken = taken.scatter(1, place, 1)[:, :ring]
        row = torch.arange(ring, device=slots.device)
        n_taken = taken.cumsum(1)
        rank = torch.where(taken == 0, row - n_taken, ring - n_taken[:, -1:] + n_taken - 1)
        free = torch.empty_like(rank).scatter(1, rank, row.expand_as(rank))[:, :n_rows]
        valid = torch.arange(n_rows, device=slots.device) < n_new[:, None]
        fresh = torch.where(valid, self.start[slots][:, None] + free, SPILL_ROW)
        # Contiguous at any width, so that one compiled graph serves every width.
        cached = torch.where(listed, rows, ZERO_ROW)[:, :width].contiguous()
        return SlotMapping(slots, cached, n_cached, fresh, n_new)

    def commit(self, mapping: SlotMapping, targets: Tensor, n_prompt: Tensor, n_history: int, trim: Trim) -> None:
        """Append the new rows of `mapping` to the tables of its slots, trim them and write them to `targets`.

        Args:
            mapping: addresses from `slot_mapping`.
            targets: [B] the slots of `mapping`, or the other slots of the same sessions.
            n_prompt: [B] rows of the prompt.
            n_history: rows of the turn that are kept in addition to the prompt.
            trim: how a table that is too long is cut.
        """
        n_all = mapping.n_cached + mapping.n_new
        column = torch.arange(self.width, device=n_prompt.device).expand(len(n_prompt), -1)
        n_prompt, n_all = n_prompt[:, None], n_all[:, None]
        most = n_prompt + n_history
        if trim == "doubled":
            source = torch.where(column < 2 * n_prompt, column, 2 * (n_all - most) + column) % n_all.clamp(min=1)
        else:
            source = torch.where(column < n_prompt, column, n_all - most + column)
        source = torch.where(n_all > most, source, column)
        # `source` counts in the order of the rule. Convert it to a column of [rows | fresh].
        n_cached, n_new = mapping.n_cached[:, None], mapping.n_new[:, None]
        if trim == "newest_first":
            column_of = torch.where(source < n_new, self.width + source, source - n_new)
        else:
            column_of = torch.where(source < n_cached, source, self.width + source - n_cached)
        both = torch.cat((self.rows[mapping.slots], mapping.fresh), dim=1)
        length = torch.minimum(n_all, most)
        rows = both.gather(1, column_of.clamp(0, both.shape[1] - 1))
        self.rows.index_copy_(0, targets, torch.where(column < length, rows, ZERO_ROW))
        self.length.index_copy_(0, targets, length[:, 0])

    def copy(self, slots: Tensor, sources: Tensor) -> None:
        """Copy the tables of `sources` [B] to `slots` [B]. The rings of `slots` do not change."""
        self.rows.index_copy_(0, slots, self.rows[sources])
        self.length.index_copy_(0, slots, self.length[sources])


def _columns(table: Tensor) -> Tensor:
    return torch.arange(table.shape[1], device=table.device)
