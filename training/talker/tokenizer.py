"""The talker's tokenizer: byte-level BPE of the grammar's replies, with the released tokenizer's added tokens.

The merges are kept in `merges.txt`: trained weights belong to them, and a grammar that grows would change them.
`python -m training.talker.tokenizer` writes them anew, for a talker that is trained from the beginning.
"""

from functools import cache
from pathlib import Path

from assets.byte_bpe import Vocabulary, byte_spelling, train
from assets.released_layout import Lexicon
from training.grammar.corpus import corpus

N_TRAINED_TOKENS = 1400  # the 256 bytes and merges: nearly every word of the replies is one token
MERGES = Path(__file__).with_name("merges.txt")


@cache
def talker_lexicon() -> Lexicon:
    """The vocabulary; the same on every machine."""
    lines = MERGES.read_text(encoding="utf-8").splitlines()
    merges = [(first, second) for first, second in (line.split(" ") for line in lines)]
    tokens = dict.fromkeys([*byte_spelling().values(), *("".join(pair) for pair in merges)])
    return Lexicon.of(Vocabulary(list(tokens), merges))


if __name__ == "__main__":
    found = train(corpus(), N_TRAINED_TOKENS)
    MERGES.write_text("".join(f"{first} {second}\n" for first, second in found.merges), encoding="utf-8")
