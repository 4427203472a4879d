"""Allocation of voice slots and rows: any sequence of calls against a plain model."""

import copy

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from models.errors import SlotError
from models.token2wav.flow.flow_state import FlowSizes
from models.token2wav.voice.voice_slots import VoiceSlots

N_SESSIONS, N_VOICES, N_FRAMES = 2, 4, 24
SIZES = FlowSizes(n_sessions=N_SESSIONS, n_voices=N_VOICES, voice_frames=N_FRAMES)
FIRST = 2 * N_SESSIONS + 1  # follows the slots of sessions and the scratch slot

Key = tuple[str, int]


def key(number: int) -> Key:
    return f"voice {number}", 10


class Model(RuleBasedStateMachine):
    """`order` lists the prepared voices, least recently used first; rows are a plain bitmap."""

    def __init__(self):
        super().__init__()
        self.slots = VoiceSlots(SIZES)
        self.order: list[Key] = []
        self.placed: dict[Key, tuple[int, range]] = {}
        self.users: dict[Key, int] = {}

    def fits(self, keys: list[Key], n_frames: int) -> bool:
        taken = {row for one in keys for row in self.placed[one][1]}
        gaps = (range(start, start + n_frames) for start in range(N_FRAMES - n_frames + 1))
        return len(keys) < N_VOICES and any(taken.isdisjoint(gap) for gap in gaps)

    @rule(number=st.integers(0, 7), n_frames=st.integers(1, 13).map(lambda n: 2 * n))
    def use(self, number: int, n_frames: int) -> None:
        """As a session does: find the voice, or allocate a slot for it."""
        new = key(number)
        found = self.slots.find(new)
        assert found == (self.placed[new][0] if new in self.placed else None)
        if found is not None:
            self.order.remove(new)
            self.order.append(new)
            return
        unused = [one for one in self.order if not self.users[one]]
        gone = next(
            (
                unused[:n]
                for n in range(len(unused) + 1)
                if self.fits([k for k in self.order if k not in unused[:n]], n_frames)
            ),
            None,
        )
        if gone is None:
            before = copy.deepcopy(vars(self.slots))
            with pytest.raises(SlotError, match=f"{n_frames} of {N_FRAMES} frames in one piece, got"):
                self.slots.allocate(new, n_frames)
            assert vars(self.slots) == before, "a refused voice changes nothing"
            return
        for one in gone:
            self.order.remove(one)
            del self.placed[one], self.users[one]
        slot, start = self.slots.allocate(new, n_frames)
        self.order.append(new)
        self.placed[new] = slot, range(start, start + n_frames)
        self.users[new] = 0

    @precondition(lambda self: self.order)
    @rule(data=st.data())
    def acquire(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.order))
        self.slots.acquire(self.placed[one][0])
        self.users[one] += 1

    @precondition(lambda self: any(self.users.values()))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from([one for one in self.order if self.users[one]]))
        self.slots.release(self.placed[one][0])
        self.users[one] -= 1
        self.order.remove(one)
        self.order.append(one)

    @precondition(lambda self: not all(self.users.values()))
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from([one for one in self.order if not self.users[one]]))
        self.slots.evict(self.placed[one][0])
        self.order.remove(one)
        del self.placed[one], self.users[one]

    @invariant()
    def rows_and_slots_belong_to_one_voice(self) -> None:
        rows = [row for _, rows_of_voice in self.placed.values() for row in rows_of_voice]
        slots = [slot for slot, _ in self.placed.values()]
        assert len(set(rows)) == len(rows), f"expected no row twice, got {self.placed}"
        assert set(rows) <= set(range(N_FRAMES)), f"expected rows below {N_FRAMES}, got {self.placed}"
        assert len(set(slots)) == len(slots) and set(slots) <= set(range(FIRST, FIRST + N_VOICES)), self.placed

    @invariant()
    def prepared_voices_are_found(self) -> None:
        """On a copy, because `find` counts as use."""
        seen = copy.deepcopy(self.slots)
        for number in range(8):
            expected = self.placed[key(number)][0] if key(number) in self.placed else None
            assert seen.find(key(number)) == expected


Model.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestAnyHistory = Model.TestCase


def filled(*n_frames: int) -> VoiceSlots:
    """Voices 0, 1, ... in consecutive slots."""
    slots = VoiceSlots(SIZES)
    for number, n in enumerate(n_frames):
        slots.allocate(key(number), n)
    return slots


def there(slots: VoiceSlots, n: int = 8) -> list[int]:
    seen = copy.deepcopy(slots)
    return [number for number in range(n) if seen.find(key(number)) is not None]


def test_evicts_the_least_recently_used_voice():
    slots = filled(8, 8, 8)
    slots.find(key(0))
    assert slots.allocate(key(3), 8) == (FIRST + 3, 8)
    assert there(slots) == [0, 2, 3]


def test_release_makes_a_voice_the_most_recently_used():
    slots = filled(8, 8, 8)
    slot = slots.find(key(0))
    slots.acquire(slot)
    slots.find(key(1))
    slots.find(key(2))
    slots.release(slot)
    slots.allocate(key(3), 8)
    assert there(slots) == [0, 2, 3]


def test_a_voice_is_in_use_until_the_last_release():
    slots = filled(24)
    slot = slots.find(key(0))
    slots.acquire(slot)
    slots.acquire(slot)
    slots.release(slot)
    with pytest.raises(SlotError, match="got 1 voices in use"):
        slots.allocate(key(1), 2)
    slots.release(slot)
    assert slots.allocate(key(1), 2)[1] == 0


def test_refuses_rows_that_are_not_contiguous():
    """Ten rows are free, but a voice in use is between them."""
    slots = filled(4, 14, 6)
    slots.acquire(slots.find(key(1)))
    with pytest.raises(SlotError, match="10 of 24 frames in one piece, got 1 voices in use"):
        slots.allocate(key(3), 10)
    assert there(slots) == [0, 1, 2], "nothing was given up for it"
    assert slots.allocate(key(3), 6)[1] == 18


def test_evicts_a_voice_for_its_slot():
    slots = filled(2, 2, 2, 2)
    slot, start = slots.allocate(key(4), 2)
    assert there(slots) == [1, 2, 3, 4]
    assert (slot, start) == (FIRST, 0)


def test_refuses_more_rows_than_exist():
    slots = filled(2)
    with pytest.raises(SlotError, match="26 of 24 frames"):
        slots.allocate(key(1), 26)
    assert there(slots) == [0]
