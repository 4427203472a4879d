"""Texts that end a reply, searched for while its tokens arrive. Torch-free."""

from collections.abc import Sequence

from models.inputs.tokens import TextStream


class StopTexts:
    """The texts of one reply.

    Attributes:
        is_complete: whether the reply contains one of them.
    """

    def __init__(self, stops: Sequence[str], stream: TextStream):
        """stream: decodes the reply's tokens."""
        self._stops, self._stream = tuple(stops), stream
        self._n_kept = max(map(len, stops)) - 1  # characters that may begin a text which a later token completes
        self._tail = ""
        self.is_complete = False

    def push(self, token: int) -> None:
        """Take the next token of the reply."""
        text = self._tail + self._stream.push([token])
        self.is_complete = self.is_complete or any(stop in text for stop in self._stops)
        self._tail = text[max(len(text) - self._n_kept, 0) :]
