"""Pieces of long utterances: their limits, and how their sounds are joined."""

from itertools import pairwise

import pytest
import torch

from models.token2wav.s3gen.pieces import MARGIN, Piece, PieceJoiner, pieces


@pytest.mark.parametrize("n_tokens", [1, 20, 21, 28, 29, 32, 33, 500])
def test_pieces_cover_an_utterance_with_margins(n_tokens: int) -> None:
    made = list(pieces(n_tokens, 20))
    assert made[0].start == 0 and made[-1].end == n_tokens
    assert [piece.is_last for piece in made] == [False] * (len(made) - 1) + [True]
    assert all(0 < piece.end - piece.start <= 20 for piece in made)
    for before, after in pairwise(made):
        assert before.end - after.start == 2 * MARGIN < after.end - after.start


@pytest.mark.parametrize("missing", [0, 480])
def test_joined_pieces_are_the_sound_that_they_are_cut_from(missing: int) -> None:
    """Each piece lacks `missing` samples at its start, as with a voice whose mel has an odd number of frames."""
    whole = torch.linspace(-1, 1, 70 * 960)
    joiner, sounds = PieceJoiner(), []
    for piece in pieces(70, 20):
        sounds.append(joiner.push(whole[piece.start * 960 + missing : piece.end * 960], piece))
    assert torch.allclose(torch.cat(sounds), whole[missing:], atol=1e-6)
    assert len(joiner.push(whole[:960], Piece(0, 1, True))) == 960, "a joiner that has ended begins anew"
