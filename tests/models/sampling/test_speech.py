"""The sampler of speech tokens against a plain reference; independence of slots and batches; seeds."""

import math
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from models.errors import SettingsError
from models.sampling.rng import STREAM_SPEECH, uniform
from models.sampling.settings import DUPLEX_SPEECH, TURN_SPEECH, SpeechSampling
from models.sampling.speech import PENALTY_WINDOW, SpeechSamplerState, final_speech_scores, sample_speech_tokens

N_SPEECH_TOKENS = 40
EOS = N_SPEECH_TOKENS - 1


def make_state(*rows: SpeechSampling, seed: int = 0, min_speech_tokens: int = 0) -> SpeechSamplerState:
    state = SpeechSamplerState.allocate(len(rows))
    for slot, row in enumerate(rows):
        state.configure(slot, row, eos_id=EOS, seed=seed + slot)
    slots = torch.arange(len(rows))
    state.begin_call(slots, torch.full_like(slots, min_speech_tokens), torch.ones_like(slots, dtype=torch.bool))
    return state


def put_history(state: SpeechSamplerState, slot: int, speech_tokens: list[int]) -> None:
    for token in speech_tokens:
        state.remember(torch.tensor([slot]), torch.tensor([token]), torch.tensor([True]))


def sample(state, logits, slots, candidates=None, active=None):
    active = torch.ones(len(slots), dtype=torch.bool) if active is None else torch.tensor(active)
    return sample_speech_tokens(logits, torch.tensor(slots), active, state, candidates)


def dump(state: SpeechSamplerState) -> dict[str, torch.Tensor]:
    return {field.name: getattr(state, field.name).clone() for field in fields(state)}


def assert_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], rows) -> None:
    for name in expected:
        assert torch.equal(got[name][rows], expected[name][rows]), f"{name}: {expected[name]} became {got[name]}"


def plain_scores(
    logits: np.ndarray, history: list[int], step: int, min_speech_tokens: int, s: SpeechSampling
) -> np.ndarray:
    """Processed logits by the definition of the warpers: sort ascending, cut the tail."""
    scores = logits / np.float32(s.temperature)
    recent = history[-PENALTY_WINDOW:]
    for token in set(recent):
        factor = np.float32(s.repetition_penalty) ** np.float32(recent.count(token))
        scores[token] = scores[token] * factor if scores[token] < 0 else scores[token] / factor
    if history:
        if s.top_p < 1:
            upwards = sorted(range(len(scores)), key=lambda i: (scores[i], -i))
            weights = np.exp(scores.astype(np.float64) - scores.max())
            tail = np.cumsum(weights[upwards]) / weights.sum()
            assume(np.abs(tail - (1 - s.top_p)).min() > 1e-5)  # rounding may decide closer values
            for token, share in zip(upwards[: -s.min_keep], tail, strict=False):
                if share <= 1 - s.top_p:
                    scores[token] = -math.inf
        if s.top_k:
            kth = np.sort(scores)[::-1][min(max(s.top_k, s.min_keep), len(scores)) - 1]
            scores[scores < kth] = -math.inf
    if step < min_speech_tokens:
        scores[EOS] = -math.inf
    return scores


def plain_draw(scores: np.ndarray, number: float) -> int:
    weights = np.exp(scores.astype(np.float64) - scores.max())
    running = np.cumsum(weights) / weights.sum()
    assume(np.abs(running - number).min() > 1e-6)
    return int((running <= number).sum())


speech_settings = st.builds(
    SpeechSampling,
    greedy=st.booleans(),
    temperature=st.sampled_from([1e-5, 0.5, 0.8, 1.3]),
    repetition_penalty=st.sampled_from([0.9, 1.0, 1.05, 1.6]),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 0.99)),
    top_k=st.sampled_from([0, 1, 3, 5, 25, 1000]),
    min_keep=st.sampled_from([1, 3]),
)


END_ALONE = np.where(np.arange(N_SPEECH_TOKENS) == EOS, 1, 0).astype(np.float32)


@st.composite
def speech_rows(draw):
    logits = draw(st.lists(st.floats(-6, 6, width=32), min_size=N_SPEECH_TOKENS, max_size=N_SPEECH_TOKENS))
    scale = np.float32(draw(st.sampled_from([1, 2, 1000])))  # coarse rounding makes ties
    logits = np.round(np.array(logits, np.float32) * scale) / scale
    return logits, draw(st.lists(st.integers(0, 5), max_size=20)), draw(speech_settings)


@settings(max_examples=120, deadline=None)
@example([(END_ALONE, [0], SpeechSampling(temperature=1e-5, top_p=0.5, top_k=0, min_keep=1))], 0, 1)
@given(st.lists(speech_rows(), min_size=1, max_size=3), st.integers(0, 2**64 - 4), st.sampled_from([0, 1, 50]))
def test_equals_the_plain_reference(rows, seed, min_speech_tokens):
    state = make_state(*(s for _, _, s in rows), seed=seed, min_speech_tokens=min_speech_tokens)
    for slot, (_, history, _) in enumerate(rows):
        put_history(state, slot, history)
    slots = torch.arange(len(rows))
    logits = torch.tensor(np.stack([row[0] for row in rows]))
    number = uniform(state.seed, state.draws, STREAM_SPEECH).tolist()

    got_scores = final_speech_scores(logits, slots, state)
    speech_tokens, bad, _ = sample(state, logits, slots.tolist())
    all_scores = [plain_scores(row, history, 0, min_speech_tokens, s) for row, history, s in rows]
    # With `min_keep` 1, top-p may leave the end token alone, which is not allowed yet.
    assert bad.tolist() == [not np.isfinite(scores).any() for scores in all_scores]
    for slot, ((_, history, s), scores) in enumerate(zip(rows, all_scores, strict=True)):
        if bad[slot]:
            continue
        kept, got_kept = np.flatnonzero(np.isfinite(scores)), got_scores[slot].isfinite().nonzero()[:, 0].numpy()
        assert np.array_equal(got_kept, kept), f"row {slot}: expected {kept}, got {got_kept}"
        assert np.allclose(got_scores[slot].numpy()[kept], scores[kept], rtol=1e-5), f"row {slot}"
        expected = int(np.argmax(scores)) if s.greedy else plain_draw(scores, number[slot])
        assert speech_tokens[slot] == expected, f"row {slot}: expected {expected}, got {speech_tokens[slot]}"
        assert state.count[slot] == len(history) + (expected != EOS)


def test_top_p_and_top_k_do_not_apply_to_an_empty_history():
    logits = torch.linspace(0, 1, N_SPEECH_TOKENS)[None]
    state = make_state(SpeechSampling(top_k=4, min_keep=3))
    kept = []
    for _ in range(2):
        kept.append(int(final_speech_scores(logits, torch.tensor([0]), state).isfinite().sum()))
        put_history(state, 0, [0])
    assert kept == [N_SPEECH_TOKENS, 4]
    state.forget(torch.tensor([0]))
    assert final_speech_scores(logits, torch.tensor([0]), state).isfinite().all()


def test_a_tail_of_exactly_one_minus_p_is_dropped():
    state = make_state(SpeechSampling(top_p=0.5, top_k=0, min_keep=1, repetition_penalty=1.0))
    put_history(state, 0, [0])
    logits = torch.tensor([[-math.inf, 1.0, -math.inf, 1.0]])
    kept = final_speech_scores(logits, torch.tensor([0]), state).isfinite()[0].nonzero()[:, 0].tolist()
    assert kept == [1], f"expected [1], got {kept}"


def test_candidates_equal_the_full_sort_if_they_suffice():
    torch.manual_seed(0)
    logits = (torch.randn(3, 500) * 3).round(decimals=1)
    rows = [TURN_SPEECH, DUPLEX_SPEECH, replace(TURN_SPEECH, top_p=1.0, top_k=2)]
    state, slots = make_state(*rows), torch.arange(3)
    for slot in range(3):
        put_history(state, slot, [1, 2, 3])
    expected = final_speech_scores(logits, slots, state)
    got = final_speech_scores(logits, slots, state, candidates=64)
    assert torch.equal(got, expected), f"kept expected {expected.isfinite().sum(1)}, got {got.isfinite().sum(1)}"
    assert expected.isfinite().sum(1)[1] == 500


def test_eos_is_masked_after_top_k_and_not_remembered():
    logits = torch.full((1, N_SPEECH_TOKENS), -9.0)
    logits[0, [EOS, 4, 5]] = torch.tensor([5.0, 1.0, 0.5])
    state = make_state(SpeechSampling(greedy=True, top_k=2, repetition_penalty=1.0), min_speech_tokens=2)
    put_history(state, 0, [7])
    kept = final_speech_scores(logits, torch.tensor([0]), state).isfinite()[0].nonzero()[:, 0].tolist()
    assert kept == [4, 5], f"expected the rank of the masked EOS to stay empty, got {kept}"
    got = [int(sample(state, logits, [0]).ids) for _ in range(3)]
    assert got == [4, 4, EOS]
    assert state.count[0] == 3 and state.step[0] == 3


def test_begin_call_empties_per_call_histories_only():
    state = make_state(DUPLEX_SPEECH, TURN_SPEECH)
    for slot in (0, 1):
        put_history(state, slot, [1, 2, 3])
    state.begin_call(torch.tensor([0, 1]), torch.tensor([26, 0]), torch.tensor([True, True]))
    assert state.count.tolist() == [0, 3, 0] and state.min_speech_tokens.tolist() == [26, 0, 0]


def test_draws_follow_the_distribution():
    n = 20000
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -1.5, 0.5])
    state = SpeechSamplerState.allocate(n)
    state.eos_id.fill_(5)
    state.min_speech_tokens.fill_(1)
    state.seed.copy_(torch.arange(n + 1))
    speech_tokens = sample(state, logits.expand(n, -1), range(n)).ids
    expected = torch.softmax(torch.where(torch.arange(6) == 5, -math.inf, logits / 0.8), 0)
    counts = torch.bincount(speech_tokens, minlength=6)
    chi_square = ((counts - n * expected) ** 2 / (n * expected))[:5].sum().item()
    assert counts[5] == 0 and chi_square < 18.5, f"expected {n * expected}, got {counts}, chi square {chi_square}"


MIXED = [TURN_SPEECH, DUPLEX_SPEECH, replace(TURN_SPEECH, greedy=True), replace(TURN_SPEECH, top_k=0)]


def test_a_seed_gives_the_same_tokens_in_any_slot_order_and_batch():
    torch.manual_seed(2)
    logits = torch.randn(20, 4, N_SPEECH_TOKENS) * 2

    def run(n_slots, order, sequences):
        state = SpeechSamplerState.allocate(n_slots)
        for sequence, slot in zip(sequences, order, strict=True):
            state.configure(slot, MIXED[sequence], eos_id=EOS, seed=100 + sequence)
        steps = [sample(state, logits[step, sequences], order, 32).ids for step in range(20)]
        return torch.stack(steps, 1).tolist()

    expected = run(4, [0, 1, 2, 3], [0, 1, 2, 3])
    assert run(7, [6, 0, 3, 2], [0, 1, 2, 3]) == expected
    assert run(7, [3, 6, 0, 2], [3, 2, 1, 0])[::-1] == expected
    for sequence in range(4):
        got = run(3, [1], [sequence])[0]
        assert got == expected[sequence], f"alone {got}, in the batch {expected[sequence]}"


def test_reset_slots_equal_new_ones_and_others_stay():
    state = make_state(*MIXED, seed=40, min_speech_tokens=3)
    sample(state, torch.randn(4, N_SPEECH_TOKENS), range(4))
    before = dump(state)
    state.reset(torch.tensor([0, 3]))
    assert_same(dump(state), before, [1, 2, 4])
    assert_same(dump(state), dump(SpeechSamplerState.allocate(4)), [0, 3])


@pytest.mark.parametrize("candidates", [None, 16])
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_inactive_and_bad_rows_return_eos_and_change_no_state(poison, candidates):
    torch.manual_seed(3)
    logits = torch.randn(4, N_SPEECH_TOKENS)
    clean, state = make_state(*MIXED), make_state(*MIXED)
    for one in (clean, state):
        for slot in range(4):
            put_history(one, slot, [slot, 2])
    before = dump(state)
    expected = sample(clean, logits, range(4), candidates)
    logits[1, 3 if poison != -math.inf else slice(None)] = poison
    speech_tokens, bad, _ = sample(state, logits, range(4), candidates, active=[True, True, False, True])
    assert bad.tolist() == [False, True, False, False]
    assert speech_tokens.tolist() == [int(expected.ids[0]), EOS, EOS, int(expected.ids[3])]
    assert_same(dump(state), before, [1, 2, 4])
    assert_same(dump(state), dump(clean), [0, 3])


def test_compiled_as_one_graph_equals_eager():
    compiled = torch.compile(sample_speech_tokens, fullgraph=True, dynamic=False)
    torch.manual_seed(5)
    eager_state, state = make_state(*MIXED), make_state(*MIXED)
    slots, active = torch.tensor([3, 1, 0, 4]), torch.tensor([True, True, True, False])
    for _ in range(3):
        logits = torch.randn(4, N_SPEECH_TOKENS) * 2
        expected = sample_speech_tokens(logits, slots, active, eager_state, 32)
        got = compiled(logits, slots, active, state, 32)
        assert torch.equal(got.ids, expected.ids), f"expected {expected.ids}, got {got.ids}"
    assert_same(dump(state), dump(eager_state), slice(None))


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", 0.0), ("top_p", 0.0), ("top_p", 1.1), ("top_k", -1), ("min_keep", 0), ("greedy", 1)],
)
def test_refuses_settings_outside_their_range(name, value):
    with pytest.raises(SettingsError, match=f"{name}: expected .*, got {value!r}"):
        SpeechSampling(**{name: value})
    with pytest.raises(SettingsError, match="eos_id"):
        SpeechSamplerState.allocate(1).configure(0, TURN_SPEECH, eos_id=-1)
