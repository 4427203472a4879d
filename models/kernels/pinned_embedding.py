"""Pinned CPU embedding: an embedding's table in the host's pinned memory, from which a GPU reads single rows."""

import torch
from torch import nn


class PinnedEmbedding:
    """Moves the table of an embedding to pinned CPU memory until `restore`.

    Until then the embedding's own `forward` fails on a GPU; `models.kernels.lookup.table_rows` reads the rows.
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
