"""The talker's tokenizer: byte-level BPE of the grammar's replies, with the released tokenizer's added tokens."""

from functools import cache

from assets.byte_bpe import train
from assets.released_layout import Lexicon
from training.grammar.corpus import corpus

N_TRAINED_TOKENS = 1400  # the 256 bytes and merges: nearly every word of the replies is one token


@cache
def talker_lexicon() -> Lexicon:
    """The vocabulary; the same on every machine."""
    return Lexicon.of(train(corpus(), N_TRAINED_TOKENS))
