"""Building blocks against their formulas, written in float64."""

import math
from copy import deepcopy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.layers.backend import TORCH
from models.layers.kv_cache import KVCache
from models.layers.rotary import rotary_angles, rotary_frequencies, rotate
from models.layers.transformer import Backbone, DecoderConfig, Derived, GatedMLP, Projector, RMSNorm, attend
from tests.models.compare import assert_close, assert_same
from tests.models.layers import transformer_reference as slow


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def with_noise(module: torch.nn.Module) -> torch.nn.Module:
    for seed, parameter in enumerate(module.parameters()):
        parameter.data = noise(*parameter.shape, seed=seed)
    return module.requires_grad_(False)


def test_rms_norm_follows_its_formula():
    norm, x = with_noise(RMSNorm(16, eps=0.1)), noise(3, 5, 16, seed=9)
    w = {"norm.weight": norm.weight.double()}.__getitem__
    assert_close(norm(x), slow.rms_norm(x.double(), w, "norm", 0.1), 1e-6)


def test_rms_norm_of_bfloat16_rounds_before_the_weight():
    norm, x = with_noise(RMSNorm(64, eps=1e-6)).bfloat16(), noise(8, 64, seed=9).bfloat16()
    wide = x.float()
    unit = (wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt()).bfloat16()
    assert_same(norm(x), norm.weight * unit)


def test_projector_follows_its_formula():
    module, x = with_noise(Projector(6, 9)), noise(2, 4, 6, seed=9)
    w = slow.weights_of(module)
    expected = slow.linear(slow.linear(x.double(), w, "linear1").clamp(min=0), w, "linear2")
    assert_close(module(x), expected, 1e-5)


def test_gated_mlp_follows_its_formula():
    module, x = with_noise(GatedMLP(6, 9)), noise(2, 4, 6, seed=9)
    w = slow.weights_of(module)
    gate = slow.linear(x.double(), w, "gate_proj")
    expected = slow.linear(gate * gate.sigmoid() * slow.linear(x.double(), w, "up_proj"), w, "down_proj")
    assert_close(module(x), expected, 1e-4)
    assert {name.rpartition(".")[2] for name in module.state_dict()} == {"weight"}


@pytest.mark.parametrize("head_dim, theta", [(32, 1e4), (128, 1e6), (2, 5.0)])
def test_rotary_frequencies(head_dim, theta):
    got = rotary_frequencies(head_dim, theta, "cpu")
    expected = torch.tensor([theta ** (-2 * i / head_dim) for i in range(head_dim // 2)], dtype=torch.float64)
    assert got.dtype == torch.float32
    assert_close(got / expected, torch.ones_like(expected), 1e-6)


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**20),
    positions=st.lists(st.integers(0, 500), min_size=1, max_size=6),
    half=st.sampled_from([1, 4, 16]),
    theta=st.sampled_from([1e4, 1e6]),
)
def test_rotation_equals_complex_multiplication(seed, positions, half, theta):
    x, positions = noise(len(positions), 2 * half, seed=seed), torch.tensor(positions)
    got = rotate(x, *rotary_angles(positions, rotary_frequencies(2 * half, theta, "cpu")))
    assert_close(got, slow.rope(x.double(), positions, theta), 2e-4)
    assert_close(got.norm(dim=-1), x.norm(dim=-1), 1e-5, "lengths")


@settings(max_examples=25)
@given(seed=st.integers(0, 2**20), m=st.integers(0, 200), n=st.integers(0, 200), shift=st.integers(0, 200))
def test_attention_scores_depend_on_relative_positions_only(seed, m, n, shift):
    q, k = noise(2, 1, 16, seed=seed)
    frequencies = rotary_frequencies(16, 1e4, "cpu")

    def score(m: int, n: int) -> torch.Tensor:
        at_m, at_n = (rotary_angles(torch.tensor([p]), frequencies) for p in (m, n))
        return (rotate(q, *at_m) * rotate(k, *at_n)).sum()

    assert_close(score(m + shift, n + shift), score(m, n), 1e-3)


def test_rotation_computes_in_float32_and_keeps_the_dtype():
    x = noise(40, 16).bfloat16()
    angles = rotary_angles(torch.arange(40), rotary_frequencies(16, 1e4, "cpu"))
    assert all(part.dtype == torch.float32 for part in angles)
    assert_same(rotate(x, *angles), rotate(x.float(), *angles).bfloat16())


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**20),
    B=st.integers(1, 3),
    T=st.integers(1, 4),
    L=st.integers(1, 6),
    kv_heads=st.integers(1, 3),
    groups=st.sampled_from([1, 2, 4]),
    kind=st.sampled_from(["none", "row", "matrix", "additive"]),
)
def test_attention_with_grouped_heads(seed, B, T, L, kv_heads, groups, kind):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(*shape, 8, generator=generator)
        for shape in ((B, T, kv_heads * groups), (B, kv_heads, L), (B, kv_heads, L))
    )
    seen = torch.rand(B, 1 if kind == "row" else T, L, generator=generator) < 0.6
    seen[..., seed % L] = True
    mask = {"none": None, "additive": torch.zeros(seen.shape).masked_fill(~seen, -math.inf)}.get(kind, seen)
    got = attend(q, k, v, mask)
    for b in range(B):
        visible = None if kind == "none" else seen[b].expand(T, L)
        heads = [
            slow.attention(q[b, :, h].double(), k[b, h // groups].double(), v[b, h // groups].double(), visible)
            for h in range(kv_heads * groups)
        ]
        assert_close(got[b], torch.cat(heads, dim=1), 1e-5, f"row {b}")


def test_derive_must_be_implemented():
    with pytest.raises(NotImplementedError, match=r"Derived\.derive"):
        Derived().derive("cpu", torch.float32)


@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize(("slots", "n_rows"), [([1], 1), ([2], 5), ([2, 0], 1), ([0, 1], 5)])
def test_reading_in_place_gives_the_same_output_and_cache(slots: list[int], n_rows: int, kv_heads: int):
    """Output and cache are the same with and without `runs_eager`, for one slot and for several."""
    config = DecoderConfig(
        vocab_size=8,
        width=32,
        inner=48,
        n_layers=2,
        heads=4,
        kv_heads=kv_heads,
        head_dim=8,
        eps=1e-6,
        rope_theta=1e4,
        qk_norm=True,
    )
    stack = with_noise(Backbone(config))
    stack.derive("cpu", torch.float32)
    copied = KVCache(
        n_layers=2, n_slots=3, max_len=24, kv_heads=kv_heads, head_dim=8, dtype=torch.float32, device="cpu"
    )
    for number, tensor in enumerate((*copied.k, *copied.v)):
        tensor.copy_(noise(*tensor.shape, seed=number))
    for counter in (copied.lengths, copied.positions):
        counter.copy_(torch.tensor([7, 3, 11, 0]))
    in_place = deepcopy(copied)
    in_place.runs_eager = True
    embeds, n_new = noise(len(slots), n_rows, 32, seed=50), torch.tensor([n_rows, max(1, n_rows - 2)][: len(slots)])
    outputs = [stack(embeds, cache, torch.tensor(slots), n_new, 20, TORCH) for cache in (in_place, copied)]
    for row, n in enumerate(n_new.tolist()):
        assert_same(outputs[0][row, :n], outputs[1][row, :n], f"slot {slots[row]}")
    for got, expected in zip(in_place.tensors(), copied.tensors(), strict=True):
        assert_same(got[:3], expected[:3])
