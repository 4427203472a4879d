"""Language model over slots: every batching, padding, split and bucket equals one plain pass.

Tolerances: 1e-5 between two ways through the same float32 code, 1e-4 against the float64 reference.
"""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.layers.backend import TORCH
from models.layers.kv_cache import KVCache
from tests.models.compare import assert_close, assert_same
from tests.models.layers import transformer_reference as slow
from tests.parity.build import slot_cache

N_SLOTS, MAX_LEN, KV = 4, 64, 48
NAN = float("nan")
few = settings(max_examples=25)


@pytest.fixture(scope="session")
def llm(tiny_model):
    return tiny_model.llm


@pytest.fixture(scope="session")
def new_cache(tiny_model):
    return lambda: slot_cache(tiny_model, "llm", n_slots=N_SLOTS, max_len=MAX_LEN)


@pytest.fixture(scope="session")
def rows(tiny_model):
    """(seed, n) -> embeddings [n, D] of the size of the checkpoint's own."""
    table = tiny_model.llm.model.embed_tokens.weight

    def draw(seed: int, n: int) -> Tensor:
        return torch.randn(n, table.shape[1], generator=torch.Generator().manual_seed(seed)) * table.std()

    return draw


def feed(llm, cache: KVCache, parts: dict[int, Tensor], padding: int = 0, filler: float = NAN, kv_len: int = KV):
    """Feed slot -> rows [n, D] in one call. Returns: slot -> hidden [n, D], slot -> logits [V]."""
    n_new = torch.tensor([len(part) for part in parts.values()])
    embeds = torch.full((len(parts), max(1, int(n_new.max())) + padding, llm.lm_head.in_features), filler)
    for row, part in enumerate(parts.values()):
        embeds[row, : len(part)] = part
    hidden, logits = llm.prefill(embeds, cache, torch.tensor(list(parts)), n_new, kv_len, TORCH)
    return (
        {slot: hidden[row, : len(part)] for row, (slot, part) in enumerate(parts.items())},
        dict(zip(parts, logits, strict=True)),
    )


def slot_rows(cache: KVCache, slot: int) -> list[Tensor]:
    return [tensor[slot].clone() for tensor in cache.tensors()]


def assert_slot(cache: KVCache, slot: int, expected: list[Tensor]) -> None:
    for number, (got, wanted) in enumerate(zip(slot_rows(cache, slot), expected, strict=True)):
        assert_same(got, wanted, f"slot {slot}, state tensor {number}")


def reference(tiny_model, embeds: Tensor, **about) -> Tensor:
    config = tiny_model.config
    return slow.decoder(
        tiny_model.llm.model,
        embeds,
        head_dim=config.head_dim,
        theta=config.rope_theta,
        eps=config.rms_norm_eps,
        qk_norm=True,
        **about,
    )


@few
@given(seed=st.integers(0, 2**20), n=st.integers(1, 40))
def test_prefill_equals_float64_reference(tiny_model, llm, rows, new_cache, seed, n):
    embeds = rows(seed, n)
    hidden, logits = feed(llm, new_cache(), {2: embeds}, padding=3)
    expected = reference(tiny_model, embeds)
    assert_close(hidden[2], expected, 1e-4, "hidden")
    assert_close(logits[2], expected[-1] @ llm.lm_head.weight.double().T, 1e-4, "logits")
    assert logits[2].dtype == torch.float32


@few
@given(seed=st.integers(0, 2**20), data=st.data())
def test_batch_equals_single_runs(llm, rows, new_cache, seed, data):
    """Slots of different lengths get different numbers of rows, also none, in any order."""
    order = data.draw(st.permutations(range(N_SLOTS)))[: data.draw(st.integers(2, N_SLOTS))]
    held = {slot: rows(seed + slot, data.draw(st.integers(0, 24))) for slot in order}
    new = {slot: rows(seed + 10 + slot, data.draw(st.integers(0, 20))) for slot in order}
    together, alone = new_cache(), new_cache()
    feed(llm, together, held)
    untouched = {slot: slot_rows(together, slot) for slot in order if not len(new[slot])}
    hidden, logits = feed(llm, together, new, padding=data.draw(st.integers(0, 4)))
    for slot in order:
        feed(llm, alone, {slot: held[slot]})
        expected, expected_logits = feed(llm, alone, {slot: new[slot]})
        assert_close(hidden[slot], expected[slot], 1e-5, f"slot {slot} hidden")
        if len(new[slot]):
            assert_close(logits[slot], expected_logits[slot], 1e-5, f"slot {slot} logits")
        for got, wanted in zip(slot_rows(together, slot), slot_rows(alone, slot), strict=True):
            assert_close(got, wanted, 1e-5, f"slot {slot} state")
    for slot, expected in untouched.items():
        assert_slot(together, slot, expected)


@few
@given(seed=st.integers(0, 2**20), cuts=st.lists(st.integers(0, 40), max_size=4), n=st.integers(1, 40))
def test_prefill_may_be_split_at_any_row(llm, rows, new_cache, seed, cuts, n):
    embeds, cache = rows(seed, n), new_cache()
    whole, logits = feed(llm, new_cache(), {1: embeds})
    edges = sorted({0, n, *(cut for cut in cuts if cut < n)})
    for start, end in pairwise(edges):
        hidden, last = feed(llm, cache, {1: embeds[start:end]}, padding=2)
        assert_close(hidden[1], whole[1][start:end], 1e-5, f"rows {start}..{end - 1}")
    assert_close(last[1], logits[1], 1e-5, "logits")
    assert int(last[1].argmax()) == int(logits[1].argmax())
    assert int(cache.lengths[1]) == n


@few
@given(seed=st.integers(0, 2**20), data=st.data())
def test_decoding_ids_equals_prefilling_them(llm, new_cache, seed, data):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, llm.lm_head.out_features, (data.draw(st.integers(2, 12)),), generator=generator)
    split = data.draw(st.integers(1, len(ids) - 1))
    embeds = llm.model.embed_tokens(ids)
    whole, logits = feed(llm, new_cache(), {3: embeds})
    cache = new_cache()
    feed(llm, cache, {3: embeds[:split]})
    for step, token in enumerate(ids[split:], start=split):
        hidden, last = llm.decode(token[None], cache, torch.tensor([3]), torch.tensor([True]), KV, TORCH)
        assert_close(hidden[0], whole[3][step], 1e-5, f"hidden of token {step}")
    assert last.dtype == torch.float32
    assert_close(last[0], logits[3], 1e-5, "logits")


@few
@given(seed=st.integers(0, 2**20), data=st.data())
def test_decoding_some_slots_changes_no_other_slot(llm, rows, new_cache, seed, data):
    cache = new_cache()
    feed(llm, cache, {slot: rows(seed + slot, 3 + 5 * slot) for slot in range(N_SLOTS)})
    before = {slot: slot_rows(cache, slot) for slot in range(N_SLOTS)}
    called = data.draw(st.permutations(range(N_SLOTS)))[: data.draw(st.integers(1, N_SLOTS))]
    active = data.draw(st.lists(st.booleans(), min_size=len(called), max_size=len(called)))
    ids = torch.arange(len(called)) + seed % 100
    llm.decode(ids, cache, torch.tensor(called), torch.tensor(active), KV, TORCH)
    fed = {slot for slot, on in zip(called, active, strict=True) if on}
    for slot in range(N_SLOTS):
        if slot in fed:
            assert int(cache.lengths[slot]) == int(before[slot][-3]) + 1
        else:
            assert_slot(cache, slot, before[slot])


def test_reused_slot_equals_a_new_one(llm, rows, new_cache):
    used, fresh = new_cache(), new_cache()
    feed(llm, used, {1: rows(0, 30), 2: rows(1, 20)})
    feed(llm, used, {1: torch.full_like(rows(0, 4), NAN)})
    used.positions[1] += 1
    used.reset(torch.tensor([1]))
    for n, seed in ((17, 2), (5, 3)):
        got, expected = (feed(llm, cache, {1: rows(seed, n)}, padding=2) for cache in (used, fresh))
        assert_same(got[0][1], expected[0][1], "hidden")
        assert_same(got[1][1], expected[1][1], "logits")
    assert_slot(used, 1, slot_rows(fresh, 1))


@few
@given(seed=st.integers(0, 2**20), n=st.integers(1, 20), held=st.integers(0, 20))
def test_result_does_not_depend_on_kv_len(llm, rows, new_cache, seed, n, held):
    results = []
    for kv_len in (held + n, 48, MAX_LEN):
        cache = new_cache()
        feed(llm, cache, {0: rows(seed, held)}, kv_len=MAX_LEN)
        results.append(feed(llm, cache, {0: rows(seed + 1, n)}, kv_len=kv_len))
    for hidden, logits in results[1:]:
        assert_close(hidden[0], results[0][0][0], 1e-5, "hidden")
        assert_close(logits[0], results[0][1][0], 1e-5, "logits")


def test_result_does_not_depend_on_the_slot_number(llm, rows, new_cache):
    expected = None
    for slot in range(N_SLOTS):
        cache = new_cache()
        feed(llm, cache, {slot: rows(0, 20)})
        hidden, logits = feed(llm, cache, {slot: rows(1, 7)}, padding=4)
        step = llm.decode(torch.tensor([5]), cache, torch.tensor([slot]), torch.tensor([True]), KV, TORCH)
        got = [hidden[slot], logits[slot], *step, *slot_rows(cache, slot)]
        expected = expected or got
        for tensor, wanted in zip(got, expected, strict=True):
            assert_same(tensor, wanted, f"slot {slot}")


def test_nan_does_not_reach_other_slots(llm, rows, new_cache):
    clean, dirty = new_cache(), new_cache()
    for cache, filler in ((clean, 0.0), (dirty, NAN)):
        feed(llm, cache, {0: rows(0, 9), 1: rows(1, 9) + filler})
    got, expected = (feed(llm, cache, {1: rows(2, 3), 0: rows(3, 5)}, padding=2) for cache in (dirty, clean))
    assert got[0][1].isnan().all(), "expected NaN in the slot that was fed NaN"
    assert_same(got[0][0], expected[0][0], "hidden of the clean slot")
    assert_slot(dirty, 0, slot_rows(clean, 0))


def test_slot_can_be_filled_to_its_last_row(tiny_model, llm, rows, new_cache):
    """The bucket extends past the end of the cache, but only with padding."""
    cache, embeds = new_cache(), rows(0, MAX_LEN)
    feed(llm, cache, {0: rows(5, 9)}, kv_len=MAX_LEN)
    other = slot_rows(cache, 0)
    feed(llm, cache, {1: embeds[:-2]}, kv_len=MAX_LEN)
    hidden, _ = feed(llm, cache, {1: embeds[-2:]}, padding=14, kv_len=MAX_LEN)
    assert int(cache.lengths[1]) == MAX_LEN
    assert_close(hidden[1], reference(tiny_model, embeds)[-2:], 1e-4)
    assert_slot(cache, 0, other)


def test_window_hides_earlier_rows(tiny_model, llm, rows, new_cache):
    """In the second of two calls, every row sees four earlier rows and the new ones up to itself."""
    held, n, window = 12, 5, 4
    cache, embeds = new_cache(), rows(0, held + n)
    cache.windows[2] = window
    seen = torch.ones(held + n, held + n, dtype=torch.bool).tril()
    seen[held:, : held - window] = False
    expected = reference(tiny_model, embeds, visible=seen)
    feed(llm, cache, {2: embeds[:held]})
    hidden, _ = feed(llm, cache, {2: embeds[held:]})
    assert_close(hidden[2], expected[held:], 1e-4)


def test_skipped_positions_change_the_rotation(tiny_model, llm, rows, new_cache):
    cache, embeds = new_cache(), rows(0, 12)
    feed(llm, cache, {2: embeds[:7]})
    cache.positions[2] += 3
    hidden, _ = feed(llm, cache, {2: embeds[7:]})
    positions = torch.arange(12) + 3 * (torch.arange(12) >= 7)
    assert_close(hidden[2], reference(tiny_model, embeds, positions=positions)[7:], 1e-4)


def test_rows_after_an_eviction_see_the_kept_rows_at_their_old_distance(tiny_model, llm, rows, new_cache):
    held, drop, n = 30, 12, 5
    cache, embeds = new_cache(), rows(0, held + n)
    seen = torch.ones(held + n, held + n, dtype=torch.bool).tril()
    seen[held:, :drop] = False
    expected = reference(tiny_model, embeds, visible=seen)
    feed(llm, cache, {2: embeds[:held]})
    cache.evict(torch.tensor([2]), torch.tensor([0]), torch.tensor([drop]), llm.model.frequencies)
    hidden, _ = feed(llm, cache, {2: embeds[held:]})
    assert_close(hidden[2], expected[held:], 1e-4)
    assert int(cache.lengths[2]) == held + n - drop
