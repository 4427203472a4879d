"""Rows of a unit that are in the context before the unit begins. Torch-free."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass

from models.inputs.image import ImagePatches


@dataclass(eq=False)
class EarlyRows:
    """The first rows of a session's next unit.

    Args:
        n_before: context rows before them.
        ids: as in `Layout`, 0 where image rows stand. Empty if they could not be fed.
        frames: slices of each image among them.
        is_in_context: they are still there; false after the slot was rewound.
    """

    n_before: int
    ids: tuple[int, ...]
    frames: tuple[list[ImagePatches], ...]
    is_in_context: bool = True

    def begins(self, ids: Sequence[int], slices: Sequence[ImagePatches]) -> bool:
        """Whether a unit of these rows and image slices begins with these rows and has more."""
        n = len(self.ids)
        return len(ids) > n and tuple(ids[:n]) == self.ids and self.begins_images(slices)

    def begins_images(self, slices: Sequence[ImagePatches]) -> bool:
        """Whether these slices begin with those of the rows."""
        own = [part for frame in self.frames for part in frame]
        return len(slices) >= len(own) and all(map(operator.is_, own, slices))

    def mark_removed(self) -> None:
        """Record that the slot was rewound to `n_before`."""
        self.is_in_context = False
