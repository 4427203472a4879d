"""Evictions of a held slot: keys that stay are as they were fed, the prompt's are turned once from the first ones."""

from collections.abc import Sequence

import pytest
import torch

import models.stages.context_mover as room
from models.errors import ContextOverflowError
from models.layers.rotary import rotary_phases, rotate
from models.load import load_model
from models.sampling.text import TokenSet, TokenSets
from models.stages.region_table import Shapes
from models.stages.runner import Rows, Runner
from models.stages.unit_steps import UnitSteps

PROMPT, UNIT, N_UNITS = 12, 20, 3


@pytest.fixture(scope="module")
def model(tiny):
    return load_model(tiny)


def make(model, *, n_slots: int = 2, llm_len: int = 256) -> UnitSteps:
    sets = TokenSets.build([TokenSet()], model.config.vocab_size)
    shapes = Shapes(batch=(n_slots,), rows=(32,), kv=(llm_len,))
    return UnitSteps(Runner(model, sets, n_slots=n_slots, llm_len=llm_len, shapes=shapes), None)


def feed(duplex: UnitSteps, slot: int, ids: Sequence[int]) -> torch.Tensor:
    """Returns: the logits after the last of them."""
    return duplex.feed([slot], [Rows(torch.tensor(ids))], [False])[0].logits.clone()


def words(model, n: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, model.config.vocab_size, (n,), generator=generator).tolist()


def talk(duplex: UnitSteps, slot: int, *, held: bool) -> None:
    """A prompt and three units."""
    feed(duplex, slot, words(duplex.runner.model, PROMPT, 0))
    if held:
        duplex.context.hold(slot, duplex.save_keys(slot, PROMPT), PROMPT)
    for unit in range(N_UNITS):
        feed(duplex, slot, words(duplex.runner.model, UNIT, 1 + unit))


def worst(got: torch.Tensor, expected: torch.Tensor) -> float:
    return (got - expected).abs().max().item()


def test_a_held_slot_and_a_turned_one_go_on_alike(model):
    held, turned = make(model), make(model)
    talk(held, 0, held=True)
    talk(turned, 0, held=False)
    for unit in range(4):
        for duplex in (held, turned):
            duplex.context.drop([0], [PROMPT], [UNIT])
        ids = words(model, UNIT, 50 + unit)
        difference = worst(feed(held, 0, ids), feed(turned, 0, ids))
        assert difference < 1e-3, f"after drop {unit}: expected the same logits, got {difference:.2g} apart"
        assert held.runner.context_len(0) == turned.runner.context_len(0) == int(held.state.llm.lengths[0])


def test_rows_that_stay_keep_their_keys_bit_for_bit(model):
    duplex = make(model)
    talk(duplex, 0, held=True)
    cache = duplex.state.llm
    before = [k[0, :, PROMPT + UNIT : PROMPT + 3 * UNIT].clone() for k in cache.k]
    prompt = [k[0, :, :PROMPT].clone() for k in cache.k]
    for n in range(2):
        duplex.context.drop([0], [PROMPT], [UNIT])
        kept = 2 * UNIT - n * UNIT
        for k, old, first in zip(cache.k, before, prompt, strict=True):
            assert torch.equal(k[0, :, PROMPT : PROMPT + kept], old[:, n * UNIT :]), f"drop {n} turned a key that stays"
            phase = rotary_phases(torch.tensor((n + 1) * UNIT), model.llm.model.frequencies)
            expected = rotate(first, phase.cos(), phase.sin())
            assert torch.equal(k[0, :, :PROMPT], expected), f"drop {n}: the prompt was not turned from its first keys"
    assert int(cache.positions[0]) == PROMPT + N_UNITS * UNIT, "the next position went back"


def test_no_error_adds_up_in_bfloat16(model):
    """Eight evictions leave a row of the prompt as far off as one does; turned each time, it drifts."""
    drift = {}
    for held in (True, False):
        duplex = make(model)
        cache = duplex.state.llm
        cache.k = [k.bfloat16() for k in cache.k]
        generator = torch.Generator().manual_seed(3)
        rows = [torch.randn(k[0, :, : PROMPT + 9 * UNIT].shape, generator=generator).bfloat16() for k in cache.k]
        for k, own in zip(cache.k, rows, strict=True):
            k[0, :, : own.shape[1]] = own
        total = rows[0].shape[1]
        cache.set_length(torch.tensor([0]), torch.tensor([total]))
        duplex.runner.set_context_len(0, total)
        if held:
            duplex.context.hold(0, duplex.save(0), PROMPT)
        for _ in range(8):
            duplex.context.drop([0], [PROMPT], [UNIT])
        last = rows[0][:, PROMPT + 8 * UNIT :].double()
        got = cache.k[0][0, :, PROMPT : PROMPT + UNIT].double()
        phase = rotary_phases(torch.tensor(0 if held else -8 * UNIT), model.llm.model.frequencies).double()
        left, right = last.chunk(2, dim=-1)
        expected = torch.cat((left * phase.cos() - right * phase.sin(), right * phase.cos() + left * phase.sin()), -1)
        drift[held] = ((got - expected).norm() / expected.norm()).item()
    assert drift[True] == 0, f"expected rows that stay untouched, got {drift[True]:.2g} off"
    assert drift[False] > 3e-3, f"turning each time: expected to see its error, got {drift[False]:.2g}"


def test_positions_are_brought_back_before_they_run_away(model, monkeypatch):
    monkeypatch.setattr(room, "MAX_AHEAD", 2 * UNIT)
    held, turned = make(model), make(model)
    talk(held, 0, held=True)
    talk(turned, 0, held=False)
    furthest = 0
    for unit in range(7):
        for duplex in (held, turned):
            duplex.context.drop([0], [PROMPT], [UNIT])
        furthest = max(furthest, int(held.state.llm.positions[0] - held.state.llm.lengths[0]))
        ids = words(model, UNIT, 80 + unit)
        difference = worst(feed(held, 0, ids), feed(turned, 0, ids))
        assert difference < 1e-3, f"after drop {unit}: expected the same logits, got {difference:.2g} apart"
    assert furthest == 2 * UNIT, f"expected positions at most {2 * UNIT} ahead, got {furthest}"


@pytest.mark.parametrize("n_ids", [3, 30, 60])
def test_a_held_slot_rebuilds_as_a_turned_one(model, n_ids):
    """Fewer rows than left, or more: the kept ones move either way."""
    held, turned = make(model), make(model)
    for duplex, hold in ((held, True), (turned, False)):
        talk(duplex, 0, held=hold)
        duplex.context.rebuild(0, PROMPT, PROMPT + 2 * UNIT, words(model, n_ids, 9))
        duplex.context.rebuild(0, PROMPT, PROMPT + n_ids, words(model, n_ids + 2, 10))
        assert duplex.runner.context_len(0) == int(duplex.state.llm.lengths[0]) == PROMPT + n_ids + 2 + UNIT
    ids = words(model, UNIT, 11)
    difference = worst(feed(held, 0, ids), feed(turned, 0, ids))
    assert difference < 1e-3, f"expected the same logits, got {difference:.2g} apart"


def test_a_rebuild_that_does_not_fit_changes_nothing(model):
    duplex = make(model, llm_len=96)
    talk(duplex, 0, held=True)
    before = [tensor.clone() for tensor in duplex.state.llm.tensors()]
    with pytest.raises(ContextOverflowError):
        duplex.context.rebuild(0, PROMPT, PROMPT + UNIT, words(model, 60, 1))
    changed = [not torch.equal(a, b) for a, b in zip(before, duplex.state.llm.tensors(), strict=True)]
    assert not any(changed), f"expected nothing changed, got {sum(changed)} tensors"


def test_slots_of_both_kinds_share_a_call_and_neighbours_stay(model):
    duplex = make(model, n_slots=3)
    for slot, held in ((0, True), (1, False), (2, True)):
        talk(duplex, slot, held=held)
    neighbour = [k[2].clone() for k in duplex.state.llm.k]
    duplex.context.drop([0, 1], [PROMPT, PROMPT], [UNIT, 2 * UNIT])
    assert [duplex.runner.context_len(slot) for slot in range(3)] == [52, 32, 72]
    assert duplex.state.llm.lengths[:3].tolist() == [52, 32, 72]
    assert duplex.state.llm.positions[:3].tolist() == [72, 32, 72]
    same = all(torch.equal(a, k[2]) for a, k in zip(neighbour, duplex.state.llm.k, strict=True))
    assert same, "a slot that was not named has moved"


def test_an_emptied_slot_holds_nothing(model):
    duplex = make(model)
    slot = duplex.open()
    talk(duplex, slot, held=True)
    assert duplex.context.n_held(slot) == PROMPT
    duplex.close(slot)
    assert duplex.context.n_held(slot) is None
