"""Draws that recur, so that recordings and pictures which take long to make are used in several conversations.

A kind of draw has numbered sources of chance. Each draw uses one of a window of them, and after some draws the window
moves on by one. What is drawn from a source is the same each time, and new sources come all the time.
"""

import random
from collections import Counter

WINDOW = 32  # sources of a kind that are used at a time


class Recurring:
    """Numbered sources of chance."""

    def __init__(self, seed: str = "", uses: float = 0.0):
        """
        Args:
            seed: of all sources.
            uses: draws from a source on average, where there are many more draws than WINDOW; 0: nothing recurs.
        """
        self.seed, self.uses = seed, uses
        self._drawn = Counter[str]()

    def source(self, kind: str, rng: random.Random, window: int = WINDOW) -> random.Random:
        """The source of one draw, chosen by `rng`; `rng` itself if nothing recurs."""
        if not self.uses:
            return rng
        first = int(self._drawn[kind] / self.uses)
        self._drawn[kind] += 1
        return random.Random(f"{self.seed} {kind} {first + rng.randrange(window)}")

    def of_text(self, text: str, rng: random.Random) -> random.Random:
        """A source that is the same for a text; `rng` itself if nothing recurs."""
        return random.Random(f"{self.seed} {text}") if self.uses else rng
