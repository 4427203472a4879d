"""Batches of whole utterances with few different shapes."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

STEP = 25  # speech tokens: lengths of batches are multiples of it
AT_ONCE = 128


class Batch(NamedTuple):
    """B utterances of similar lengths."""

    index: Tensor  # [B] int64 utterance
    start: Tensor  # [B] int64 first speech token in the corpus
    n_tokens: Tensor  # [B] int64
    length: int  # of the longest one, rounded up


def batches(lengths: Tensor, device: torch.device) -> Iterator[Batch]:
    """All utterances, ordered by length.

    Args:
        lengths: [U] int64 speech tokens of each utterance, on the CPU.
        device: of the batches.
    """
    starts, order = lengths.cumsum(0) - lengths, lengths.argsort()
    rounded = -(-lengths[order] // STEP) * STEP
    for length, count in zip(*(part.tolist() for part in rounded.unique_consecutive(return_counts=True)), strict=True):
        own, order = order[:count], order[count:]
        for index in own.split(AT_ONCE):
            yield Batch(*(part[index].to(device) for part in (torch.arange(len(lengths)), starts, lengths)), length)
