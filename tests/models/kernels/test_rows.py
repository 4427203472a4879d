"""Row kernels against the modules that they replace.

Where equal bits are expected, values are small whole numbers: sums of their squares are exact in any order.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.layers.rotary import rotary_angles, rotary_frequencies, rotate
from models.layers.transformer import RMSNorm
from tests.models.compare import assert_close, assert_same

pytest.importorskip("triton")

from models.kernels.rows import CacheRows, HeadNorms, add_layer_norm, add_rms_norm, qkv_rows, silu_mul

EPS = 1e-3
N_SLOTS, LENGTH = 4, 9  # the last slot is for padding
DTYPES = [torch.float32, torch.float16]
gpu = pytest.mark.gpu


def whole(*shape: int, seed: int = 0, limit: int = 8) -> Tensor:
    return torch.randint(-limit, limit + 1, shape, generator=torch.Generator().manual_seed(seed)).float()


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def with_noise(norm: nn.Module) -> nn.Module:
    for seed, parameter in enumerate(norm.parameters()):
        parameter.data = noise(*parameter.shape, seed=seed + 50)
    return norm.requires_grad_(False)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sum_and_rms_norm_round_as_the_module(dtype):
    norm = with_noise(RMSNorm(48, EPS)).to(dtype)
    x, added = whole(2, 3, 48).to(dtype), whole(2, 3, 48, seed=1).to(dtype)
    stream, normed = add_rms_norm(x, added, norm.weight, EPS)
    assert_same(stream, x + added)
    assert_same(normed, norm(x + added))


def test_sum_is_rounded_before_the_norm():
    norm = with_noise(RMSNorm(32, EPS)).half()
    x, added = whole(4, 32).half() * 256, noise(4, 32, seed=1).half()
    stream, normed = add_rms_norm(x, added, norm.weight, EPS)
    assert_same(stream, x + added)
    assert_close(normed, norm(x + added), 2e-3)


def test_rms_norm_without_an_addend_returns_the_stream():
    norm, x = with_noise(RMSNorm(40, EPS)), noise(5, 40)
    stream, normed = add_rms_norm(x, None, norm.weight, EPS)
    assert stream is x
    assert_close(normed, norm(x), 1e-6)


def test_partial_sums_are_added_in_order_and_rounded_once():
    norm = with_noise(RMSNorm(48, EPS)).half()
    x, parts = whole(3, 1, 48).half(), noise(3, 3, 1, 48, seed=1) * 9
    total = ((parts[0] + parts[1]) + parts[2]).half()
    stream, normed = add_rms_norm(x, parts, norm.weight, EPS)
    assert_same(stream, x + total)
    assert_close(normed, norm(x + total), 2e-3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sum_and_layer_norm_equal_the_module(dtype):
    norm = with_noise(nn.LayerNorm(72, EPS)).to(dtype)
    x, added = noise(2, 5, 72).to(dtype), noise(2, 5, 72, seed=1).to(dtype)
    stream, normed = add_layer_norm(x, added, norm.weight, norm.bias, EPS)
    assert_same(stream, x + added)
    assert_close(normed, norm(x + added), 2e-6 if dtype == torch.float32 else 4e-3)
    stream, normed = add_layer_norm(x, None, norm.weight, norm.bias, EPS)
    assert stream is x
    assert_close(normed, norm(x), 2e-6 if dtype == torch.float32 else 4e-3)


def test_norms_accept_strided_rows():
    norm = with_noise(RMSNorm(16, EPS))
    x, added = whole(3, 4, 16)[:, -1], whole(3, 40, seed=1)[:, 8:24]
    stream, normed = add_rms_norm(x, added, norm.weight, EPS)
    assert_same(stream, x + added)
    assert_same(normed, norm(x + added))


class Heads:
    """A call of `qkv_rows`, and the result of the modules for the same rows."""

    def __init__(self, heads: int, kv_heads: int, D: int, dtype: torch.dtype, norm: bool, device: str = "cpu"):
        self.heads, self.kv_heads, self.D = heads, kv_heads, D
        self.qkv = whole(2, 3, (heads + 2 * kv_heads) * D).to(device, dtype)
        self.norms = [with_noise(RMSNorm(D, EPS)).to(device, dtype) for _ in range(2)] if norm else None
        if norm:
            self.norms[1].weight += 1
        self.slots = torch.tensor([[2, 2, 2], [0, 0, 3]], device=device)  # one padding row
        self.index = torch.tensor([[6, 7, 8], [0, 1, 2]], device=device)
        positions = torch.tensor([[16000, 16001, 16002], [4, 5, 6]], device=device)
        self.cos, self.sin = rotary_angles(positions, rotary_frequencies(D, 10000.0, device))
        shape = (N_SLOTS, kv_heads, LENGTH, D)
        self.k, self.v = (torch.full(shape, fill, dtype=dtype, device=device) for fill in (-1.0, -2.0))

    def plain(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, and both caches after the call, from the modules."""
        H, KV, D = self.heads, self.kv_heads, self.D
        q, k, v = (part.unflatten(-1, (-1, D)) for part in self.qkv.split([H * D, KV * D, KV * D], -1))
        if self.norms:
            q, k = self.norms[0](q), self.norms[1](k)
        cos, sin = self.cos.unsqueeze(2), self.sin.unsqueeze(2)
        k_cache, v_cache = self.k.clone(), self.v.clone()
        k_cache[self.slots, :, self.index] = rotate(k, cos, sin)
        v_cache[self.slots, :, self.index] = v
        return rotate(q, cos, sin), k_cache, v_cache

    def run(self, qkv: Tensor | None = None) -> Tensor:
        norms = HeadNorms(*(norm.weight for norm in self.norms), EPS) if self.norms else None
        qkv = self.qkv if qkv is None else qkv
        return qkv_rows(qkv, self.heads, self.kv_heads, self.rows(), (self.cos, self.sin), norms)

    def rows(self) -> CacheRows:
        return CacheRows(self.slots, self.index, self.k, self.v)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "norm"), [(4, 2, True), (3, 3, False)])
def test_heads_are_normalized_rotated_and_cached_as_by_the_modules(heads, kv_heads, norm, dtype):
    call = Heads(heads, kv_heads, 16, dtype, norm)
    q, k_cache, v_cache = call.plain()
    assert_same(call.run(), q, "queries")
    assert_same(call.k, k_cache, "keys")  # the whole cache: no other row changes
    assert_same(call.v, v_cache, "values")


def test_heads_accept_partial_sums():
    call = Heads(4, 2, 16, torch.float16, True)
    q, k_cache, v_cache = call.plain()
    part = whole(*call.qkv.shape, seed=3)
    assert_same(call.run(torch.stack((part, call.qkv.float() - part))), q, "queries")
    assert_same(call.k, k_cache, "keys")
    assert_same(call.v, v_cache, "values")


def test_heads_accept_strided_rows_and_caches():
    call = Heads(4, 2, 16, torch.float32, True)
    q, k_cache, v_cache = call.plain()
    wide = torch.zeros(2, 3, call.qkv.shape[-1] + 32)
    wide[..., 32:] = call.qkv
    roomy = torch.zeros(2, N_SLOTS, 2, LENGTH + 5, 16)
    roomy[0, :, :, :LENGTH], roomy[1, :, :, :LENGTH] = call.k, call.v
    call.k, call.v = roomy[:, :, :, :LENGTH]
    assert_same(call.run(wide[..., 32:]), q)
    assert_same(call.k, k_cache)
    assert_same(call.v, v_cache)
    assert not roomy[:, :, :, LENGTH:].any()


def test_without_angles_only_keys_and_values_are_written():
    call = Heads(3, 3, 16, torch.float16, False)
    q = qkv_rows(call.qkv, 3, 3, call.rows())
    assert q.data_ptr() == call.qkv.data_ptr()
    _, k, v = call.qkv.unflatten(-1, (9, 16)).split(3, 2)
    assert_same(q, call.qkv[..., :48].unflatten(-1, (3, 16)))
    assert_same(call.k[call.slots, :, call.index], k)
    assert_same(call.v[call.slots, :, call.index], v)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gate_is_rounded_before_the_product(dtype):
    gate_up = noise(2, 3, 100).to(dtype) * 4
    gate, up = gate_up.chunk(2, -1)
    assert_close(silu_mul(gate_up) / up, F.silu(gate) * up / up, 2e-6 if dtype == torch.float32 else 4e-3)


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
def test_gate_accepts_values_that_overflow_exp():
    gate_up = torch.tensor([[-200.0, 200.0, 0.0, 1.0, 2.0, 3.0]])
    assert_close(silu_mul(gate_up), torch.tensor([[0.0, 400.0, 0.0]]), 1e-6)


def test_empty_input_returns_empty_output():
    empty = torch.zeros(0, 16)
    stream, normed = add_rms_norm(empty, empty, torch.ones(16), EPS)
    assert stream.shape == normed.shape == (0, 16)
    assert silu_mul(empty).shape == (0, 8)
    caches = torch.zeros(2, 1, 1, 2, 4)
    none = torch.zeros(0, 1, dtype=torch.int64)
    angles = torch.zeros(0, 1, 2)
    assert qkv_rows(torch.zeros(0, 1, 16), 2, 1, CacheRows(none, none, *caches), (angles, angles)).shape[0] == 0


@gpu
@pytest.mark.parametrize("width", [768, 4096])
def test_norms_in_bfloat16_on_the_gpu(width):
    norm = with_noise(RMSNorm(width, EPS)).to("cuda", torch.bfloat16)
    x, added = (noise(33, width, seed=seed).to("cuda", torch.bfloat16) for seed in (1, 2))
    stream, normed = add_rms_norm(x, added, norm.weight, EPS)
    assert_same(stream, x + added)
    want = norm(x + added).float()
    # A quotient may differ by one rounding, since the sum of squares is computed in another order.
    assert ((normed.float() - want).abs() <= 2**-6 * want.abs()).all()
    assert (normed.float() != want).float().mean() < 0.01


@gpu
@pytest.mark.parametrize(("heads", "kv_heads", "D", "norm"), [(32, 8, 128, True), (12, 12, 64, False)])
def test_heads_in_bfloat16_on_the_gpu(heads, kv_heads, D, norm):
    call = Heads(heads, kv_heads, D, torch.bfloat16, norm, "cuda")
    q, k_cache, v_cache = call.plain()
    assert_close(call.run().float(), q.float(), 2**-5 * q.abs().max().item())
    assert_close(call.k.float(), k_cache.float(), 2**-5 * k_cache.abs().max().item())
    assert_same(call.v, v_cache)


@gpu
def test_cache_offsets_beyond_32_bits_on_the_gpu():
    k, v = torch.zeros(2, 3, 8, 700_000, 128, dtype=torch.bfloat16, device="cuda").unbind()  # past 2^31 elements
    qkv = noise(1, 1, 48 * 128).to("cuda", torch.bfloat16)
    place = torch.full((1, 1), 2, device="cuda"), torch.full((1, 1), 699_999, device="cuda")
    cos, sin = torch.ones(1, 1, 64, device="cuda"), torch.zeros(1, 1, 64, device="cuda")
    qkv_rows(qkv, 32, 8, CacheRows(*place, k, v), (cos, sin))
    assert_same(k[2, :, -1].flatten(), qkv[0, 0, 32 * 128 : 40 * 128])
    assert_same(v[2, :, -1].flatten(), qkv[0, 0, 40 * 128 :])
    assert int(k.count_nonzero()) == int(k[2, :, -1].count_nonzero())
