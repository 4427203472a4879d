"""Fused linear layers against the separate operations; in Triton's interpreter on a CPU."""

import pytest
import torch
import torch.nn.functional as F

from models.checkpoint.precision import Kind
from models.checkpoint.quantized import quantize
from tests.models.compare import assert_close

pytest.importorskip("triton")

from models.token2wav.flow.fused_linear import Epilogue, LinearTiles, LinearWeights, Norm, product, product_tiles

DEVICES = (
    pytest.param("cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are built for the GPU")),
    pytest.param("cuda", marks=pytest.mark.gpu),
)
ACTIVATIONS = {"": lambda x: x, "gelu": lambda x: F.gelu(x, approximate="tanh"), "silu": F.silu}


def drawn(*shape: int, device: str) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, device=device)


@pytest.mark.parametrize(
    "tiles",
    [
        LinearTiles(16, 16, 128, 8, 8, 1),
        LinearTiles(16, 32, 32, 2, 4, 1),
        LinearTiles(16, 32, 256, 16, 16, 1),
        LinearTiles(16, 32, 16, 1, 4, 2),
    ],
    ids=["one-tile", "four-at-once", "sixteen-parts", "loop"],
)
@pytest.mark.parametrize("activation", ["", "gelu", "silu"])
@pytest.mark.parametrize("device", DEVICES)
def test_activation_gate_and_base(device: str, activation: str, tiles: LinearTiles):
    """Rows, columns and the inner axis are not multiples of their tiles."""
    M, N, K = 21, 40, 116
    a, weight = drawn(M, K, device=device), drawn(N, K, device=device) / K**0.5
    bias, gate, base = drawn(N, device=device), drawn(N + 1, device=device)[1:], drawn(M, N, device=device)
    expected = ACTIVATIONS[activation](F.linear(a, weight, bias))
    linear = LinearWeights(weight, bias)
    plain = product(a, linear, torch.empty_like(base), epilogue=Epilogue(activation), tiles=tiles)
    assert_close(plain, expected, 1e-5)
    epilogue = Epilogue(activation, base, gate)
    added = product(a, linear, base.clone(), epilogue=epilogue, tiles=tiles)
    assert_close(added, base + gate * expected, 1e-5)
    product(a, linear, base, epilogue=epilogue, tiles=tiles)
    assert_close(base, added, 0.0, "in place")


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize(("K", "norm", "n_bytes"), [(80, True, 2), (120, False, 2), (272, False, 4)])
@pytest.mark.parametrize("device", DEVICES)
def test_quantised_weights_equal_dequantised_ones(device: str, K: int, norm: bool, n_bytes: int, kind: Kind):
    """With all tiles read ahead, and in a loop."""
    M, N = 18, 40
    a, bias, gate, base = (drawn(*shape, device=device) for shape in ((M, K), (N,), (N,), (M, N)))
    matrix = quantize(drawn(N, K, device=device) / K**0.5, kind)
    shift = Norm(drawn(K, device=device), drawn(K, device=device), 1e-6, 1.0) if norm else None
    tiles = product_tiles(M, K, n_bytes, norm=norm, is_large=True)
    got, expected = (
        product(
            a, LinearWeights(weight, bias), torch.empty_like(base), norm=shift,
            epilogue=Epilogue("gelu", base, gate), tiles=tiles,
        )
        for weight in (matrix, matrix.dequantized())
    )  # fmt: skip
    assert_close(got, expected, 1e-5)


@pytest.mark.parametrize(("plus", "M", "is_large"), [(0.0, 18, True), (1.0, 18, False), (1.0, 40, True)])
@pytest.mark.parametrize("device", DEVICES)
def test_norm_precedes_the_product(device: str, plus: float, M: int, is_large: bool):
    N, K = 20, 52
    a, weight = 3 + 2 * drawn(M, K, device=device), drawn(N, K, device=device) / K**0.5
    scale, shift = drawn(K, device=device), drawn(K + 1, device=device)[1:]
    tiles = product_tiles(M, K, 2, norm=True, is_large=is_large)
    norm, linear = Norm(scale, shift, 1e-6, plus), LinearWeights(weight, None)
    got = product(a, linear, drawn(M, N, device=device), norm=norm, tiles=tiles)
    normed = F.layer_norm(a, (K,), eps=1e-6) * (plus + scale) + shift
    assert_close(got, normed @ weight.T, 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [None, "int8", "fp8"])
@pytest.mark.parametrize("M", [32, 68, 128])
@pytest.mark.parametrize(("K", "norm"), [(512, True), (512, False), (1536, False), (2048, False)])
def test_released_sizes_in_bfloat16(M: int, K: int, norm: bool, kind: Kind | None):
    a, weight = drawn(M, K, device="cuda"), (drawn(512, K, device="cuda") / K**0.5).bfloat16()
    stored = weight if kind is None else quantize(weight, kind)
    weight = weight if kind is None else stored.dequantized()
    bias, gate, base = drawn(512, device="cuda").bfloat16(), drawn(512, device="cuda"), drawn(M, 512, device="cuda")
    scale, shift = drawn(K, device="cuda"), drawn(K + 4, device="cuda")[4:]
    normed = F.layer_norm(a, (K,), eps=1e-6) * (1 + scale) + shift if norm else a
    expected = base + gate * F.linear(normed.bfloat16().float(), weight.float(), bias.float())
    product(
        a if norm else a.bfloat16(),
        LinearWeights(stored, bias),
        base,
        norm=Norm(scale, shift, 1e-6, 1.0) if norm else None,
        epilogue=Epilogue(base=base, gate=gate),
    )
    off = float((base - expected).norm() / expected.norm())
    assert off <= 1e-3, f"expected within 0.1 % in norm, got {off:.2g}"


@pytest.mark.parametrize("device", DEVICES)
def test_input_rows_repeat_for_the_second_half(device: str):
    a, weight, base = drawn(10, 20, device=device), drawn(16, 20, device=device), drawn(20, 16, device=device)
    got = product(a, LinearWeights(weight, None), torch.empty_like(base), epilogue=Epilogue(base=base))
    assert_close(got, base + (a @ weight.T).repeat(2, 1), 1e-5)


@pytest.mark.parametrize("n_bytes", [2, 4])
@pytest.mark.parametrize("is_large", [True, False])
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("K", [20, 80, 512, 600, 3000])
@pytest.mark.parametrize("M", [2, 64, 128])
def test_tiles_are_valid_for_the_kernel(M: int, K: int, norm: bool, is_large: bool, n_bytes: int):
    """At least sixteen elements of the inner axis per part, and the whole inner axis in one tile after a norm."""
    tiles = product_tiles(M, K, n_bytes, norm=norm, is_large=is_large)
    assert tiles.inner // tiles.split >= 16 and tiles.inner % tiles.split == 0
    assert not norm or tiles.inner >= K
    assert tiles.stages > 1 or tiles.inner >= K or 4 * tiles.inner >= K, "expected a pipelined loop"
