"""Slots: sizes, acquire and release in any order, and complete resets."""

from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from models.checkpoint.config import OmniConfig, load_config
from models.errors import SlotError
from models.layers.kv_pages import PageTable
from models.load import build_on_meta
from models.omni import OmniModel
from models.random_weights import random_model
from models.stages.state import SlotPool, SlotState
from tests.models.stages.slot_copies import assert_same, copy_state, scribble

TINY = Path(__file__).parents[3] / "assets" / "tiny"
N_SLOTS = 3


def allocate(model: OmniModel, **lengths: int) -> SlotState:
    return SlotState.allocate(model, **{"n_slots": N_SLOTS, "llm_len": 8, "tts_len": 12, **lengths})


@pytest.fixture
def state(tiny_model: OmniModel) -> SlotState:
    return allocate(tiny_model)


@pytest.fixture(params=["init_vision", "init_audio", "init_tts"])
def partial(request: pytest.FixtureRequest) -> tuple[str, OmniConfig]:
    return request.param, load_config(TINY).model_copy(update={request.param: False})


def test_disabled_parts_allocate_nothing(partial: tuple[str, OmniConfig], tiny_model: OmniModel) -> None:
    key, config = partial
    state = allocate(random_model(config))
    got = {name: getattr(state, name) is not None for name in ("apm", "mel", "speech")}
    audio, tts = key != "init_audio", key != "init_tts"
    assert got == {"apm": audio, "mel": audio, "speech": tts}, f"{key} false: got {got}"
    whole = allocate(tiny_model)
    if key == "init_vision":
        assert state.nbytes() == whole.nbytes()
    else:
        assert state.nbytes() < whole.nbytes()
    before = copy_state(state)
    scribble(state, 1, seed=0)
    state.reset(torch.tensor([1]))
    assert_same(state, before)


def test_tensors_lists_every_tensor(state: SlotState) -> None:
    """Compared with a walk over all attributes; tables of pages are addresses and not content."""
    seen: dict[int, Tensor] = {}

    def visit(part: object) -> None:
        if isinstance(part, Tensor):
            seen[part.data_ptr()] = part
        elif isinstance(part, list):
            for item in part:
                visit(item)
        elif hasattr(part, "__dict__") and not isinstance(part, PageTable):
            for item in vars(part).values():
                visit(item)

    visit(state)
    assert {tensor.data_ptr() for tensor in state.tensors()} == seen.keys()
    assert len(state.tensors()) == len(seen), "expected each tensor once"
    assert state.nbytes() == sum(tensor.numel() * tensor.element_size() for tensor in seen.values())
    for tensor in seen.values():
        assert tensor.shape[0] == N_SLOTS + 1, f"expected {N_SLOTS + 1} slots first, got {tuple(tensor.shape)}"


def test_sizes_follow_the_given_lengths(tiny_model: OmniModel) -> None:
    config = tiny_model.config
    state = allocate(tiny_model, n_slots=2, llm_len=24, tts_len=40)
    assert state.llm.k[0].shape == (3, config.num_key_value_heads, 24 + 1, config.head_dim)
    assert (len(state.llm.k), len(state.llm.v)) == (config.num_hidden_layers,) * 2
    assert state.speech.cache.v[1].shape == (
        3,
        config.tts_config.num_key_value_heads,
        40 + 1,
        config.tts_config.head_dim,
    )
    audio = config.audio_config
    heads = audio.encoder_attention_heads
    assert state.apm.k[0].shape == (3, heads, audio.max_source_positions + 1, audio.d_model // heads)
    assert state.scratch == 2
    default = SlotState.allocate(tiny_model, n_slots=1, llm_len=8)
    assert default.speech.cache.max_len == config.tts_config.max_position_embeddings
    assert allocate(tiny_model, llm_len=9).nbytes() - allocate(tiny_model, llm_len=8).nbytes() == (
        2 * config.num_hidden_layers * (N_SLOTS + 1) * config.num_key_value_heads * config.head_dim * 4
    )


def test_state_has_the_models_dtype() -> None:
    state = allocate(build_on_meta(load_config(TINY)).to(torch.bfloat16))
    for cache in (state.llm, state.apm, state.speech.cache):
        assert {tensor.dtype for tensor in (*cache.k, *cache.v)} == {torch.bfloat16}
    assert all(tensor.is_meta for tensor in state.tensors())


@pytest.mark.parametrize("slots", [[0], [2, 0], [3], [0, 1, 2, 3]])
def test_reset_restores_the_initial_state_of_the_given_slots_only(state: SlotState, slots: list[int]) -> None:
    fresh = copy_state(state)
    for slot in range(N_SLOTS + 1):
        scribble(state, slot, seed=slot)
    scribbled = copy_state(state)
    state.reset(torch.tensor(slots))
    assert_same(state, fresh, slots)
    assert_same(state, scribbled, sorted({0, 1, 2, 3} - set(slots)))


@pytest.mark.parametrize("slot", [-1, N_SLOTS, N_SLOTS + 5])
def test_refuses_to_release_slots_that_do_not_exist(state: SlotState, slot: int) -> None:
    pool, before = SlotPool(state), copy_state(state)
    pool.acquire()
    with pytest.raises(SlotError, match=f"expected a leased slot, got {slot}$"):
        pool.release(slot)
    assert pool.n_free == N_SLOTS - 1
    assert_same(state, before)


class Leases(RuleBasedStateMachine):
    """Acquire and release in any order; every leased slot keeps its content."""

    @initialize()
    def start(self) -> None:
        self.state = allocate(random_model(load_config(TINY).model_copy(update={"init_audio": False})), tts_len=4)
        self.fresh = copy_state(self.state)
        self.pool = SlotPool(self.state)
        self.leased: dict[int, list[Tensor]] = {}

    @precondition(lambda self: len(self.leased) < N_SLOTS)
    @rule(seed=st.integers(0, 9))
    def acquire(self, seed: int) -> None:
        slot = self.pool.acquire()
        assert slot not in self.leased, f"slot {slot} leased twice"
        assert 0 <= slot < N_SLOTS, f"expected a session's slot, got {slot}"
        assert_same(self.state, self.fresh, [slot])
        scribble(self.state, slot, seed)
        self.leased[slot] = copy_state(self.state)

    @precondition(lambda self: len(self.leased) == N_SLOTS)
    @rule()
    def acquire_too_many(self) -> None:
        with pytest.raises(SlotError, match=f"expected a free slot, got all {N_SLOTS} leased"):
            self.pool.acquire()

    @precondition(lambda self: self.leased)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.leased)))
        self.pool.release(slot)
        del self.leased[slot]

    @rule(slot=st.integers(-2, N_SLOTS + 1))
    def release_free_slot(self, slot: int) -> None:
        if slot not in self.leased:
            with pytest.raises(SlotError, match=f"expected a leased slot, got {slot}$"):
                self.pool.release(slot)

    @invariant()
    def slots_keep_their_content(self) -> None:
        assert self.pool.n_free == N_SLOTS - len(self.leased)
        for slot in range(N_SLOTS):
            assert_same(self.state, self.leased.get(slot, self.fresh), [slot])


TestLeases = Leases.TestCase
TestLeases.settings = settings(max_examples=30, stateful_step_count=20, deadline=None, derandomize=True)


def test_mel_state_has_the_bins_of_the_config(tiny: Path) -> None:
    config = load_config(tiny)
    config = config.model_copy(update={"audio_config": config.audio_config.model_copy(update={"num_mel_bins": 40})})
    state = SlotState.allocate(random_model(config), n_slots=1, llm_len=16, tts_len=16)
    assert state.mel.raw.shape[-1] == 40
