"""The upsampling conformer against its formulas, for whole sequences and chunks, and its padding."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.layers.weights import on_meta
from models.token2wav.flow.conformer import (
    LOOKAHEAD_TAIL,
    TABLE_END,
    TABLE_FIRST,
    UP_TAIL,
    RelativeAttention,
    Tails,
    distance_columns,
    without_cache,
)
from models.token2wav.flow.flow_state import ChunkSlots, ChunkTokens, FlowSizes, FlowState, encode
from models.token2wav.settings import EncoderConfig
from tests.models.compare import assert_close, assert_same
from tests.models.token2wav.flow.flow_reference import Conformer, distance_wave
from tests.models.token2wav.flow.flows import LOOKAHEAD, random_flow, random_tokens, split

FLOW = random_flow()
ENCODER, WIDTH = FLOW.encoder, FLOW.encoder.width
# Float32 against float64 through three layers with inputs of about 4, from the factor sqrt(width).
TOLERANCE = 2e-5
NAN = float("nan")


def embedded(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, WIDTH, generator=torch.Generator().manual_seed(seed))


def padded(sequences: list[Tensor], length: int, value: float) -> Tensor:
    return torch.stack([F.pad(x, (0, 0, 0, length - len(x)), value=value) for x in sequences])


def as_last_chunk(x: Tensor, n: Tensor) -> tuple[Tensor, Tails, tuple[Tensor, Tensor]]:
    """x [B, T + lookahead, D], the lookahead undefined, as a chunk that is first and last."""
    B, T = len(x), x.shape[1] - LOOKAHEAD
    mappings = (without_cache(n, T), without_cache(2 * n, 2 * T))
    empty = x.new_zeros(2, 0, ENCODER.heads, ENCODER.head_dim)
    tails = Tails(x.new_zeros(B, LOOKAHEAD_TAIL, WIDTH), x.new_zeros(B, UP_TAIL, WIDTH))
    return ENCODER(x, n, n, tails, mappings, ([empty] * len(ENCODER.encoders), [empty] * len(ENCODER.up_encoders)))


def session() -> FlowState:
    """A session without a voice: nothing is cached, and the prompt is longer than the turn, so nothing is trimmed."""
    sizes = FlowSizes(n_sessions=1, n_voices=1, max_steps=1, max_chunk=40, max_prompt=200, voice_frames=2)
    state = FlowState(FLOW, sizes)
    state.prompt.fill_(200)
    return state


def stream(chunks: list[tuple[Tensor, bool]], padding: int) -> list[Tensor]:
    state, out = session(), []
    for speech_tokens, last in chunks:
        n = len(speech_tokens)
        T = n + padding
        given_tokens = F.pad(speech_tokens, (0, T + LOOKAHEAD - n), value=5)[None]
        tokens = ChunkTokens(given_tokens, torch.tensor([n]), torch.tensor([last]))
        mu = encode(FLOW, state, ChunkSlots(torch.tensor([0]), 200), tokens)
        out.append(mu[0, : 2 * (n if last else max(0, n - LOOKAHEAD))])
    return out


@settings(max_examples=6)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=3), seed=st.integers(0, 99))
def test_whole_sequences_equal_the_formulas(lengths, seed):
    sequences = [embedded(seed + i, n) for i, n in enumerate(lengths)]
    got = ENCODER.offline(padded(sequences, max(lengths), 0.0), torch.tensor(lengths))
    for row, x in enumerate(sequences):
        expected = Conformer(ENCODER, ENCODER.heads)(x, last=True)
        assert_close(got[row, : 2 * len(x)], expected.float(), TOLERANCE, f"row {row} of {lengths}")


@settings(max_examples=6)
@given(counts=st.lists(st.integers(0, 6), max_size=3), rest=st.integers(1, 6), padding=st.integers(0, 4))
def test_chunks_equal_the_formulas(counts, rest, padding):
    """Also for chunks that synthesize nothing, or fewer tokens than the tail of a convolution."""
    chunks = split(random_tokens(7, sum(counts) + LOOKAHEAD + rest), counts)
    slow = Conformer(ENCODER, ENCODER.heads)
    for i, ((speech_tokens, last), got) in enumerate(zip(chunks, stream(chunks, padding), strict=True)):
        if last or len(speech_tokens) > LOOKAHEAD:
            hidden = slow(FLOW.input_embedding(speech_tokens), last)
            expected = hidden @ FLOW.encoder_proj.weight.double().T + FLOW.encoder_proj.bias.double()
        else:
            expected = torch.zeros(0, FLOW.config.n_mels)
        assert_close(got, expected.float(), TOLERANCE, f"chunk {i} of {counts}")


@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=3), seed=st.integers(0, 99))
def test_offline_equals_one_last_chunk(lengths, seed):
    x, n = embedded(seed, len(lengths), max(lengths)), torch.tensor(lengths)
    got, _, _ = as_last_chunk(F.pad(x, (0, 0, 0, LOOKAHEAD), value=NAN), n)
    expected = ENCODER.offline(x, n)
    for row, length in enumerate(lengths):
        assert_same(got[row, : 2 * length], expected[row, : 2 * length], f"row {row}")


@given(lengths=st.lists(st.integers(0, 20), min_size=2, max_size=3), seed=st.integers(0, 99))
def test_padding_has_no_effect(lengths, seed):
    """NaN and zeros as padding give bit-identical frames, tails, keys and values."""
    sequences = [embedded(seed + i, n) for i, n in enumerate(lengths)]
    T, n = max(lengths) + LOOKAHEAD + 1, torch.tensor(lengths)
    (got, got_tails, got_rows), (expected, tails, rows) = (
        as_last_chunk(padded(sequences, T, value), n) for value in (NAN, 0.0)
    )
    for row, length in enumerate(lengths):
        assert_same(got[row, : 2 * length], expected[row, : 2 * length], f"row {row}")
        for stack, rate in ((0, 1), (1, 2)):
            a, b = (part[stack][:, :, row, : rate * length] for part in (got_rows, rows))
            assert_same(a, b, f"keys and values {stack} of row {row}")
    for a, b, what in zip(got_tails, tails, Tails._fields, strict=True):
        assert_same(a, b, what)


def test_a_longer_bucket_changes_rounding_only():
    x, n = embedded(3, 1, 11), torch.tensor([11])
    short, long = ENCODER.offline(x, n), ENCODER.offline(F.pad(x, (0, 0, 0, 30)), n)
    assert_close(long[:, :22], short, TOLERANCE)


@pytest.mark.parametrize(
    ("first", "end"),
    [(-4, 9), (TABLE_FIRST, -1), (TABLE_END - 5, TABLE_END), (TABLE_END - 1, TABLE_END + 4), (TABLE_FIRST - 2, 3)],
)
def test_distances_equal_projected_waves(first, end):
    """Inside the table and beyond it. Float32 projections of waves: 1e-5."""
    attention = ENCODER.encoders[0].self_attn
    waves = torch.stack([distance_wave(distance, WIDTH) for distance in range(first, end)])
    expected = waves @ attention.linear_pos.weight.double().T
    got = attention.distances(first, end).transpose(0, 1).flatten(1)
    assert_close(got, expected.float(), 1e-5)


def test_sequences_longer_than_the_table(monkeypatch):
    """A table that is too short for a sequence gives the same frames as a sufficient one."""
    config = EncoderConfig(width=16, heads=2, inner=24, n_layers=1, n_up_layers=1)
    monkeypatch.setattr("models.token2wav.flow.conformer.TABLE_FIRST", -6)
    monkeypatch.setattr("models.token2wav.flow.conformer.TABLE_END", 7)
    with on_meta():
        short = RelativeAttention(config.width, config.heads)
    assert short.table.shape == (13, 16)
    attention = ENCODER.encoders[0].self_attn
    short.load_state_dict(attention.state_dict(), assign=True)
    short.derive("cpu", torch.float32)
    x, n = embedded(5, 1, 12), torch.tensor([12])
    mapping, cache = without_cache(n, 12), x.new_zeros(2, 0, ENCODER.heads, ENCODER.head_dim)
    got = short(x, mapping, mapping.mask, distance_columns(mapping, 12), cache)[0]
    monkeypatch.undo()
    assert_close(got, attention(x, mapping, mapping.mask, distance_columns(mapping, 12), cache)[0], 1e-6)
