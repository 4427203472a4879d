"""Rows of image slices that are encoded before their unit, in a buffer that exists for every slot from the start.

A slice keeps its place as long as something refers to it: a unit that waits for sound, runs again or is taken back
finds its rows, and the place is free once its unit is closed or dropped. Contains no decision when there is time.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import ref

from torch import Tensor

from models.inputs.image import ImagePatches
from models.stages.runner import Runner

EARLY_SLICES = 10  # of a slot: a picture with as many slices as a session may ask for
MAX_AT_ONCE = 2  # slices of one call, which a unit that arrives meanwhile waits for


@dataclass(eq=False)
class _Held:
    """A slice whose rows are in the buffer. is_used: a unit has taken them."""

    part: ref[ImagePatches]
    is_used: bool = False


class EarlyImages:
    """The image slices of all slots. For the thread that owns the model.

    Attributes:
        capacity: slices of a slot that may be encoded before their unit.
        n_encoded: slices encoded before their unit.
        n_used: of which a unit has taken the rows.
    """

    def __init__(self, runner: Runner):
        self._runner, self._rows = runner, runner.state.images
        self.capacity = 0 if self._rows is None else self._rows.shape[1]
        self._held: list[list[_Held | None]] = [[None] * self.capacity for _ in range(runner.state.n_slots)]
        self._expected: deque[tuple[int, ref[ImagePatches]]] = deque()
        self.n_encoded = self.n_used = 0

    @property
    def has_expected(self) -> bool:
        """Whether a slice is left to encode."""
        while self._expected and self._expected[0][1]() is None:
            self._expected.popleft()
        return bool(self._expected)

    @property
    def is_busy(self) -> bool:
        """Whether the device still encodes the last slices."""
        return not self._runner.early_stream.is_done

    def expect(self, slot: int, parts: Sequence[ImagePatches]) -> None:
        """Leave slices of a later unit to `encode_next`, as many as the slot has room for."""
        known = [one.part() for one in self._held[slot] if one is not None]
        known += [part() for owner, part in self._expected if owner == slot]
        n_free = self.capacity - sum(part is not None for part in known)
        numbers = {id(part) for part in known}
        new = {id(part): part for part in parts if id(part) not in numbers}
        self._expected.extend((slot, ref(part)) for part in list(new.values())[: max(n_free, 0)])

    def encode_next(self) -> None:
        """Encode the next slices, of any slots, that have one size. Raises: any error of the encoder; they are skipped.

        On a GPU this only launches the work; see `is_busy`.
        """
        group: list[tuple[int, ImagePatches]] = []
        while self.has_expected and len(group) < min(MAX_AT_ONCE, self._runner.shapes.slices[-1]):
            slot, part = self._expected[0][0], self._expected[0][1]()
            assert part is not None, "encode_next: expected a slice that is referenced"
            if group and self._size(part) != self._size(group[0][1]):
                break
            self._expected.popleft()
            group.append((slot, part))
        if not group:
            return
        assert self._rows is not None, "encode_next: expected slots with room for rows"
        with self._runner.early_stream.work():
            encoded = self._runner.encode_slices([part for _, part in group])
            # Of very large slices one call may hold fewer.
            for (slot, part), rows in zip(group, encoded, strict=False):
                place = self._free_place(slot)
                self._rows[slot, place].copy_(rows)
                self._held[slot][place] = _Held(ref(part))
        if self._runner.regions.marks_steps:  # the graphs of all regions share memory
            self._runner.early_stream.join()
        self.n_encoded += len(encoded)
        self._expected.extendleft((slot, ref(part)) for slot, part in reversed(group[len(encoded) :]))

    def encode(self, parts: Sequence[tuple[int, ImagePatches]]) -> list[Tensor]:
        """LLM rows [query_num, D] of slices, each with its slot, in order: those held, and the others encoded now.

        Rows that were held are valid until the caller's unit is closed.
        """
        taken = [self._take(slot, part) for slot, part in parts]
        if self._expected:
            now = {id(part) for _, part in parts}
            self._expected = deque(one for one in self._expected if id(one[1]()) not in now)
        if any(rows is not None for rows in taken):
            self._runner.early_stream.join()
        new = iter(
            self._runner.encode_images([part for (_, part), rows in zip(parts, taken, strict=True) if rows is None])
        )
        return [next(new) if rows is None else rows for rows in taken]

    def holds(self, slot: int, part: ImagePatches) -> bool:
        """Whether the rows of a slice are in the buffer."""
        return any(held is not None and held.part() is part for held in self._held[slot])

    def forget(self, slot: int) -> None:
        """Free the slot's places: the slot is emptied."""
        self._runner.early_stream.join()  # before the rows are overwritten
        self._held[slot] = [None] * self.capacity
        self._expected = deque(one for one in self._expected if one[0] != slot)

    def _take(self, slot: int, part: ImagePatches) -> Tensor | None:
        for place, held in enumerate(self._held[slot]):
            if held is not None and held.part() is part:
                assert self._rows is not None
                self.n_used += not held.is_used
                held.is_used = True
                return self._rows[slot, place]
        return None

    def _free_place(self, slot: int) -> int:
        return next(place for place, held in enumerate(self._held[slot]) if held is None or held.part() is None)

    def _size(self, part: ImagePatches) -> int:
        return self._runner.shapes.fit("vision", "patches", len(part.pixels))
