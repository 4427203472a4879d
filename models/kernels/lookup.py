"""Rows of a table by number, where the table may lie in the host's pinned memory: a GPU reads it over the bus.

Knows pointers and rows. Does not know what the rows are. Import only where Triton is.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rows_kernel(table, ids, out, W, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < W
    place = tl.load(ids + row).to(tl.int64)
    tl.store(out + row * W + column, tl.load(table + place * W + column, mask=inside), mask=inside)


def table_rows(table: Tensor, ids: Tensor) -> Tensor:
    """table [N, W], contiguous, on the device or pinned on the host; ids [...] int64, in range. Returns: [..., W]."""
    W = table.shape[1]
    out = torch.empty(*ids.shape, W, dtype=table.dtype, device=ids.device)
    if ids.numel():
        block = min(1024, triton.next_power_of_2(W))
        _rows_kernel[(ids.numel(), triton.cdiv(W, block))](table, ids.contiguous(), out, W, BLOCK=block, num_warps=4)
    return out
