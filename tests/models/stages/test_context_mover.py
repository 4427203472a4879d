"""Evictions of a held slot: kept keys do not change, and the prompt's keys are rotated once from their copy."""

from collections.abc import Sequence

import pytest
import torch

from models.errors import ContextOverflowError
from models.layers.rotary import rotary_phases, rotate
from models.load import load_model
from models.sampling.text import TokenSet, TokenSets
from models.stages import context_mover
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


def feed(steps: UnitSteps, slot: int, ids: Sequence[int]) -> torch.Tensor:
    """Feed ids. Returns: the logits after the last one."""
    return steps.feed([slot], [Rows(torch.tensor(ids))], [False])[0].logits.clone()


def random_ids(model, n: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, model.config.vocab_size, (n,), generator=generator).tolist()


def feed_units(steps: UnitSteps, slot: int, *, held: bool) -> None:
    """Feed a prompt and three units."""
    feed(steps, slot, random_ids(steps.runner.model, PROMPT, 0))
    if held:
        steps.context.hold(slot, steps.save_keys(slot, PROMPT), PROMPT)
    for unit in range(N_UNITS):
        feed(steps, slot, random_ids(steps.runner.model, UNIT, 1 + unit))


def max_difference(got: torch.Tensor, expected: torch.Tensor) -> float:
    return (got - expected).abs().max().item()


def test_held_and_rotated_slots_give_equal_logits(model):
    held, rotated = make(model), make(model)
    feed_units(held, 0, held=True)
    feed_units(rotated, 0, held=False)
    for unit in range(4):
        for steps in (held, rotated):
            steps.context.drop([0], [PROMPT], [UNIT])
        ids = random_ids(model, UNIT, 50 + unit)
        difference = max_difference(feed(held, 0, ids), feed(rotated, 0, ids))
        assert difference < 1e-3, f"after drop {unit}: expected the same logits, got {difference:.2g} apart"
        assert held.runner.context_len(0) == rotated.runner.context_len(0) == int(held.state.llm.lengths[0])


def test_kept_rows_keep_their_keys_bit_for_bit(model):
    steps = make(model)
    feed_units(steps, 0, held=True)
    cache = steps.state.llm
    before = [k[0, :, PROMPT + UNIT : PROMPT + 3 * UNIT].clone() for k in cache.k]
    prompt = [k[0, :, :PROMPT].clone() for k in cache.k]
    for n in range(2):
        steps.context.drop([0], [PROMPT], [UNIT])
        kept = 2 * UNIT - n * UNIT
        for k, old, first in zip(cache.k, before, prompt, strict=True):
            assert torch.equal(k[0, :, PROMPT : PROMPT + kept], old[:, n * UNIT :]), f"drop {n} changed a kept key"
            phase = rotary_phases(torch.tensor((n + 1) * UNIT), model.llm.model.frequencies)
            expected = rotate(first, phase.cos(), phase.sin())
            assert torch.equal(k[0, :, :PROMPT], expected), f"drop {n}: expected the prompt rotated from its copy"
    assert int(cache.positions[0]) == PROMPT + N_UNITS * UNIT, "expected the next position unchanged"


def test_rounding_errors_do_not_add_up_in_bfloat16(model):
    """Eight evictions of a held slot change no kept key; with a rotation each time, errors add up."""
    drift = {}
    for held in (True, False):
        steps = make(model)
        cache = steps.state.llm
        cache.k = [k.bfloat16() for k in cache.k]
        generator = torch.Generator().manual_seed(3)
        rows = [torch.randn(k[0, :, : PROMPT + 9 * UNIT].shape, generator=generator).bfloat16() for k in cache.k]
        for k, own in zip(cache.k, rows, strict=True):
            k[0, :, : own.shape[1]] = own
        total = rows[0].shape[1]
        cache.set_length(torch.tensor([0]), torch.tensor([total]))
        steps.runner.set_context_len(0, total)
        if held:
            steps.context.hold(0, steps.save_keys(0, PROMPT), PROMPT)
        for _ in range(8):
            steps.context.drop([0], [PROMPT], [UNIT])
        last = rows[0][:, PROMPT + 8 * UNIT :].double()
        got = cache.k[0][0, :, PROMPT : PROMPT + UNIT].double()
        phase = rotary_phases(torch.tensor(0 if held else -8 * UNIT), model.llm.model.frequencies).double()
        left, right = last.chunk(2, dim=-1)
        expected = torch.cat((left * phase.cos() - right * phase.sin(), right * phase.cos() + left * phase.sin()), -1)
        drift[held] = ((got - expected).norm() / expected.norm()).item()
    assert drift[True] == 0, f"expected kept rows unchanged, got {drift[True]:.2g} off"
    assert drift[False] > 3e-3, f"rotated each time: expected a visible error, got {drift[False]:.2g}"


def test_positions_stay_within_their_limit(model, monkeypatch):
    monkeypatch.setattr(context_mover, "MAX_AHEAD", 2 * UNIT)
    held, rotated = make(model), make(model)
    feed_units(held, 0, held=True)
    feed_units(rotated, 0, held=False)
    furthest = 0
    for unit in range(7):
        for steps in (held, rotated):
            steps.context.drop([0], [PROMPT], [UNIT])
        furthest = max(furthest, int(held.state.llm.positions[0] - held.state.llm.lengths[0]))
        ids = random_ids(model, UNIT, 80 + unit)
        difference = max_difference(feed(held, 0, ids), feed(rotated, 0, ids))
        assert difference < 1e-3, f"after drop {unit}: expected the same logits, got {difference:.2g} apart"
    assert furthest == 2 * UNIT, f"expected positions at most {2 * UNIT} ahead, got {furthest}"


@pytest.mark.parametrize("n_ids", [3, 30, 60])
def test_rebuild_of_held_and_rotated_slots_gives_equal_logits(model, n_ids):
    """With fewer or more rows than were dropped: kept rows move back or forth."""
    held, rotated = make(model), make(model)
    for steps, hold in ((held, True), (rotated, False)):
        feed_units(steps, 0, held=hold)
        steps.context.rebuild(0, PROMPT, PROMPT + 2 * UNIT, random_ids(model, n_ids, 9))
        steps.context.rebuild(0, PROMPT, PROMPT + n_ids, random_ids(model, n_ids + 2, 10))
        assert steps.runner.context_len(0) == int(steps.state.llm.lengths[0]) == PROMPT + n_ids + 2 + UNIT
    ids = random_ids(model, UNIT, 11)
    difference = max_difference(feed(held, 0, ids), feed(rotated, 0, ids))
    assert difference < 1e-3, f"expected the same logits, got {difference:.2g} apart"


def test_refused_rebuild_changes_nothing(model):
    steps = make(model, llm_len=96)
    feed_units(steps, 0, held=True)
    before = [tensor.clone() for tensor in steps.state.llm.tensors()]
    with pytest.raises(ContextOverflowError):
        steps.context.rebuild(0, PROMPT, PROMPT + UNIT, random_ids(model, 60, 1))
    changed = [not torch.equal(a, b) for a, b in zip(before, steps.state.llm.tensors(), strict=True)]
    assert not any(changed), f"expected nothing changed, got {sum(changed)} tensors"


def test_drop_in_held_and_other_slots_does_not_change_neighbours(model):
    steps = make(model, n_slots=3)
    for slot, held in ((0, True), (1, False), (2, True)):
        feed_units(steps, slot, held=held)
    neighbour = [k[2].clone() for k in steps.state.llm.k]
    steps.context.drop([0, 1], [PROMPT, PROMPT], [UNIT, 2 * UNIT])
    assert [steps.runner.context_len(slot) for slot in range(3)] == [52, 32, 72]
    assert steps.state.llm.lengths[:3].tolist() == [52, 32, 72]
    assert steps.state.llm.positions[:3].tolist() == [72, 32, 72]
    same = all(torch.equal(a, k[2]) for a, k in zip(neighbour, steps.state.llm.k, strict=True))
    assert same, "expected the third slot unchanged"


def test_closed_slot_is_not_held(model):
    steps = make(model)
    slot = steps.open()
    feed_units(steps, slot, held=True)
    assert steps.context.n_held(slot) == PROMPT
    steps.close(slot)
    assert steps.context.n_held(slot) is None


# --- another prompt -------------------------------------------------------------------------------


def built_by_hand(steps: UnitSteps, slot: int, prompt: Sequence[int], keys, values, by: int) -> None:
    """Fill an empty slot: feed a prompt, then write rows of another slot, with keys rotated by `by` positions."""
    feed(steps, slot, prompt)
    cache, n = steps.state.llm, len(prompt)
    phase = rotary_phases(torch.tensor(by), steps.runner.model.llm.model.frequencies)
    for layer, (k, v) in enumerate(zip(keys, values, strict=True)):
        cache.k[layer][slot, :, n : n + k.shape[1]] = rotate(k, phase.cos(), phase.sin())
        cache.v[layer][slot, :, n : n + v.shape[1]] = v
    total = n + keys[0].shape[1]
    cache.set_length(torch.tensor([slot]), torch.tensor([total]))
    steps.runner.set_context_len(slot, total)


@pytest.mark.parametrize("n_new", [PROMPT - 5, PROMPT, PROMPT + 40], ids=["shorter", "equal", "longer"])
@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("n_dropped", [0, UNIT])
def test_another_prompt_is_followed_by_the_same_rows(model, n_new, held, n_dropped):
    """As a slot built from the new prompt and the moved rows: keys, values, next position, logits."""
    steps, other = make(model), make(model)
    feed_units(steps, 0, held=held)
    if n_dropped:
        steps.context.drop([0], [PROMPT], [n_dropped])
    cache, ahead = steps.state.llm, n_dropped if held else 0
    total = steps.runner.context_len(0)
    keys, values = ([layer[0, :, PROMPT:total].clone() for layer in part] for part in (cache.k, cache.v))
    prompt = random_ids(model, n_new, 70)
    front = steps.context.compute_front(0, Rows(torch.tensor(prompt)))
    steps.context.replace_front(0, PROMPT, front, n_new if held else None)
    by = n_new - PROMPT
    built_by_hand(other, 0, prompt, keys, values, by - ahead)
    assert steps.runner.context_len(0) == int(cache.lengths[0]) == total + by
    assert int(cache.positions[0]) == (total + ahead if held else total + by), "next position"
    moved = slice(n_new, total + by)
    for k, v, old_k, old_v, new_k in zip(cache.k, cache.v, keys, values, other.state.llm.k, strict=True):
        assert torch.equal(v[0, :, moved], old_v), "expected the values of the moved rows"
        expected = old_k if held else new_k[0, :, moved]
        worst = max_difference(k[0, :, moved], expected)
        assert worst <= (0 if held else 1e-5), f"expected the moved keys, got {worst:.2g} apart"
        assert not k[0, :, total + by :].any(), "expected nothing after the last row"
    ids = random_ids(model, UNIT, 71)
    difference = max_difference(feed(steps, 0, ids), feed(other, 0, ids))
    assert difference < 1e-3, f"expected the logits of the slot built by hand, got {difference:.2g} apart"
    if held:
        steps.context.drop([0], [n_new], [UNIT])
        other.context.drop([0], [n_new], [UNIT])
        difference = max_difference(feed(steps, 0, ids), feed(other, 0, ids))
        assert difference < 1e-3, f"after an eviction: expected the same logits, got {difference:.2g} apart"


def test_many_prompts_do_not_wear_out_the_rows(model, monkeypatch):
    """Kept keys are not rotated, and positions stay within their limit."""
    monkeypatch.setattr(context_mover, "MAX_AHEAD", 60)
    steps, other = make(model), make(model)
    feed_units(steps, 0, held=True)
    cache = steps.state.llm
    total = steps.runner.context_len(0)
    keys, values = ([layer[0, :, PROMPT:total].clone() for layer in part] for part in (cache.k, cache.v))
    n_old = PROMPT
    for number, n_new in enumerate((50, 3, 80, 2, 12)):
        prompt = random_ids(model, n_new, 100 + number)
        front = steps.context.compute_front(0, Rows(torch.tensor(prompt)))
        steps.context.replace_front(0, n_old, front, n_new)
        n_old = n_new
        ahead = int(cache.positions[0] - cache.lengths[0])
        assert abs(ahead) <= 60, f"expected positions at most 60 ahead, got {ahead}"
    built_by_hand(other, 0, prompt, keys, values, n_old - PROMPT)
    ids = random_ids(model, UNIT, 72)
    difference = max_difference(feed(steps, 0, ids), feed(other, 0, ids))
    assert difference < 1e-3, f"expected the same logits, got {difference:.2g} apart"


@pytest.mark.parametrize("n_new", [5, 90])
@pytest.mark.parametrize("fails", [False, True])
def test_computing_another_prompt_changes_no_bit_of_the_slot(model, n_new, fails, monkeypatch):
    """Also where it is longer than the slot's content, and where the model fails."""
    steps = make(model)
    feed_units(steps, 0, held=True)
    feed_units(steps, 1, held=False)
    steps.context.drop([0], [PROMPT], [UNIT])
    before = [tensor[:2].clone() for tensor in steps.state.tensors()]
    counters = steps.counters(0)
    rows = Rows(torch.tensor(random_ids(model, n_new, 5)))
    if fails:
        run = steps.regions.run

        def run_then_fail(*given, **options):
            run(*given, **options)
            raise RuntimeError("device")

        monkeypatch.setattr(steps.regions, "run", run_then_fail)
        with pytest.raises(RuntimeError, match="device"):
            steps.context.compute_front(0, rows)
    else:
        front = steps.context.compute_front(0, rows)
        assert len(front.keys) == len(front.values) == len(steps.state.llm.k) and front.n_rows == n_new
    changed = [not torch.equal(a, b[:2]) for a, b in zip(before, steps.state.tensors(), strict=True)]
    assert not any(changed), f"expected nothing changed, got {sum(changed)} tensors"
    assert steps.counters(0) == counters


def test_refused_prompt_changes_nothing(model):
    steps = make(model, llm_len=96)
    feed_units(steps, 0, held=True)
    front = steps.context.compute_front(0, Rows(torch.tensor(random_ids(model, 40, 1))))
    before = [tensor.clone() for tensor in steps.state.llm.tensors()]
    with pytest.raises(ContextOverflowError):
        steps.context.replace_front(0, PROMPT, front, 40)
    changed = [not torch.equal(a, b) for a, b in zip(before, steps.state.llm.tensors(), strict=True)]
    assert not any(changed), f"expected nothing changed, got {sum(changed)} tensors"
