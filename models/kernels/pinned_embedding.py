"""An embedding whose table lies in the host's memory: of the two largest, a GPU reads a few rows a step.

Knows one embedding. Import only where Triton is.
"""

import torch
from torch import Tensor, nn

from models.kernels.lookup import table_rows


class PinnedEmbedding:
    """Takes an embedding's table off its device for as long as kernels run; the embedding itself is of no use then."""

    def __init__(self, embedding: nn.Embedding):
        """On a CPU the table stays where it is."""
        self._embedding, self._device = embedding, embedding.weight.device
        if self._device.type == "cuda":
            host = torch.empty_like(embedding.weight, device="cpu", pin_memory=True)
            embedding.weight.data = host.copy_(embedding.weight)

    def __call__(self, ids: Tensor) -> Tensor:
        """As the embedding: ids [...] -> [..., D]."""
        return table_rows(self._embedding.weight, ids)

    def give_back(self) -> None:
        """The table goes back to where it was."""
        self._embedding.weight.data = self._embedding.weight.data.to(self._device)
