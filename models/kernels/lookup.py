"""Rows of a table by index. The table may be in pinned CPU memory, which a GPU reads over the bus. Requires Triton.

Contains the embedding whose table is there.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor, nn


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
