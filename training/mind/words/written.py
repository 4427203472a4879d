"""Words in place of sound: in training, some of what a person says is given to the language model as text.

The rows that hear a written word are empty, but for the last one, which is the word's token as in a written chat. A
layer that answers cannot know the recording then, and has to read. Of some utterances only the beginning or the end is
written: their reply depends on words that are heard and on words that are read, so both have to look alike.
Nothing of this is served.
"""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from training.mind.batches import to_device
from training.mind.records import Record
from training.mind.words.heard import HeardWords
from training.timelines.layout import NOTHING

WRITTEN = "written"  # conversations of which all words are written
WHOLE_SHARE = 0.5  # of written utterances; of the others a part is written


@dataclass(frozen=True)
class WrittenRows:
    """Rows of a batch in place of sound. places: [n] b * n_rows + i. tokens: [n], NOTHING where a row is empty."""

    places: Tensor
    tokens: Tensor

    def to(self, device: torch.device) -> "WrittenRows":
        """The same on a device."""
        return WrittenRows(to_device(self.places, device), to_device(self.tokens, device))


def draw_written(records: Sequence[Record], n_rows: int, share: float, rng: random.Random) -> WrittenRows | None:
    """What is written in a batch of records; None if nothing is.

    Args:
        n_rows: of a sequence in the batch.
        share: of utterances; in silent records all are written.
    """
    found: dict[int, int] = {}
    for number, record in enumerate(records):
        for said in record.words:
            if record.is_silent:
                part = range(len(said.tokens))
            elif rng.random() < share:
                part = draw_part(len(said.tokens), rng)
            else:
                continue
            for row, token in written_rows(said, part):
                # Where two utterances share a row, it keeps the token.
                if token != NOTHING or number * n_rows + row not in found:
                    found[number * n_rows + row] = token
    if not found:
        return None
    return WrittenRows(torch.tensor(list(found)), torch.tensor(list(found.values())))


def draw_part(n: int, rng: random.Random) -> range:
    """Which of n tokens are written: all, or the first or last ones."""
    if n < 2 or rng.random() < WHOLE_SHARE:
        return range(n)
    cut = rng.randrange(1, n)
    return range(cut) if rng.random() < 0.5 else range(cut, n)


def written_rows(said: HeardWords, part: range) -> Iterable[tuple[int, int]]:
    """Rows of a part of an utterance and their tokens; none if there is not a row for each token.

    Where short words have no row of their own, the tokens of a whole utterance share its rows evenly.
    """
    bounds, rows = said.bounds.tolist(), said.rows.tolist()
    if any(bounds[one] == bounds[one + 1] for one in part):
        n_rows = bounds[-1] - bounds[0]
        if len(part) < len(said.tokens) or n_rows < len(part):
            return
        bounds = [bounds[0] + n_rows * one // len(part) for one in range(len(part) + 1)]
    for one in part:
        for place in range(bounds[one], bounds[one + 1]):
            is_last = place + 1 == bounds[one + 1]
            yield rows[place], int(said.tokens[one]) if is_last else NOTHING
