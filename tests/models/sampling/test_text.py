"""The text sampler against a plain reference; independence of slots and batches; seeds; refused settings."""

import math
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.errors import SettingsError, TokenError
from models.sampling.rng import STREAM_STOP_PROBE, STREAM_TEXT, uniform
from models.sampling.settings import CHAT_TEXT, DUPLEX_TEXT, HALF_DUPLEX_TEXT, TextSampling, signed_seed
from models.sampling.text import SamplerState, TokenSet, TokenSets, sample_text
from tests.models.sampling.final_probs import final_probs
from tests.models.sampling.plain_text import plain_kept, plain_sample, plain_scores

VOCAB = 24
SET = TokenSet(forbidden=(3, 7), length_ids=(5, 6), listen_id=9, stop_id=7, pad_id=1)
SETS = TokenSets.build([TokenSet(), SET], VOCAB)
INF = math.inf


def make_state(*rows: TextSampling, seed: int = 0, history_length: int = 512) -> SamplerState:
    state = SamplerState.allocate(len(rows), history_length)
    for slot, row in enumerate(rows):
        state.configure(slot, row, seed=seed + slot)
    return state


def put_history(state: SamplerState, slot: int, ids: list[int]) -> None:
    for token in ids:
        state.remember(torch.tensor([slot]), torch.tensor([token]), torch.tensor([True]))


def sample(state, logits, slots, candidates=None, active=None, sets=SETS):
    active = torch.ones(len(slots), dtype=torch.bool) if active is None else torch.tensor(active)
    return sample_text(logits, torch.tensor(slots), active, state, sets, candidates)


def dump(state: SamplerState) -> dict[str, torch.Tensor]:
    return {field.name: getattr(state, field.name).clone() for field in fields(state)}


def assert_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], rows) -> None:
    for name in expected:
        assert torch.equal(got[name][rows], expected[name][rows]), f"{name}: {expected[name]} became {got[name]}"


# --- against the plain reference --------------------------------------------------------------------------


scales = st.sampled_from([0.5, 0.8, 1.0, 1.05, 1.3, 2.0])
text_settings = st.builds(
    TextSampling,
    greedy=st.booleans(),
    temperature=st.sampled_from([0.01, 0.5, 0.7, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 2, 5, VOCAB, 1000]),
    top_p=st.one_of(st.sampled_from([0.0, 1e-3, 1.0]), st.floats(0.05, 0.99)),
    repetition_penalty=scales,
    repetition_window=st.sampled_from([0, 1, 4, 512]),
    sign_blind=st.booleans(),
    length_penalty=scales,
    listen_scale=scales,
    listen_scale_on_probability=st.booleans(),
    listen_top_k=st.sampled_from([0, 0, 1, 4]),
    stop_probe=st.booleans(),
    set_index=st.integers(0, 1),
)


@st.composite
def text_rows(draw):
    logits = draw(st.lists(st.floats(-6, 6, width=32), min_size=VOCAB, max_size=VOCAB))
    scale = np.float32(draw(st.sampled_from([1, 2, 1000])))  # coarse rounding makes ties
    logits = np.round(np.array(logits, np.float32) * scale) / scale
    logits[draw(st.lists(st.integers(10, VOCAB - 1), max_size=4))] = -INF
    history = draw(st.lists(st.integers(0, VOCAB - 1), max_size=9))
    return logits.astype(np.float32), history, draw(text_settings)


@settings(max_examples=150, deadline=None)
@given(st.lists(text_rows(), min_size=1, max_size=3), st.integers(0, 2**64 - 1 - 3))
def test_equals_the_plain_reference(rows, seed):
    state = make_state(*(s for _, _, s in rows), seed=seed)
    for slot, (_, history, _) in enumerate(rows):
        put_history(state, slot, history)
    slots = torch.arange(len(rows))
    logits = torch.tensor(np.stack([row[0] for row in rows]))
    probe = uniform(state.seed, state.draws, STREAM_STOP_PROBE).tolist()
    number = uniform(state.seed, state.draws, STREAM_TEXT).tolist()

    distribution = final_probs(logits, slots, state, SETS)
    ids, bad, _ = sample(state, logits, slots.tolist())
    assert not bad.any()
    for slot, (row, history, s) in enumerate(rows):
        token_set = [TokenSet(), SET][s.set_index]
        expected, remembered = plain_sample(row, history, s, token_set, probe[slot], number[slot])
        assert ids[slot] == expected, f"row {slot}: expected {expected}, got {ids[slot]}"
        kept = plain_kept(plain_scores(row, history, s, token_set), s)
        wanted = np.zeros(VOCAB)
        for token, p in kept:
            wanted[token] = p / sum(p for _, p in kept)
        difference = np.abs(distribution[slot].numpy() - wanted).max()
        assert difference < 1e-5, f"row {slot}: expected {wanted}, got {distribution[slot]}, max diff {difference}"
        added = state.history[slot, len(history) : int(state.count[slot])].tolist()
        assert added == [expected] * remembered, f"history: expected {[expected] * remembered}, got {added}"


# --- single rules -----------------------------------------------------------------------------------------


def kept_ids(logits: list[float], candidates: int | None = None, **sampling) -> list[int]:
    state = make_state(TextSampling(**sampling))
    sets = TokenSets.build([TokenSet()], len(logits))
    probabilities = final_probs(torch.tensor([logits]), torch.tensor([0]), state, sets, candidates)
    return (probabilities[0] > 0).nonzero()[:, 0].tolist()


def test_ties_at_the_kth_rank_are_kept():
    assert kept_ids([1.0, 2.0, 1.0, 0.0, 1.0], top_k=2) == [0, 1, 2, 4]
    assert kept_ids([1.0, 2.0, 1.0, 0.0, 1.0], top_k=2, candidates=4) == [0, 1, 2, 4]
    assert kept_ids([1.0, 2.0, 1.0, 0.0, 1.0], top_k=1) == [1]


def test_top_p_keeps_the_entry_that_crosses_p_and_breaks_ties_by_id():
    thirds = [0.0, 0.0, 0.0]
    assert kept_ids(thirds, top_p=0.3) == [0]
    assert kept_ids(thirds, top_p=0.4) == [0, 1]
    assert kept_ids(thirds, top_p=0.7) == [0, 1, 2]
    # The first of two halves sums to exactly p: the next entry is kept too.
    assert kept_ids([0.0, 0.0], top_p=0.5) == [0, 1]
    assert kept_ids(thirds, top_p=0.0) == kept_ids(thirds, top_p=1.0) == [0, 1, 2]


def test_candidates_equal_the_whole_vocabulary_if_they_suffice():
    torch.manual_seed(0)
    logits = (torch.randn(6, 300) * 2).round(decimals=1)
    sets = TokenSets.build([TokenSet()], 300)
    rows = [TextSampling(top_k=k, top_p=p, temperature=0.9) for k in (1, 8, 20) for p in (0.3, 1.0)]
    slots = torch.arange(6)
    whole, few = make_state(*rows), make_state(*rows)
    expected = final_probs(logits, slots, whole, sets)
    got = final_probs(logits, slots, few, sets, candidates=40)
    assert torch.equal(got, expected), f"max diff {(got - expected).abs().max()}"
    for _ in range(5):
        expected, got = sample(whole, logits, range(6), sets=sets).ids, sample(few, logits, range(6), 40, sets=sets).ids
        assert torch.equal(got, expected), f"expected {expected}, got {got}"


def test_top_p_without_top_k_is_exact_if_it_fits_the_candidates():
    torch.manual_seed(1)
    logits = torch.randn(1, 300) * 4
    sets = TokenSets.build([TokenSet()], 300)
    state = make_state(TextSampling(top_p=0.8))
    expected = final_probs(logits, torch.tensor([0]), state, sets)
    assert 1 < (expected > 0).sum() < 64
    got = final_probs(logits, torch.tensor([0]), state, sets, candidates=64)
    assert torch.equal(got, expected), f"max diff {(got - expected).abs().max()}"


def test_repetition_window_slides_and_a_chunk_extends_it():
    logits = torch.ones(1, VOCAB)
    greedy = TextSampling(greedy=True, repetition_penalty=2.0, repetition_window=3)
    state = make_state(greedy, replace(greedy, chunked_window=True), history_length=8)
    for slot in (0, 1):
        put_history(state, slot, [20, 21, 22, 23, 0, 1, 2, 3, 4, 5])
    state.begin_chunk(torch.tensor([0, 1]))
    got = [[int(sample(state, logits, [slot]).ids) for _ in range(6)] for slot in (0, 1)]
    # The window of slot 0 is three ids, so id 0 returns after four. That of slot 1 is 3, 4, 5 and the whole chunk.
    assert got[0] == [0, 1, 2, 3, 0, 1], got
    assert got[1] == [0, 1, 2, 6, 7, 8], got
    state.forget(torch.tensor([1]))
    assert int(sample(state, logits, [1]).ids) == 0


def test_listen_rank_and_stop_probe_are_not_remembered_and_the_probe_has_priority():
    logits = torch.zeros(2, VOCAB)
    logits[:, 9], logits[:, 12] = 2.0, 3.0
    logits[1, SET.stop_id] = 9.0
    row = TextSampling(greedy=True, set_index=1, listen_top_k=2, stop_probe=True)
    state = make_state(row, row)
    ids, *_ = sample(state, logits, [0, 1])
    assert ids.tolist() == [9, 7] and state.count.tolist() == [0, 0, 0]
    state.configure(0, replace(row, listen_top_k=1))
    assert int(sample(state, logits[:1], [0]).ids) == 12


def test_draws_follow_the_distribution():
    n = 20000
    logits = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -9.0])
    row = TextSampling(temperature=0.9, top_k=6, top_p=0.93, stop_probe=True)
    sets = TokenSets.build([TokenSet(stop_id=4)], 8)
    state = SamplerState.allocate(n, history_length=512)
    for name in ("temperature", "top_k", "top_p", "stop_probe"):
        getattr(state, name).fill_(getattr(row, name))
    expected = final_probs(logits[None], torch.tensor([0]), state, sets)[0]
    stop = torch.softmax(logits, 0)[4]
    expected = expected * (1 - stop)
    expected[4] += stop
    for seeds, draws in ((torch.arange(n + 1), 3), (torch.tensor(5), torch.arange(n + 1))):
        state.seed.copy_(seeds)
        state.draws.copy_(torch.as_tensor(draws))
        ids = sample(state, logits.expand(n, -1), range(n), candidates=8, sets=sets).ids
        counts = torch.bincount(ids, minlength=8)
        live = expected > 0
        assert counts[~live].sum() == 0, f"expected no dropped ids, got {counts}"
        chi_square = ((counts - n * expected) ** 2 / (n * expected))[live].sum().item()
        assert chi_square < 20.5, f"expected {n * expected}, got {counts}, chi square {chi_square}"


# --- slots, batches, seeds --------------------------------------------------------------------------------


MIXED = [
    replace(DUPLEX_TEXT, set_index=1),
    replace(CHAT_TEXT, repetition_window=512),
    replace(HALF_DUPLEX_TEXT, set_index=1, length_penalty=1.2),
    TextSampling(greedy=True, repetition_penalty=1.3),
    TextSampling(temperature=1.4),
]


def run_steps(state, logits, order, seeds, steps=6):
    """Ids of each sequence. order: slot of each sequence. Logits differ for each sequence and step."""
    for sequence, slot in enumerate(order):
        state.configure(slot, MIXED[sequence], seed=seeds[sequence])
    columns = [sample(state, logits[step, : len(order)], order, 16).ids for step in range(steps)]
    return torch.stack(columns, 1).tolist()


def test_a_seed_gives_the_same_ids_in_any_slot_order_and_batch():
    torch.manual_seed(2)
    logits, seeds = torch.randn(6, 5, VOCAB) * 2, [11, 2**64 - 1, 0, 5, 7]
    expected = run_steps(SamplerState.allocate(5, 512), logits, [0, 1, 2, 3, 4], seeds)
    assert run_steps(SamplerState.allocate(9, 512), logits, [8, 3, 5, 0, 2], seeds) == expected
    for sequence in range(5):
        state = SamplerState.allocate(2, 512)
        state.configure(1, MIXED[sequence], seed=seeds[sequence])
        got = [int(sample(state, logits[step, sequence, None], [1], 16).ids) for step in range(6)]
        assert got == expected[sequence], f"alone {got}, in the batch {expected[sequence]}"
    assert run_steps(SamplerState.allocate(5, 512), logits, [0, 1, 2, 3, 4], [s ^ 1 for s in seeds]) != expected


def test_reset_slots_equal_new_ones_and_others_stay():
    torch.manual_seed(3)
    state = make_state(*MIXED, seed=40)
    sample(state, torch.randn(5, VOCAB), range(5))
    before = dump(state)
    state.reset(torch.tensor([1, 3]))
    assert_same(dump(state), before, [0, 2, 4, 5])
    assert_same(dump(state), dump(SamplerState.allocate(5, 512)), [1, 3])


def test_inactive_rows_return_pad_and_change_no_state():
    state = make_state(*MIXED)
    before = dump(state)
    ids, bad, _ = sample(state, torch.randn(5, VOCAB), [0, 1, 2, 5, 5], active=[True, False, False, False, False])
    assert ids[1:].tolist() == [0, 1, 0, 0] and not bad.any()
    assert_same(dump(state), before, [1, 2, 3, 4, 5])
    assert state.draws[0] == 1


@pytest.mark.parametrize("candidates", [None, 16])
@pytest.mark.parametrize("poison", [math.nan, INF, "empty", "forbidden"])
def test_bad_rows_are_flagged_and_do_not_affect_others(poison, candidates):
    torch.manual_seed(4)
    logits = torch.randn(3, VOCAB)
    rows = [replace(MIXED[0], greedy=greedy) for greedy in (False, True, False)]
    clean, state = make_state(*rows), make_state(*rows)
    expected = sample(clean, logits, [0, 1, 2], candidates)
    logits[1] = logits[1] if isinstance(poison, float) else -INF
    logits[1, SET.stop_id if poison == "forbidden" else 4] = {"empty": -INF, "forbidden": 1.0}.get(poison, poison)
    if poison == "forbidden":
        state.stop_probe[1] = False
    ids, bad, _ = sample(state, logits, [0, 1, 2], candidates)
    assert bad.tolist() == [False, True, False]
    assert ids.tolist() == [int(expected.ids[0]), SET.pad_id, int(expected.ids[2])]
    assert_same(dump(state), dump(clean), [0, 2])
    assert state.count[1] == 0 and state.draws[1] == 0


@pytest.mark.parametrize("candidates", [None, 16])
def test_compiled_as_one_graph_equals_eager(candidates):
    """Traced and decomposed as for code generation, but without it: on a CPU the sampler is served eagerly."""
    backend = "aot_eager_decomp_partition"
    compiled = torch.compile(sample_text, fullgraph=True, dynamic=False, backend=backend)
    torch.manual_seed(5)
    eager_state, state = make_state(*MIXED), make_state(*MIXED)
    slots, active = torch.tensor([4, 1, 0, 3, 5]), torch.tensor([True, True, True, True, False])
    for _ in range(3):
        logits = torch.randn(5, VOCAB) * 2
        expected = sample_text(logits, slots, active, eager_state, SETS, candidates)
        got = compiled(logits, slots, active, state, SETS, candidates)
        assert torch.equal(got.ids, expected.ids), f"expected {expected.ids}, got {got.ids}"
        assert torch.equal(got.bad, expected.bad)
    assert_same(dump(state), dump(eager_state), slice(None))


# --- refused settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("temperature", 0.0, "at least 1e-06"),
        ("temperature", math.nan, "a finite number"),
        ("temperature", 1e300, "at most 1000000.0"),
        ("repetition_penalty", 1e300, "at most 10000.0"),
        ("top_k", 2**70, "at most 2147483647"),
        ("top_k", -1, "at least 0"),
        ("top_k", 2.5, "a whole number"),
        ("top_p", 1.01, "at most 1"),
        ("repetition_penalty", 0, "at least 0.0001"),
        ("repetition_window", True, "a whole number"),
        ("length_penalty", "1", "a finite number"),
        ("listen_scale", -1.0, "at least 0.0001"),
        ("listen_top_k", None, "a whole number"),
        ("set_index", -1, "at least 0"),
        ("stop_probe", 1, "true or false"),
    ],
)
def test_refuses_settings_outside_their_range(name, value, expected):
    with pytest.raises(SettingsError) as error:
        TextSampling(**{name: value})
    assert name in str(error.value) and expected in str(error.value) and f"got {value!r}" in str(error.value)


def test_refuses_long_windows_and_seeds_and_ids_out_of_range():
    with pytest.raises(SettingsError, match=r"repetition_window: expected .* at most 8, got 9"):
        make_state(TextSampling(repetition_window=9), history_length=8)
    with pytest.raises(SettingsError, match="seed"):
        make_state(TextSampling(), seed=2**64)
    assert signed_seed(2**64 - 1) == -1 and signed_seed(5) == 5
    with pytest.raises(TokenError, match=r"length_ids: expected an id in 0\.\.23, got 24"):
        TokenSets.build([TokenSet(length_ids=[24])], VOCAB)
    with pytest.raises(TokenError, match=r"allowed: expected an id in 0\.\.23, got -1"):
        TokenSets.build([TokenSet(allowed=(3, -1))], VOCAB)


def test_forbids_all_ids_but_the_allowed_ones() -> None:
    sets = TokenSets.build([TokenSet(allowed={3, 5}, forbidden=(5,)), TokenSet(allowed=())], VOCAB)
    allowed = [row.logical_not().nonzero().flatten().tolist() for row in sets.forbidden]
    assert allowed == [[3], []], f"expected ids 3 and none, got {allowed}"
