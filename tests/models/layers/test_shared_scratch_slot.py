"""Caches whose layers share one scratch slot: the session's content equals that of separate scratch slots."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch import Tensor

from models.checkpoint.config import load_config
from models.layers.kv_cache import KVCache
from models.layers.rotary import rotary_angles, rotary_frequencies, rotate
from models.layers.transformer import attend
from models.load import build_on_meta
from models.random_weights import random_model
from models.stages.state import SlotState, held_bytes
from tests.models.compare import assert_same
from tests.models.stages.test_state import TINY, scribble

N_LAYERS, MAX_LEN, HEADS, DIM = 3, 24, 2, 4
ROW_BYTES = HEADS * DIM * 4
FREQUENCIES = rotary_frequencies(DIM, 1e4, "cpu")
SESSION, SCRATCH = 0, 1


def make(n_slots: int = 1, n_layers: int = N_LAYERS, *, shared_scratch: bool = True) -> KVCache:
    return KVCache(
        n_layers=n_layers,
        n_slots=n_slots,
        max_len=MAX_LEN,
        kv_heads=HEADS,
        head_dim=DIM,
        dtype=torch.float32,
        device="cpu",
        spare=1,
        shared_scratch=shared_scratch,
    )


def rows_of(cache: KVCache) -> list[Tensor]:
    return [*cache.k, *cache.v]


def own(cache: KVCache) -> list[Tensor]:
    """Copies of the session's content, and of the counters of the scratch slot."""
    counts = [cache.lengths, cache.positions, cache.windows]
    return [tensor.clone() for tensor in (*(tensor[SESSION] for tensor in rows_of(cache)), *counts)]


def feed(cache: KVCache, slots: Tensor, n_new: Tensor, rows: Tensor) -> list[Tensor]:
    """Feed layer by layer, as a decoder does; rows: [layers, 3, B, T, heads, dim]. Returns: attention of valid rows."""
    n_rows = rows.shape[3]
    view = cache.view(slots, n_new, n_rows, MAX_LEN)
    cos, sin = (part.unsqueeze(2) for part in rotary_angles(view.positions, FREQUENCIES))
    inside = (torch.arange(n_rows) < n_new[:, None])[..., None, None]
    seen = []
    for k_cache, v_cache, (q, k, v) in zip(cache.k, cache.v, rows, strict=True):
        view.write(k_cache, torch.where(inside, rotate(k, cos, sin), 1e3))
        view.write(v_cache, torch.where(inside, v, 1e3))
        out = attend(q, view.read(k_cache), view.read(v_cache), view.mask)
        seen += [out[row, :n] for row, n in enumerate(n_new.tolist()) if int(slots[row]) == SESSION]
    cache.advance(slots, n_new)
    return seen


class Beside(RuleBasedStateMachine):
    """The same operations, in any order, on a cache with a shared scratch slot and on one without."""

    @initialize(seed=st.integers(0, 9))
    def start(self, seed: int) -> None:
        self.caches = make(), make(shared_scratch=False)
        self.generator, self.saved = torch.Generator().manual_seed(seed), None

    @property
    def n(self) -> int:
        return int(self.caches[1].lengths[SESSION])

    def slots(self, scratch: bool, first: int) -> tuple[Tensor, int]:
        """The session's slot, or it and the scratch slot in either order; and the index of the session."""
        order = [SESSION] if not scratch else [SESSION, SCRATCH] if first else [SCRATCH, SESSION]
        return torch.tensor(order), order.index(SESSION)

    def both(self, slots: Tensor, at: int, name: str, *values: int, **more: bool) -> None:
        """Call a method with a column for each value; columns are 0 for the scratch slot."""
        columns = [torch.zeros_like(slots).index_fill_(0, torch.tensor(at), value) for value in values]
        for cache in self.caches:
            getattr(cache, name)(slots, *columns, *([FREQUENCIES] if more else []), **more)

    @rule(data=st.data(), scratch=st.booleans(), first=st.booleans(), padding=st.integers(0, 3))
    def feed(self, data: st.DataObject, scratch: bool, first: bool, padding: int) -> None:
        slots, at = self.slots(scratch, first)
        n = data.draw(st.integers(0, min(6, MAX_LEN - self.n)))
        # A run of an example feeds the scratch slot and then empties it.
        n_new = torch.full_like(slots, data.draw(st.integers(0, n))).index_fill_(0, torch.tensor(at), n)
        rows = torch.randn(N_LAYERS, 3, len(slots), max(n + padding, 1), HEADS, DIM, generator=self.generator)
        for got, expected in zip(*(feed(cache, slots, n_new, rows) for cache in self.caches), strict=True):
            assert_same(got, expected, "attention")
        for cache in self.caches if scratch else ():
            cache.reset(torch.tensor([SCRATCH]))

    @rule(data=st.data(), scratch=st.booleans(), first=st.booleans(), rotates=st.booleans())
    def move(self, data: st.DataObject, scratch: bool, first: bool, rotates: bool) -> None:
        slots, at = self.slots(scratch, first)
        begin = data.draw(st.integers(0, self.n))
        by = data.draw(st.integers(-begin, MAX_LEN - self.n))
        self.both(slots, at, "shift", begin, by, rotates=rotates)

    @rule(data=st.data(), scratch=st.booleans(), first=st.booleans())
    def evict(self, data: st.DataObject, scratch: bool, first: bool) -> None:
        slots, at = self.slots(scratch, first)
        keep = data.draw(st.integers(0, self.n))
        self.both(slots, at, "evict", keep, data.draw(st.integers(0, self.n - keep)), rotates=True)

    @rule(data=st.data(), scratch=st.booleans(), first=st.booleans())
    def go_back(self, data: st.DataObject, scratch: bool, first: bool) -> None:
        slots, at = self.slots(scratch, first)
        length = data.draw(st.integers(0, self.n))
        self.both(slots, at, "set_length", length)
        self.both(slots, at, "wipe", length)

    @rule(slot=st.sampled_from([[SESSION], [SCRATCH], [SCRATCH, SESSION]]))
    def reset(self, slot: list[int]) -> None:
        for cache in self.caches:
            cache.reset(torch.tensor(slot))

    @rule(data=st.data())
    def save(self, data: st.DataObject) -> None:
        n = data.draw(st.integers(0, self.n))
        self.saved = [cache.save(SESSION, n) for cache in self.caches]
        for one, other in zip(*self.saved, strict=True):
            assert_same(one, other, "saved rows")

    @rule(by=st.integers(-3, 30), whole=st.booleans())
    def bring_back(self, by: int, whole: bool) -> None:
        for cache, saved in zip(self.caches, self.saved or (), strict=bool(self.saved)):
            if whole:
                cache.load(SESSION, saved)
            else:
                n = min(saved.n_rows, self.n)
                cache.restore_keys(SESSION, saved.keys, n, by, FREQUENCIES)

    @rule(noise=st.floats(-9, 9))
    def scribble_on_scratch(self, noise: float) -> None:
        """Arbitrary content of the scratch slot must not affect the session."""
        for tensor in rows_of(self.caches[0]):
            tensor[SCRATCH].fill_(noise)

    @invariant()
    def the_session_is_the_same(self) -> None:
        for number, (got, expected) in enumerate(zip(*map(own, self.caches), strict=True)):
            assert_same(got, expected, f"state tensor {number}")


TestBeside = Beside.TestCase
TestBeside.settings = settings(max_examples=30, stateful_step_count=20, deadline=None, derandomize=True)


def test_only_the_scratch_slot_is_shared() -> None:
    cache = make()
    for number, tensor in enumerate(rows_of(cache)):
        tensor[SESSION].fill_(number + 1)
    assert [float(tensor[SCRATCH].abs().max()) for tensor in rows_of(cache)] == [0] * 2 * N_LAYERS
    cache.k[1][SCRATCH].fill_(7)
    for tensors, expected in ((cache.k, 7), (cache.v, 0)):
        assert all(tensor[SCRATCH].eq(expected).all() for tensor in tensors)
    for number, tensor in enumerate(rows_of(cache)):
        assert tensor.shape == (2, HEADS, MAX_LEN + 1, DIM) and tensor[SESSION].eq(number + 1).all()
    for k, v in zip(cache.k, cache.v, strict=True):
        assert k.stride() == v.stride() and k.stride()[1:] == k[0].contiguous().stride(), "as kernels take them"
    slots = {(tensor.data_ptr(), tensor[SCRATCH].data_ptr()) for tensor in rows_of(cache)}
    assert len({at for at, _ in slots}) == 2 * N_LAYERS and len({at for _, at in slots}) == 2
    assert held_bytes(rows_of(cache)) == 2 * (N_LAYERS + 1) * (MAX_LEN + 1) * ROW_BYTES


def test_several_sessions_do_not_share_scratch_slots() -> None:
    for cache in (make(2), make(shared_scratch=False)):
        assert all(tensor.is_contiguous() for tensor in rows_of(cache))
        assert held_bytes(rows_of(cache)) == 2 * N_LAYERS * (cache.n_slots + 1) * (MAX_LEN + 1) * ROW_BYTES


@pytest.mark.parametrize("n_layers", [1, N_LAYERS])
def test_split_cache_equals_one_that_never_shared(n_layers: int) -> None:
    cache, expected = make(n_layers=n_layers), make(n_layers=n_layers, shared_scratch=False)
    for number, (tensor, other) in enumerate(zip(rows_of(cache), rows_of(expected), strict=True)):
        tensor[SESSION].fill_(number), other[SESSION].fill_(number)
    cache.split_scratch()
    for got, wanted in zip(rows_of(cache), rows_of(expected), strict=True):
        assert got.stride() == wanted.stride()
        assert_same(got, wanted)
    assert held_bytes(rows_of(cache)) == held_bytes(rows_of(expected)), "expected the shared memory to be released"
    before = rows_of(cache)
    cache.split_scratch()
    assert all(one is other for one, other in zip(rows_of(cache), before, strict=True)), "expected no second copy"


@pytest.fixture
def states() -> Iterator[tuple[SlotState, SlotState]]:
    """States of one session, with and without a shared scratch slot."""
    model, sizes = random_model(load_config(TINY)), {"n_slots": 1, "llm_len": 8, "tts_len": 12}
    return SlotState.allocate(model, **sizes, shared_scratch=True), SlotState.allocate(model, **sizes)


def test_state_reports_the_memory_it_uses(states: tuple[SlotState, SlotState]) -> None:
    shared, plain = states
    caches = shared.llm, shared.apm, shared.speech.cache
    saved = sum((len(cache.k) - 1) * (cache.k[0][0].nbytes + cache.v[0][0].nbytes) for cache in caches)
    assert min(len(cache.k) for cache in caches) > 1, "expected several layers"
    assert plain.nbytes() == sum(tensor.nbytes for tensor in plain.tensors())
    assert shared.nbytes() == plain.nbytes() - saved
    shared.split_scratch()
    assert shared.nbytes() == plain.nbytes()


def test_reset_of_a_state_with_a_shared_scratch_slot(states: tuple[SlotState, SlotState]) -> None:
    for state in states:
        scribble(state, SCRATCH, 1)
        scribble(state, SESSION, 0)
    shared, plain = states
    for got, expected in zip(shared.tensors(), plain.tensors(), strict=True):
        assert_same(got[:SCRATCH], expected[:SCRATCH])
    for slot in (SCRATCH, SESSION):
        for state in states:
            state.reset(torch.tensor([slot]))
        for got, expected in zip(shared.tensors(), plain.tensors(), strict=True):
            assert_same(got[:SCRATCH], expected[:SCRATCH])
    for got, expected in zip(shared.tensors(), plain.tensors(), strict=True):
        assert_same(got, expected)


def test_state_on_the_meta_device_shares_too() -> None:
    state = SlotState.allocate(build_on_meta(load_config(TINY)), n_slots=1, llm_len=8, tts_len=12, shared_scratch=True)
    assert not state.llm.k[0].is_contiguous() and all(tensor.is_meta for tensor in state.tensors())
