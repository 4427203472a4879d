"""Rows of tables by index, read or written. Requires Triton.

A table of embeddings may be in pinned CPU memory, which a GPU reads over the bus; `PinnedEmbedding` moves it there.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from models.kernels.launch import launch_options


@triton.jit
def _rows_kernel(table, ids, out, W, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < W
    place = tl.load(ids + row).to(tl.int64)
    tl.store(out + row * W + column, tl.load(table + place * W + column, mask=inside), mask=inside)


def table_rows(table: Tensor, ids: Tensor) -> Tensor:
    """Rows of a table.

    Args:
        table: [N, W] contiguous, on the device or in pinned CPU memory.
        ids: [...] int64, in range.
    Returns: [..., W] on the device of `ids`.
    """
    W = table.shape[1]
    out = torch.empty(*ids.shape, W, dtype=table.dtype, device=ids.device)
    if ids.numel():
        block = min(1024, triton.next_power_of_2(W))
        _rows_kernel[(ids.numel(), triton.cdiv(W, block))](table, ids.contiguous(), out, W, BLOCK=block, num_warps=4)
    return out


@triton.jit
def _newest_rows_kernel(table, slots, newest, done, rows, active, n_new, W, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < W
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    slot = tl.load(slots + row)
    is_active = tl.load(done + slot) == 0
    tl.store(active + row, is_active.to(tl.int8))
    tl.store(n_new + row, is_active.to(tl.int64))
    place = tl.load(newest + slot)
    tl.store(rows + row * W + column, tl.load(table + place * W + column, mask=inside), mask=inside)


def newest_rows(table: Tensor, slots: Tensor, newest: Tensor, done: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of each slot's newest id, and whether it is not done, in one kernel.

    Args:
        table: [N, W] contiguous.
        slots: [B] int64.
        newest: [S + 1] int64. done: [S + 1] bool.
    Returns: rows [B, 1, W]; not done [B], as bool and as int64.
    """
    (B,), W = slots.shape, table.shape[1]
    rows = torch.empty(B, 1, W, dtype=table.dtype, device=slots.device)
    active, n_new = torch.empty(B, dtype=torch.bool, device=slots.device), torch.empty_like(slots)
    if B:
        _newest_rows_kernel[(B,)](
            table, slots, newest, done.view(torch.int8), rows, active.view(torch.int8), n_new, W,
            BLOCK=triton.next_power_of_2(W), num_warps=4, **launch_options(slots.device),
        )  # fmt: skip
    return rows, active, n_new


@triton.jit
def _store_rows_kernel(target, slots, places, active, rows, W, P, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < W
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    place = tl.load(places + row)
    if (tl.load(active + row) != 0) & (place >= 0):
        to = target + (tl.load(slots + row) * P + place) * W + column
        tl.store(to, tl.load(rows + row * W + column, mask=inside), mask=inside)


def store_rows(target: Tensor, slots: Tensor, places: Tensor, active: Tensor, rows: Tensor) -> None:
    """Write rows to `target` [S + 1, P, W] where they have a place, in one kernel.

    Args:
        slots, places: [B] int64; a negative place is none.
        active: [B] bool.
        rows: [B, W].
    """
    (B, W), P = rows.shape, target.shape[1]
    if B:
        _store_rows_kernel[(B,)](
            target, slots, places, active.view(torch.int8), rows.contiguous(), W, P,
            BLOCK=triton.next_power_of_2(W), num_warps=8, **launch_options(slots.device),
        )  # fmt: skip


class PinnedEmbedding:
    """Moves the table of an embedding to pinned CPU memory until `restore`.

    Until then the embedding's own `forward` fails on a GPU; `table_rows` reads the rows.
    """

    def __init__(self, embedding: nn.Embedding):
        """On a CPU the table stays where it is."""
        self._embedding, self._device = embedding, embedding.weight.device
        if self._device.type == "cuda":
            host = torch.empty_like(embedding.weight, device="cpu", pin_memory=True)
            embedding.weight.data = host.copy_(embedding.weight)

    def restore(self) -> None:
        """Move the table back to its device."""
        self._embedding.weight.data = self._embedding.weight.data.to(self._device)
