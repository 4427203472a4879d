"""Lines of a table with one unit per line. Torch-free; formats text and does not print."""

from collections.abc import Sequence
from typing import NamedTuple

END_OF_TURN = " (end of turn)"


class Columns(NamedTuple):
    """A group of columns. min_width: the least width of each, in characters."""

    names: tuple[str, ...]
    min_width: int = 0

    def line(self, cells: Sequence[str]) -> str:
        """The cells of one line, right-aligned below their names."""
        return " ".join(
            cell.rjust(max(len(name), self.min_width)) for cell, name in zip(cells, self.names, strict=True)
        )


def quoted(text: str, *, ends_turn: bool) -> str:
    """A unit's text as a Python literal, so that no control character reaches the terminal."""
    return repr(text) + END_OF_TURN * ends_turn
