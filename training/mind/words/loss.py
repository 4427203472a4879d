"""Auxiliary loss (CTC): text tokens of what a person says, from rows of sound.

A reply shows only indirectly which words were heard, and its first tokens alone depend on them. Here states in the
middle of the language model say at each row of sound which words have ended. Later layers then read words in place of
sounds, as in a written chat. Nothing of this is exported.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.mind.batches import to_device
from training.mind.words.heard import HeardWords


@dataclass(frozen=True)
class WordBatch:
    """N utterances.

    Args:
        places: [N, T] rows b * n_rows + i of a batch; meaningless after the first `lengths`.
        lengths: [N] rows. tokens: [sum of n_tokens]. n_tokens: [N].
    """

    places: Tensor
    lengths: Tensor
    tokens: Tensor
    n_tokens: Tensor

    def to(self, device: torch.device) -> "WordBatch":
        """The same on a device."""
        return WordBatch(*(to_device(one, device) for one in (self.places, self.lengths, self.tokens, self.n_tokens)))


def collate_words(records: Sequence[Sequence[HeardWords]], n_rows: int) -> WordBatch | None:
    """The utterances of records, whose rows are padded to `n_rows`; None without any."""
    found = [(row, one) for row, said in enumerate(records) for one in said]
    if not found:
        return None
    lengths = [len(one.rows) for _, one in found]
    places = np.zeros((len(found), max(lengths)), np.int64)
    for number, (row, one) in enumerate(found):
        places[number, : len(one.rows)] = row * n_rows + one.rows
    tokens = np.concatenate([one.tokens for _, one in found]).astype(np.int64)
    n_tokens = [len(one.tokens) for _, one in found]
    return WordBatch(*map(torch.from_numpy, (places, np.array(lengths), tokens, np.array(n_tokens))))


def word_loss(head: nn.Module, states: Tensor, words: WordBatch) -> Tensor:
    """Mean loss of a token; utterances with more tokens than rows count as zero.

    Args:
        head: from a state to all text tokens and, last, the blank.
        states: [B, T, D] in the middle of the language model.
    """
    scores = F.log_softmax(head(states.flatten(0, 1)[words.places]).float(), dim=-1)
    return F.ctc_loss(
        scores.transpose(0, 1),
        words.tokens,
        words.lengths,
        words.n_tokens,
        blank=scores.shape[-1] - 1,
        zero_infinity=True,
    )


def best_tokens(head: nn.Module, states: Tensor, words: WordBatch) -> list[list[int]]:
    """The tokens that are found in each utterance. Arguments as for `word_loss`."""
    scores = head(states.flatten(0, 1)[words.places])
    blank, best = scores.shape[-1] - 1, scores.argmax(-1).tolist()
    found = []
    for row, length in zip(best, words.lengths.tolist(), strict=True):
        changes = [token for before, token in zip([blank, *row], row[:length], strict=False) if token != before]
        found.append([token for token in changes if token != blank])
    return found
