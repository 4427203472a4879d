"""Random pieces of a corpus on the device, drawn without reading anything back. Contains indices only."""

import numpy as np
import torch
from torch import Tensor

from training.speech.corpus import Corpus
from training.speech.voices import TARGET, VOICES


class SegmentSampler:
    """Draws starts of pieces of `length` speech tokens of one voice, none of them held out.

    A piece may cover several utterances.
    """

    def __init__(self, corpus: Corpus, length: int, device: torch.device, target_share: float = 0.75):
        """
        Args:
            corpus: the speech.
            length: speech tokens of a piece.
            device: of the drawn indices.
            target_share: of the pieces that come from the talker's own voice.
        """
        self.target_share = target_share
        target = [voice.name for voice in VOICES].index(TARGET)
        own: list[np.ndarray] = []
        others: list[np.ndarray] = []
        starts = corpus.starts
        for first, last in self._runs(corpus):
            begin, end = int(starts[first]), int(starts[last] + corpus.lengths[last])
            if end - begin >= length:
                rows = own if corpus.voices[first] == target else others
                rows.append(np.arange(begin, end - length + 1))
        own, others = own or others, others or own
        if not own:
            raise ValueError(f"expected {length} speech tokens of training speech, got less")
        self.own, self.others = (torch.from_numpy(np.concatenate(rows)).to(device) for rows in (own, others))

    def draw(self, n: int) -> Tensor:
        """[n] int64 first speech tokens."""
        device = self.own.device
        own, others = (rows[torch.randint(len(rows), (n,), device=device)] for rows in (self.own, self.others))
        return torch.where(torch.rand(n, device=device) < self.target_share, own, others)

    @staticmethod
    def _runs(corpus: Corpus) -> list[tuple[int, int]]:
        """First and last utterance of each stretch from which pieces are taken."""
        runs: list[tuple[int, int]] = []
        for index in np.flatnonzero(~corpus.held_out).tolist():
            joins = runs and runs[-1][1] == index - 1 and corpus.voices[index] == corpus.voices[index - 1]
            if joins:
                runs[-1] = (runs[-1][0], index)
            else:
                runs.append((index, index))
        return runs
