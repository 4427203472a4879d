"""Long utterances in pieces: which speech tokens are spoken together, and how the sounds of pieces are joined.

S3Gen has no state between calls. Pieces overlap, and fade into each other where both have sound around the cut.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from models.token2wav.settings import SAMPLES_PER_TOKEN

MARGIN = 6  # speech tokens of a piece before and after its cuts: 240 ms
FADE_SAMPLES = SAMPLES_PER_TOKEN  # 40 ms, with the cut in their middle


class Piece(NamedTuple):
    """Speech tokens [start, end) of an utterance. is_last: no piece follows."""

    start: int
    end: int
    is_last: bool


def pieces(n_speech_tokens: int, most: int) -> Iterator[Piece]:
    """Pieces of at most `most` speech tokens; `most` is above 2 MARGIN. One piece if the utterance fits."""
    start = 0
    while start + most < n_speech_tokens:
        yield Piece(start, start + most, False)
        start += most - 2 * MARGIN
    yield Piece(start, n_speech_tokens, True)


class PieceJoiner:
    """Sounds of consecutive pieces to one sound."""

    def __init__(self) -> None:
        self._held: Tensor | None = None  # the end of the piece before, which fades out

    def push(self, wave: Tensor, piece: Piece) -> Tensor:
        """The sound that follows what was returned so far.

        Args:
            wave: [n] float32 of the next piece. A voice with an odd number of mel frames takes its first 20 ms.
            piece: the next one.
        """
        cut = MARGIN * SAMPLES_PER_TOKEN
        if (held := self._held) is not None:
            missing = (piece.end - piece.start) * SAMPLES_PER_TOKEN - len(wave)
            wave = wave[cut - FADE_SAMPLES // 2 - missing :]
            rise = torch.linspace(0, 1, FADE_SAMPLES, device=wave.device)
            wave = torch.cat((held * (1 - rise) + wave[:FADE_SAMPLES] * rise, wave[FADE_SAMPLES:]))
        if piece.is_last:
            self._held = None
            return wave
        end = len(wave) - cut + FADE_SAMPLES // 2
        self._held = wave[end - FADE_SAMPLES : end]
        return wave[: end - FADE_SAMPLES]
