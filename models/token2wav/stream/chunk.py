"""The tokens of one call of the vocoder, and the checks of tokens from a caller."""

from collections.abc import Sequence
from numbers import Integral
from typing import NamedTuple

import numpy as np

from models.errors import TokenError


class Chunk(NamedTuple):
    """One session's speech tokens for one call, the lookahead included unless `last`."""

    session: int
    speech_tokens: Sequence[int]
    last: bool = False

    def n_synthesized(self, lookahead: int) -> int:
        """Tokens of the chunk that are synthesized: all but the lookahead, or all at the end of a turn."""
        return len(self.speech_tokens) - lookahead * (not self.last)


def check_tokens(what: str, speech_tokens: object, vocab_size: int, *, at_least: int) -> None:
    """Check tokens that come from a caller.

    Args:
        what: names the tokens in the error.
        speech_tokens: a sequence of whole numbers.
        vocab_size: every token is smaller.
        at_least: smallest length.
    Raises: TokenError.
    """
    if not isinstance(speech_tokens, Sequence | np.ndarray) or isinstance(speech_tokens, str | bytes):
        raise TokenError(what, expected="a sequence of whole numbers", got=type(speech_tokens).__name__)
    if len(speech_tokens) < at_least:
        raise TokenError(what, expected=f"at least {at_least}", got=len(speech_tokens))
    for token in speech_tokens:
        # NumPy would truncate a float silently, and a bool is an int.
        if type(token) is bool or not isinstance(token, Integral) or not 0 <= int(token) < vocab_size:
            raise TokenError(what, expected=f"whole numbers from 0 to {vocab_size - 1}", got=token)
