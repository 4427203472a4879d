"""Pages of a slot cache: which pages of a shared pool hold the rows of each slot.

Without a pool every slot is one page of its own, and the table is the identity. Contains the table and the free list.
Does not contain rows (`kv_cache`).
"""

from dataclasses import dataclass

import torch

from models.errors import SlotError
from models.graphs.streams import tensor_to_device


@dataclass(frozen=True)
class PageSizes:
    """Rows of a page, and pages that all slots share.

    Args:
        rows: kernels need a multiple of `models.kernels.attention.MAX_KEY_TILE`.
        what: the rows' name in errors.
    """

    rows: int
    n: int
    what: str = "context rows"


class PageTable:
    """Pages of `n_slots` slots plus one scratch slot.

    Attributes:
        rows: of a page.
        n_stored: pages to allocate. Of a pool, the last two belong to no session: one receives the writes of padding,
            and one stays zero, for places of slots without a page.
        table: [S + 1, n] int64 on the device, pages of each slot in order.
    """

    def __init__(self, n_slots: int, max_rows: int, spare: int, device: torch.device | str, sizes: PageSizes | None):
        """max_rows, spare: rows of one slot, and more that are never written. sizes: None = every slot is a page."""
        self._sizes, self._max_rows = sizes, max_rows
        self._owned: list[list[int]] = [[] for _ in range(n_slots)]
        if sizes is None:
            self.rows, self.n_stored, self._free = max_rows + spare, n_slots + 1, list[int]()
            self.table = torch.arange(n_slots + 1, device=device)[:, None]
            self.scratch = n_slots
            return
        self.rows, self.n_stored, self._free = sizes.rows, sizes.n + 2, list(range(sizes.n))
        self.scratch, self._empty = sizes.n, sizes.n + 1
        self.table = torch.full((n_slots + 1, -(-(max_rows + spare) // sizes.rows)), self._empty, device=device)
        self.table[n_slots] = self.scratch

    @property
    def is_pool(self) -> bool:
        """Whether slots share a pool of pages."""
        return self._sizes is not None

    def n_fitting(self, n_rows: int) -> int:
        """Slots of `n_rows` rows for which pages are free; without a pool all slots."""
        n_pages = -(-min(n_rows, self._max_rows) // self.rows)
        return len(self._free) // n_pages if self.is_pool else len(self._owned)

    @property
    def n_rows(self) -> int:
        """Rows that all slots hold together."""
        return self.rows * self._sizes.n if self._sizes is not None else self._max_rows * len(self._owned)

    @property
    def n_free_rows(self) -> int:
        """Rows of the pool that no slot has; 0 without a pool."""
        return self.rows * len(self._free)

    def capacity(self, slot: int) -> int:
        """Rows that the slot's pages hold; the scratch slot has one page."""
        n_pages = len(self._owned[slot]) if slot < len(self._owned) else 1
        return min(self.rows * n_pages, self._max_rows) if self.is_pool else self._max_rows

    def reserve(self, slot: int, n_rows: int) -> None:
        """Give the slot pages until it holds `n_rows`. Raises: SlotError if too few are free, with nothing changed."""
        self.check(slot, n_rows)
        owned, n_new = self._owned[slot], self._n_missing(slot, n_rows)
        if n_new <= 0:
            return
        new, self._free = self._free[:n_new], self._free[n_new:]
        self.table[slot, len(owned) : len(owned) + n_new] = tensor_to_device(self.table.device, torch.tensor(new))
        owned += new

    def has_room(self, slot: int, n_rows: int) -> bool:
        """Whether `reserve` succeeds."""
        return self._n_missing(slot, n_rows) <= len(self._free)

    def check(self, slot: int, n_rows: int) -> None:
        """Raises: SlotError if `reserve` would."""
        if self._sizes is not None and not self.has_room(slot, n_rows):
            expected = f"at most {self.n_free_rows} more rows, which are free"
            got = self._n_missing(slot, n_rows) * self.rows
            raise SlotError(f"{self._sizes.what} of slot {slot}", expected=expected, got=got)

    def _n_missing(self, slot: int, n_rows: int) -> int:
        """Pages that the slot needs beside its own to hold `n_rows`; zero or less if it has enough."""
        return -(-min(n_rows, self._max_rows) // self.rows) - len(self._owned[slot]) if self.is_pool else 0

    def release(self, slot: int, n_rows: int = 0) -> None:
        """Return the slot's pages beyond its first `n_rows` rows to the pool; the rows of these pages must be zero."""
        n_kept = -(-n_rows // self.rows)
        if self.is_pool and n_kept < len(self._owned[slot]):
            self._free += self._owned[slot][n_kept:]
            del self._owned[slot][n_kept:]
            self.table[slot, n_kept:] = self._empty
