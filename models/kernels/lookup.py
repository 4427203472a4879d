"""Rows of a table by index. The table may be in pinned CPU memory, which a GPU reads over the bus. Requires Triton."""

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
