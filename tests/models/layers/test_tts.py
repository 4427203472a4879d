"""Speech-token model: conditioning rows of mixed batches, the folded head, and logits over slots.

Tolerances: 1e-5 between two ways through the same float32 code, 1e-4 against the float64 reference.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.layers.backend import TORCH
from models.layers.tts import FoldedHead
from tests.models.compare import assert_close, assert_same
from tests.models.layers import transformer_reference as slow
from tests.parity.build import slot_cache

NAN = float("nan")
few = settings(max_examples=20)


@pytest.fixture(scope="session")
def tts(tiny_model):
    return tiny_model.tts


def noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def integers(seed: int, below: int, *shape: int) -> Tensor:
    return torch.randint(0, below, shape, generator=torch.Generator().manual_seed(seed))


def text_row(tts, token: int, state: Tensor, normalize: bool) -> Tensor:
    """[D] float64: the token's embedding plus its projected state."""
    w = slow.weights_of(tts)
    inner = slow.linear(state.double(), w, "projector_semantic.linear1").clamp(min=0)
    projected = slow.linear(inner, w, "projector_semantic.linear2")
    return w("emb_text.weight")[token] + (projected / projected.norm() if normalize else projected)


@few
@given(
    seed=st.integers(0, 2**20),
    rows=st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=4),
    spare=st.integers(0, 3),
    normalize=st.booleans(),
)
def test_condition_rows_of_a_mixed_batch(tts, seed, rows, spare, normalize):
    """Text rows, the end-of-text row if set, the begin-of-audio row; padding may be NaN."""
    length = max(n for n, _ in rows) + spare
    ids = integers(seed, tts.config.num_text_tokens, len(rows), length)
    hidden = noise(seed, len(rows), length, tts.config.llm_dim)
    n_text = torch.tensor([n for n, _ in rows])
    hidden[torch.arange(length) >= n_text[:, None]] = NAN
    got, n_rows = tts.condition(ids, hidden, n_text, torch.tensor([eos for _, eos in rows]), normalize, TORCH)
    assert n_rows.tolist() == [n + eos + 1 for n, eos in rows]
    assert got.shape == (len(rows), length + 2, tts.config.hidden_size)
    table = tts.emb_text.weight
    for row, (n, eos) in enumerate(rows):
        for column in range(n):
            expected = text_row(tts, int(ids[row, column]), hidden[row, column], normalize)
            assert_close(got[row, column], expected, 1e-4, f"row {row} column {column}")
        markers = [tts.config.text_eos_token_id] * eos + [tts.config.audio_bos_token_id]
        assert_same(got[row, n : n + len(markers)], table[markers], f"row {row} markers {markers}")


def test_condition_without_text_is_only_begin_of_audio(tts):
    got, n_rows = tts.condition(
        torch.zeros(2, 0, dtype=torch.int64),
        torch.zeros(2, 0, tts.config.llm_dim),
        torch.zeros(2, dtype=torch.int64),
        torch.tensor([False, True]),
        True,
        TORCH,
    )
    assert n_rows.tolist() == [1, 2]
    table, bos, eos = tts.emb_text.weight, tts.config.audio_bos_token_id, tts.config.text_eos_token_id
    assert_same(got[0, 0], table[bos])
    assert_same(got[1], table[[eos, bos]])


def test_normalized_states_have_length_one(tts):
    ids, hidden = torch.tensor([[3, 3]]), noise(0, 1, 2, tts.config.llm_dim)
    hidden[0, 1] *= 100
    projected = tts.text_rows(ids, hidden, normalize=True, backend=TORCH) - tts.emb_text.weight[3]
    assert_close(projected.norm(dim=-1), torch.ones(1, 2), 1e-5)


@pytest.mark.parametrize("dtype, error", [(torch.float32, 1e-6), (torch.bfloat16, 2**-8)])
def test_head_is_folded_in_float32_and_rounded_once(dtype, error):
    head = FoldedHead(40, 16).requires_grad_(False)
    stored = head.parametrizations["weight"]
    stored.original0.copy_(noise(0, 40, 1))
    stored.original1.copy_(noise(1, 40, 16) * 3)
    head.derive("cpu", dtype)
    lengths, directions = stored.original0.double(), stored.original1.double()
    expected = lengths * directions / directions.square().sum(1, keepdim=True).sqrt()
    assert head.weight.dtype == dtype
    assert_close(head.weight / expected, torch.ones_like(expected), error, "relative weights")


def head_weight(tts) -> Tensor:
    w = slow.weights_of(tts)
    g, v = (w(f"head_code.0.parametrizations.weight.original{i}") for i in (0, 1))
    return g * v / v.norm(dim=1, keepdim=True)


def reference(tts, rows: Tensor) -> Tensor:
    """Logits after every row of [T, D]."""
    about = tts.config
    return (
        slow.decoder(
            tts.model, rows, head_dim=about.head_dim, theta=about.rope_theta, eps=about.rms_norm_eps, qk_norm=False
        )
        @ head_weight(tts).T
    )


@few
@given(seed=st.integers(0, 2**20), data=st.data())
def test_logits_over_slots_equal_float64_reference(tiny_model, tts, seed, data):
    """Slots with conditions of different lengths; some have none, some are inactive in a step."""
    cache = slot_cache(tiny_model, "tts", n_slots=3, max_len=40)
    order = data.draw(st.permutations(range(3)))
    fed = {slot: torch.zeros(0, tts.config.hidden_size) for slot in order}
    slots = torch.tensor(order)

    def check(logits: Tensor, touched: list[bool]) -> None:
        assert logits.dtype == torch.float32
        for row, slot in enumerate(order):
            if touched[row]:
                assert_close(logits[row], reference(tts, fed[slot])[-1], 1e-4, f"slot {slot}")
            assert int(cache.lengths[slot]) == len(fed[slot])

    for call in range(2):
        counts = data.draw(st.lists(st.integers(0, 8), min_size=3, max_size=3))
        bucket = max(counts) + 2
        rows = torch.full((3, bucket, tts.config.hidden_size), NAN)
        for row, (slot, n) in enumerate(zip(order, counts, strict=True)):
            rows[row, :n] = noise(seed + 3 * call + row, n, tts.config.hidden_size)
            fed[slot] = torch.cat((fed[slot], rows[row, :n]))
        check(tts.prefill(rows, cache, slots, torch.tensor(counts), 40, TORCH), [n > 0 for n in counts])
        for step in range(3):
            active = data.draw(st.lists(st.booleans(), min_size=3, max_size=3))
            speech_tokens = integers(seed + step, tts.config.num_audio_tokens, 3)
            for row, slot in enumerate(order):
                if active[row]:
                    fed[slot] = torch.cat((fed[slot], tts.emb_code[0].weight[speech_tokens[row]][None]))
            rows = tts.emb_code[0](speech_tokens[:, None])
            check(tts.decode(rows, cache, slots, torch.tensor(active).long(), 40, TORCH), active)
