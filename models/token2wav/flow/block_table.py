"""Key/value rows of sessions and voices in one pool: who owns which row, which rows a chunk sees, what is forgotten.

Knows row numbers, lengths and trimming rules. Does not know heads, layers or what a row holds: the tensors that hold
keys and values (`[..., n_rows, heads, head_dim]`) belong to `flow_state`, and all layers and Euler steps of a part
share one numbering.

A slot's *view* is the list of rows it sees, in the order that the trimming rules speak of. A voice is a slot too: a
session that starts a turn copies the voice's view, so the prompt's rows are read by everyone and written by nobody.
Rows never move; a row outside the view is free, and new rows go to the free rows of the slot's own ring.

A session has two slots that share a ring: it stands in one, and a call leaves what comes next in the other. New rows
avoid what the first one sees, so a call that fails can be forgotten: nothing that it read is gone.

Schema (S sessions, the scratch slot, V voice slots; n = 2 S + 1 + V in this order, slots s and S + s being of one
session; allocated once):
    view    [n, width] int64  row numbers; only the first `length` count
    length  [n] int64         rows seen; advanced by `commit`
    start   [n] int64         first row of the slot's ring
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

ZERO_ROW = 0  # never written: what a masked column reads, since 0 * NaN is NaN
SPILL_ROW = 1  # takes the writes of padding
FIRST_ROW = 2

HISTORY_FRAMES = 100  # mel frames of a turn that later chunks still see, beside the prompt

# How a view is cut once it is longer than prompt + history:
#   windowed      oldest first: the prompt and the newest rows stay
#   newest_first  newest chunk first: the newest rows, as many as the prompt has, and the prompt's last ones stay
#   doubled       oldest first, cut as if the view were written twice in a row, then halved: freezes after the cut
Trim = Literal["windowed", "newest_first", "doubled"]


class SlotMapping(NamedTuple):
    """One call's addresses: what B slots see and where their T new rows go."""

    slots: Tensor  # [B]
    cached: Tensor  # [B, width] rows held before the call; ZERO_ROW beyond n_cached
    n_cached: Tensor  # [B]
    fresh: Tensor  # [B, T] rows the new keys go to; SPILL_ROW beyond n_new
    n_new: Tensor  # [B]

    @property
    def mask(self) -> Tensor:
        """[B, width + T] bool: columns of the cached and then the new keys that exist."""
        cached = _columns(self.cached) < self.n_cached[:, None]
        fresh = _columns(self.fresh) < self.n_new[:, None]
        return torch.cat((cached, fresh), dim=1)


class BlockTable:
    """The views of all slots over one pool of rows; see the module's schema."""

    def __init__(
        self, *, n_sessions: int, n_voices: int, ring: int, width: int, n_voice_rows: int, device: torch.device | str
    ):
        """ring: rows a session may hold of its own. width: the longest view. n_voice_rows: of all voices together."""
        n_slots = 2 * n_sessions + 1 + n_voices
        self.ring, self.width, self.scratch = ring, width, 2 * n_sessions
        self._scratch_row = FIRST_ROW + n_sessions * ring
        self.view = torch.full((n_slots, width), ZERO_ROW, dtype=torch.int64, device=device)
        self.length = torch.zeros(n_slots, dtype=torch.int64, device=device)
        self.start = torch.full((n_slots,), FIRST_ROW, dtype=torch.int64, device=device)
        self.first_voice_row = self._scratch_row + ring
        self.n_rows = self.first_voice_row + n_voice_rows
        self.start[: self.scratch] = FIRST_ROW + ring * torch.arange(n_sessions, device=device).repeat(2)
        self.start[self.scratch] = self._scratch_row

    def empty_scratch(self) -> None:
        """Give the scratch slot its own ring again, with nothing in it; a voice's example moves it."""
        self.length[self.scratch] = 0
        self.start[self.scratch] = self._scratch_row

    def tensors(self) -> list[Tensor]:
        return [self.view, self.length, self.start]

    def plan(self, slots: Tensor, n_new: Tensor, n_rows: int, width: int, ring: int | None = None) -> SlotMapping:
        """Addresses for `n_rows` padded new rows per slot, `n_new` [B] of them valid.

        Args:
            width: cached columns to look at, at least every slot's length (static).
            ring: rows of the slots' own rings; None = that of a session.
        """
        view, n_cached = self.view[slots], self.length[slots]
        held = _columns(view) < n_cached[:, None]
        ring = ring or self.ring
        # A row of the own ring is taken if the view names it; the free ones are listed first, each kind in order.
        place = torch.where(held, view - self.start[slots][:, None], -1)
        place = torch.where((place >= 0) & (place < ring), place, ring)
        taken = torch.zeros(len(slots), ring + 1, dtype=torch.int64, device=slots.device)
        taken = taken.scatter(1, place, 1)[:, :ring]
        row = torch.arange(ring, device=slots.device)
        n_taken = taken.cumsum(1)
        rank = torch.where(taken == 0, row - n_taken, ring - n_taken[:, -1:] + n_taken - 1)
        free = torch.empty_like(rank).scatter(1, rank, row.expand_as(rank))[:, :n_rows]
        valid = torch.arange(n_rows, device=slots.device) < n_new[:, None]
        fresh = torch.where(valid, self.start[slots][:, None] + free, SPILL_ROW)
        # Contiguous at any width, so that one compiled graph serves all.
        cached = torch.where(held, view, ZERO_ROW)[:, :width].contiguous()
        return SlotMapping(slots, cached, n_cached, fresh, n_new)

    def commit(self, plan: SlotMapping, targets: Tensor, head: Tensor, tail: int, trim: Trim) -> None:
        """Add the plan's new rows to what its slots see, cut what is too long, and let `targets` see that.

        Args:
            targets: [B] the plan's slots, or the others of their sessions.
            head: [B] rows of the prompt. tail: rows of the turn that stay beside it.
        """
        n_all = plan.n_cached + plan.n_new
        column = torch.arange(self.width, device=head.device).expand(len(head), -1)
        head, n_all = head[:, None], n_all[:, None]
        most = head + tail
        if trim == "doubled":
            source = torch.where(column < 2 * head, column, 2 * (n_all - most) + column) % n_all.clamp(min=1)
        else:
            source = torch.where(column < head, column, n_all - most + column)
        source = torch.where(n_all > most, source, column)
        # `source` counts in the order of the rule; turn it into a column of [view | fresh].
        n_cached, n_new = plan.n_cached[:, None], plan.n_new[:, None]
        if trim == "newest_first":
            column_of = torch.where(source < n_new, self.width + source, source - n_new)
        else:
            column_of = torch.where(source < n_cached, source, self.width + source - n_cached)
        both = torch.cat((self.view[plan.slots], plan.fresh), dim=1)
        length = torch.minimum(n_all, most)
        view = both.gather(1, column_of.clamp(0, both.shape[1] - 1))
        self.view.index_copy_(0, targets, torch.where(column < length, view, ZERO_ROW))
        self.length.index_copy_(0, targets, length[:, 0])

    def copy(self, slots: Tensor, sources: Tensor) -> None:
        """Let `slots` [B] see what `sources` [B] see; rings stay their own."""
        self.view.index_copy_(0, slots, self.view[sources])
        self.length.index_copy_(0, slots, self.length[sources])


def _columns(table: Tensor) -> Tensor:
    return torch.arange(table.shape[1], device=table.device)
