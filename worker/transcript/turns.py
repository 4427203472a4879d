"""The turns of a conversation, built from its units one by one. Torch-free."""

from dataclasses import dataclass


@dataclass
class Turn:
    """One turn of the model. start, end: its first and last unit, counted from 0. text: its whole text."""

    start: int
    end: int
    text: str


class TurnBuilder:
    """Groups units into turns.

    Attributes:
        turns: all turns so far, the open one included.
    """

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self._open: Turn | None = None

    @property
    def is_open(self) -> bool:
        """Whether the last turn goes on."""
        return self._open is not None

    def add(self, unit: int, text: str, *, belongs: bool, goes_on: bool) -> None:
        """Add a unit.

        Args:
            unit: its index.
            text: its text.
            belongs: whether it is part of a turn: of the open one, or of a new one.
            goes_on: whether the open turn goes on after it.
        """
        if belongs:
            if self._open is None:
                self._open = Turn(unit, unit, "")
                self.turns.append(self._open)
            self._open.text += text
            self._open.end = unit
        if not goes_on:
            self._open = None

    def close(self, unit: int) -> None:
        """End the open turn, if there is one, with the sound of this unit."""
        if self._open is not None:
            self._open.end = unit
        self._open = None
