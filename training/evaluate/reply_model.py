"""A language model of the grammar's replies for the recogniser: word pairs, in ARPA's format."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise

BEGIN, END = "<s>", "</s>"
DISCOUNT = 0.5  # of each pair's count, for words that did not follow
MIN_REST = 1e-6
NEVER = -99.0  # log10 of a probability


def reply_model(sentences: Iterable[Sequence[str]], known: Iterable[str]) -> str:
    """The model of these sentences; each known word may follow each other one.

    Args:
        known: words of the recogniser's dictionary; others are left out of the sentences.
    """
    single, pairs, before = Counter(known), Counter[tuple[str, str]](), Counter[str]()
    for sentence in sentences:
        spoken = [BEGIN, *(word for word in sentence if word in single), END]
        single.update(spoken[1:])
        pairs.update(pairwise(spoken))
        before.update(spoken[:-1])
    share = {word: n / single.total() for word, n in single.items()}
    followers, seen = Counter(first for first, _ in pairs), defaultdict[str, float](float)
    for first, second in pairs:
        seen[first] += share[second]

    def backoff(word: str) -> float:
        if not before[word]:
            return 0.0
        return math.log10(DISCOUNT * followers[word] / before[word] / max(1 - seen[word], MIN_REST))

    singles = [(NEVER, BEGIN), *((math.log10(share[word]), word) for word in sorted(share))]
    lines = ["", "\\data\\", f"ngram 1={len(singles)}", f"ngram 2={len(pairs)}", "", "\\1-grams:"]
    lines += [f"{log:.4f}\t{word}\t{backoff(word):.4f}" for log, word in singles]
    lines += ["", "\\2-grams:"]
    lines += [
        f"{math.log10((n - DISCOUNT) / before[first]):.4f}\t{first} {second}"
        for (first, second), n in sorted(pairs.items())
    ]
    return "\n".join([*lines, "", "\\end\\", ""])
