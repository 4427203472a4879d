"""A text that ends before the first of some texts, while it arrives."""

from collections.abc import Sequence


class StopFilter:
    """Holds back what may begin a stop text.

    Attributes:
        is_over: whether a stop text was found; nothing follows it.
    """

    def __init__(self, stops: Sequence[str]):
        self._stops, self._text = tuple(stops), ""
        self._longest = max(map(len, stops), default=0)
        self.is_over = False

    def push(self, text: str) -> str:
        """The text that is certain now."""
        if self.is_over:
            return ""
        if not self._stops:
            return text
        self._text += text
        found = [place for stop in self._stops if (place := self._text.find(stop)) >= 0]
        if found:
            certain, self._text, self.is_over = self._text[: min(found)], "", True
            return certain
        keep = max((self._begins(n) for n in range(1, min(self._longest, len(self._text) + 1))), default=0)
        certain, self._text = self._text[: len(self._text) - keep], self._text[len(self._text) - keep :]
        return certain

    def finish(self) -> str:
        """The rest."""
        rest, self._text = self._text, ""
        return rest

    def _begins(self, n: int) -> int:
        """`n` if the last n characters begin a stop text, else 0."""
        return n if any(stop.startswith(self._text[-n:]) for stop in self._stops) else 0
