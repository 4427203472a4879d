"""Which voice lies in which voice slot and on which rows, who uses it, and which one makes room for the next.

Knows counts only; the state itself is `flow_state`'s.
"""

from dataclasses import dataclass

from models.errors import SlotError
from models.token2wav.flow.flow_state import FlowSizes

Key = tuple[str, int]  # a voice's digest and the number of Euler steps


@dataclass
class _Lodger:
    key: Key
    start: int  # first row among all voices' rows, in mel frames
    n_frames: int
    users: int = 0


class VoiceSlots:
    """Voices by slot, least recently used first."""

    def __init__(self, sizes: FlowSizes):
        first = sizes.scratch + 1
        self._free = list(range(first, first + sizes.n_voices))
        self._n_frames = sizes.voice_frames
        self._by_slot: dict[int, _Lodger] = {}

    def find(self, key: Key) -> int | None:
        """The slot of a voice that is there; it counts as used just now."""
        for slot, lodger in self._by_slot.items():
            if lodger.key == key:
                self._by_slot[slot] = self._by_slot.pop(slot)
                return slot
        return None

    def place(self, key: Key, n_frames: int) -> tuple[int, int]:
        """A slot and the first of `n_frames` rows for a new voice; unused voices make room, oldest first.

        Raises: SlotError, with nothing given up, if those in use leave too little room.
        """
        kept = {slot: lodger for slot, lodger in self._by_slot.items() if lodger.users}
        unused = [slot for slot in self._by_slot if slot not in kept]
        # How many of the unused ones must go: as few as possible, the oldest.
        for n_gone in range(len(unused) + 1):
            left = {slot: lodger for slot, lodger in self._by_slot.items() if slot not in unused[:n_gone]}
            start = self._gap(left, n_frames)
            if start is not None and (self._free or n_gone):
                break
        else:
            expected = f"a slot and {n_frames} of {self._n_frames} frames in one piece"
            raise SlotError("voices", expected=expected, got=f"{len(kept)} voices in use")
        for slot in unused[:n_gone]:
            self.drop(slot)
        slot = self._free.pop(0)
        self._by_slot[slot] = _Lodger(key, start, n_frames)
        return slot, start

    def hold(self, slot: int) -> None:
        self._by_slot[slot].users += 1

    def let_go(self, slot: int) -> None:
        """One user less; the voice counts as used until now."""
        lodger = self._by_slot[slot] = self._by_slot.pop(slot)
        lodger.users -= 1
        assert lodger.users >= 0, slot

    def drop(self, slot: int) -> None:
        """Forget an unused voice."""
        assert not self._by_slot[slot].users, slot
        del self._by_slot[slot]
        self._free.append(slot)

    def _gap(self, lodgers: dict[int, _Lodger], n_frames: int) -> int | None:
        start = 0
        for lodger in sorted(lodgers.values(), key=lambda lodger: lodger.start):
            if lodger.start - start >= n_frames:
                return start
            start = lodger.start + lodger.n_frames
        return start if self._n_frames - start >= n_frames else None
