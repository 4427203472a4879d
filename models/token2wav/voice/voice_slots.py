"""Allocation of voice slots and of their rows: which voice is in which slot, its users, and eviction.

Contains counts only; the state itself belongs to `flow_state`.
"""

from dataclasses import dataclass

from models.errors import SlotError
from models.token2wav.flow.flow_state import FlowSizes

Key = tuple[str, int]  # digest of a voice, number of Euler steps


@dataclass
class _Entry:
    key: Key
    start: int  # first row among the rows of all voices, in mel frames
    n_frames: int
    users: int = 0


class VoiceSlots:
    """Voices by slot, least recently used first."""

    def __init__(self, sizes: FlowSizes):
        first = sizes.scratch + 1
        self._free = list(range(first, first + sizes.n_voices))
        self._n_frames = sizes.voice_frames
        self._by_slot: dict[int, _Entry] = {}

    def find(self, key: Key) -> int | None:
        """The slot of a prepared voice, which becomes the most recently used one; None if there is no such voice."""
        for slot, entry in self._by_slot.items():
            if entry.key == key:
                self._by_slot[slot] = self._by_slot.pop(slot)
                return slot
        return None

    def allocate(self, key: Key, n_frames: int) -> tuple[int, int]:
        """A slot for a new voice and the first of its `n_frames` rows; evicts unused voices, oldest first.

        Raises: SlotError if the voices in use leave too little room. No voice is evicted then.
        """
        kept = {slot: entry for slot, entry in self._by_slot.items() if entry.users}
        unused = [slot for slot in self._by_slot if slot not in kept]
        # Evict as few unused voices as possible, the oldest first.
        for n_evicted in range(len(unused) + 1):
            left = {slot: entry for slot, entry in self._by_slot.items() if slot not in unused[:n_evicted]}
            start = self._gap(left, n_frames)
            if start is not None and (self._free or n_evicted):
                break
        else:
            expected = f"a slot and {n_frames} of {self._n_frames} frames in one piece"
            raise SlotError("voices", expected=expected, got=f"{len(kept)} voices in use")
        for slot in unused[:n_evicted]:
            self.evict(slot)
        slot = self._free.pop(0)
        self._by_slot[slot] = _Entry(key, start, n_frames)
        return slot, start

    def acquire(self, slot: int) -> None:
        """Add a user, which protects the voice from eviction."""
        self._by_slot[slot].users += 1

    def release(self, slot: int) -> None:
        """Remove a user; the voice becomes the most recently used one."""
        entry = self._by_slot[slot] = self._by_slot.pop(slot)
        entry.users -= 1
        assert entry.users >= 0, slot

    def evict(self, slot: int) -> None:
        """Free the slot and the rows of an unused voice."""
        assert not self._by_slot[slot].users, slot
        del self._by_slot[slot]
        self._free.append(slot)

    def evict_unused(self) -> None:
        """Evict every voice without a user."""
        for slot in [slot for slot, entry in self._by_slot.items() if not entry.users]:
            self.evict(slot)

    def _gap(self, entries: dict[int, _Entry], n_frames: int) -> int | None:
        """The first row of a gap of `n_frames` rows between the entries; None if there is none."""
        start = 0
        for entry in sorted(entries.values(), key=lambda entry: entry.start):
            if entry.start - start >= n_frames:
                return start
            start = entry.start + entry.n_frames
        return start if self._n_frames - start >= n_frames else None
