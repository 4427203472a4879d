"""What a person says, as text tokens at the rows of sound that hear it."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from training.timelines.speech import RATE

ROW_S = 0.1  # of sound in a row
LATE_S = 0.3  # after the end of an utterance its last words may still be found

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class HeardWords:
    """An utterance.

    Args:
        rows: [n] of the record, which hear it.
        tokens: [m] of its text, words with their spaces.
        bounds: [m + 1] places among the rows: token i is spoken from bounds[i] to bounds[i + 1], by its letters.
    """

    rows: npt.NDArray[np.int32]
    tokens: npt.NDArray[np.int16]
    bounds: npt.NDArray[np.int16]


def word_tokens(encode: Callable[[str], list[int]], text: str) -> npt.NDArray[np.int16]:
    """Tokens of what is said, as inside of a sentence."""
    return np.array(encode(f" {text}"), np.int16)


def heard_words(encode: Callable[[str], list[int]], text: str, rows: Ints, first: int, last: int) -> HeardWords:
    """An utterance that is spoken in rows[first:last], of rows that hear it."""
    tokens = word_tokens(encode, text)
    letters: list[float] = []
    for word in text.split():
        n = len(encode(f" {word}"))
        letters += n * [(len(word) + 1) / n]
    if len(letters) != len(tokens):
        letters = [1.0] * len(tokens)
    along = np.cumsum([0.0, *letters]) / sum(letters)
    bounds = first + np.round(along * (last - first))
    return HeardWords(rows.astype(np.int32), tokens, bounds.astype(np.int16))


def heard_rows(row_starts: npt.NDArray[np.float64], start: float, n_samples: int) -> Ints:
    """Which rows hear an utterance, by the second at which each row's sound begins. Empty unless all are there."""
    end = start + n_samples / RATE
    if not len(row_starts) or start < row_starts[0] or end > row_starts[-1] + ROW_S:
        return np.zeros(0, np.int64)
    return np.flatnonzero((row_starts > start - ROW_S) & (row_starts < end + LATE_S))
