"""Block tables over one pool of rows, against lists that are trimmed by the definition of each rule."""

from collections.abc import Iterable

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from models.token2wav.flow.block_table import (
    FIRST_ROW,
    HISTORY_FRAMES,
    SPILL_ROW,
    ZERO_ROW,
    BlockTable,
    SlotMapping,
    Trim,
)
from models.token2wav.flow.flow_state import FlowRules, FlowSizes, FlowState
from tests.models.compare import assert_same
from tests.models.token2wav.flow.flows import random_flow

FLOW = random_flow()
RULES: tuple[Trim, ...] = ("windowed", "newest_first", "doubled")
N_SESSIONS, SCRATCH = 3, 6  # the scratch slot follows two slots per session
VOICES = (7, 8)
MAX_CHUNK = 12

Label = tuple[int, int, int]  # slot, number of the chunk, position in it


def keep(seen: list[Label], new: list[Label], head: int, tail: int, trim: Trim) -> list[Label]:
    """The rows of a slot after a chunk: appended, trimmed and, for `doubled`, halved again."""
    if trim == "doubled":
        twice = (seen + new) * 2
        if len(twice) > 2 * head + 2 * tail:
            twice = twice[: 2 * head] + twice[-2 * tail :]
        return twice[: len(twice) // 2]
    array = new + seen if trim == "newest_first" else seen + new
    return array[:head] + array[-tail:] if len(array) > head + tail else array


class Pool:
    """A block table as `FlowState` allocates it, the labels written to its rows, and the expected lists.

    Slots are identified by the first slot of their session; `current` is the slot that the next call reads.
    """

    def __init__(self, prompts: tuple[int, int], rate: int, trim: Trim, max_chunk: int = MAX_CHUNK):
        """
        Args:
            prompts: mel frames of the two voices.
            rate: mel frames per row.
        """
        sizes = FlowSizes(
            n_sessions=N_SESSIONS,
            n_voices=2,
            max_steps=1,
            max_chunk=max_chunk,
            max_prompt=max(prompts),
            voice_frames=sum(prompts),
        )
        state = FlowState(FLOW, sizes, FlowRules(token=trim, mel=trim, dit=trim))
        self.table: BlockTable = state.token_table if rate == 2 else state.dit_table
        self.trim, self.max_new = trim, 2 * max_chunk // rate
        self.heads = [prompts[0] // rate] * len(self.table.length)
        self.tail = HISTORY_FRAMES // rate
        self.labels: dict[int, Label] = {}
        self.current = [*range(N_SESSIONS), *range(N_SESSIONS, SCRATCH), SCRATCH, *VOICES]
        self.seen: list[list[Label]] = [[] for _ in self.heads]
        self.n_calls = 0
        for voice, frames, first in zip(VOICES, prompts, (0, prompts[0] // rate), strict=True):
            self.heads[voice] = frames // rate
            self.table.start[voice] = self.table.first_voice_row + first
            self.feed({voice: frames // rate}, ring=frames // rate)
        self.voice_rows = {row: label for row, label in self.labels.items() if row >= self.table.first_voice_row}

    def other(self, name: int) -> int:
        """The slot that the next call writes."""
        return (self.current[name] + N_SESSIONS) % SCRATCH if name < SCRATCH else name

    def feed(
        self,
        counts: dict[int, int],
        padding: int = 0,
        n_scratch: int = 0,
        ring: int | None = None,
        failed: bool = False,
    ) -> SlotMapping:
        names = [*counts, *[SCRATCH] * n_scratch]
        slots, targets = (torch.tensor([of(name) for name in names]) for of in (self.current.__getitem__, self.other))
        n_new = torch.tensor([*counts.values(), *[0] * n_scratch])
        n_rows = max(counts.values()) + padding
        listed = self.listed_rows()
        mapping = self.table.slot_mapping(slots, n_new, n_rows, self.table.width, ring)
        taken: set[int] = set()
        for row, (slot, n) in enumerate(counts.items()):
            rows = mapping.fresh[row].tolist()
            assert rows[n:] == [SPILL_ROW] * (n_rows - n), f"slot {slot}: expected padding in the spill row, got {rows}"
            start = int(self.table.start[self.other(slot)])
            own = set(range(start, start + (ring or self.table.ring)))
            wrong = [r for r in rows[:n] if r not in own or r in listed or r in taken]
            assert not wrong, f"slot {slot}: expected free rows of its ring from {start} on, got {wrong} of {rows[:n]}"
            taken.update(rows[:n])
            new = [(slot, self.n_calls, i) for i in range(n)]
            self.labels.update(zip(rows, new, strict=False))
            if not failed:
                self.seen[slot] = keep(self.seen[slot], new, self.heads[slot], self.tail, self.trim)
        heads = torch.tensor([self.heads[name] for name in names])
        self.table.commit(mapping, targets, heads, self.tail, self.trim)
        self.n_calls += 1
        if not failed:
            self.current = self.moved(counts)
        return mapping

    def begin(self, voices: dict[int, int], failed: bool = False) -> None:
        self.table.copy(torch.tensor([self.other(slot) for slot in voices]), torch.tensor(list(voices.values())))
        if not failed:
            self.current = self.moved(voices)
            for slot, voice in voices.items():
                self.heads[slot], self.seen[slot] = self.heads[voice], list(self.seen[voice])

    def moved(self, names: Iterable[int]) -> list[int]:
        return [self.other(name) if name in names else current for name, current in enumerate(self.current)]

    def names(self) -> list[int]:
        return [*range(N_SESSIONS), SCRATCH, *VOICES]

    def listed_rows(self) -> set[int]:
        """Rows that any current slot lists."""
        columns, current = torch.arange(self.table.width), [self.current[name] for name in self.names()]
        return set(self.table.rows[current][columns < self.table.length[current, None]].tolist())

    def check(self) -> None:
        for slot, expected in ((name, self.seen[name]) for name in self.names()):
            n = int(self.table.length[self.current[slot]])
            rows = self.table.rows[self.current[slot]].tolist()
            got = [self.labels[row] for row in rows[:n]]
            assert got == expected, f"slot {slot}, {self.trim}: expected {expected}, got {got}"
            assert set(rows[n:]) <= {ZERO_ROW}, f"slot {slot}: expected no rows beyond {n}, got {rows[n:]}"
        got = {row: self.labels[row] for row in self.voice_rows}
        assert got == self.voice_rows, "expected unchanged rows of voices"


Call = tuple[str, dict[int, int], bool]


@st.composite
def calls(draw: st.DrawFn) -> list[Call]:
    """Calls: the new rows of some sessions in any order, or the voices of new turns; and whether the call fails after
    its writes."""
    result = []
    for _ in range(draw(st.integers(1, 25))):
        chosen = draw(st.permutations(range(N_SESSIONS)))[: draw(st.integers(1, N_SESSIONS))]
        failed = draw(st.integers(0, 3)) == 0
        if draw(st.integers(0, 9)) == 0:
            result.append(("begin", {slot: draw(st.sampled_from(VOICES)) for slot in chosen}, failed))
        else:
            counts = {slot: draw(st.just(2 * MAX_CHUNK) | st.integers(0, 2 * MAX_CHUNK)) for slot in chosen}
            result.append(("feed", counts, failed))
    return result


FULL: list[Call] = [("feed", dict.fromkeys(range(3), 2 * MAX_CHUNK), failed) for failed in (True, True, False)] * 20


@pytest.mark.parametrize("trim", RULES)
@pytest.mark.parametrize("rate", [1, 2])
@settings(max_examples=25)
@given(prompts=st.tuples(st.integers(1, 65), st.integers(1, 65)), stream=calls(), padding=st.integers(0, 3))
@example(prompts=(30, 10), stream=FULL, padding=0)
@example(prompts=(65, 50), stream=FULL, padding=2)
@example(prompts=(1, 1), stream=FULL, padding=0)
def test_tables_follow_the_trimming_rules(rate, trim, prompts, stream, padding):
    """No listed row is reused, the rings do not overflow, rows of voices do not change. A failed call has no effect."""
    # Prompts of up to 260 frames in steps of 4, shorter and longer than the history.
    pool = Pool((4 * prompts[0], 4 * prompts[1]), rate, trim)
    pool.begin({0: VOICES[0], 1: VOICES[1], 2: VOICES[0]})
    pool.check()
    for kind, call, failed in stream:
        if kind == "begin":
            pool.begin(call, failed)
        else:
            pool.feed({slot: n // rate for slot, n in call.items()}, padding, n_scratch=padding, failed=failed)
        pool.check()


@pytest.mark.parametrize("trim", RULES)
def test_a_call_without_new_rows_changes_nothing(trim):
    pool = Pool((120, 40), 1, trim)
    pool.begin({0: VOICES[0], 1: VOICES[1], 2: VOICES[0]})
    for _ in range(9):
        before = [tensor[pool.current] for tensor in pool.table.tensors()]
        pool.feed({0: 0, 1: 0, 2: 0}, padding=4, n_scratch=2)
        for got, expected in zip(pool.table.tensors(), before, strict=True):
            # The other slots of the sessions are undefined.
            assert_same(got[pool.current][pool.names()], expected[pool.names()], trim)
        pool.feed({0: 24, 1: 24, 2: 7})


def test_masked_columns_address_the_zero_row():
    pool = Pool((120, 40), 1, "windowed")
    pool.begin({0: VOICES[0], 1: VOICES[1]})
    mapping = pool.feed({0: 24, 1: 3}, padding=5)
    width = pool.table.width
    for row, (n_cached, n_new) in enumerate(((120, 24), (40, 3))):
        expected = [True] * n_cached + [False] * (width - n_cached) + [True] * n_new + [False] * (29 - n_new)
        assert mapping.mask[row].tolist() == expected
        assert mapping.cached[row, n_cached:].eq(ZERO_ROW).all(), f"got {mapping.cached[row, n_cached:]}"
        assert mapping.cached[row, :n_cached].ge(FIRST_ROW).all(), f"got {mapping.cached[row, :n_cached]}"


def test_a_smaller_width_gives_the_same_rows():
    pool = Pool((120, 40), 1, "windowed")
    pool.begin({0: VOICES[1]})
    slots, n_new = torch.tensor([pool.current[0]]), torch.tensor([5])
    wide, narrow = (pool.table.slot_mapping(slots, n_new, 8, width) for width in (pool.table.width, 48))
    assert_same(narrow.cached, wide.cached[:, :48])
    assert_same(narrow.fresh, wide.fresh)
    assert narrow.mask.sum() == wide.mask.sum() == 45


def test_an_emptied_scratch_slot_writes_its_own_ring_again():
    """After it was used as a voice slot with rows of a voice; its table is empty."""
    pool = Pool((120, 40), 1, "windowed")
    pool.feed({SCRATCH: 24})
    pool.table.start[SCRATCH] = pool.table.first_voice_row
    pool.table.empty_scratch()
    pool.seen[SCRATCH] = []
    assert int(pool.table.length[SCRATCH]) == 0
    mapping = pool.feed({SCRATCH: 20})
    assert mapping.cached.eq(ZERO_ROW).all(), f"expected no cached rows, got {mapping.cached}"
    pool.check()
    first = FIRST_ROW + N_SESSIONS * pool.table.ring
    assert mapping.fresh.tolist() == [list(range(first, first + 20))]
