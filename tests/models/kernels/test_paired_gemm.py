"""Rows as pairs of 8-bit numbers: their values, the kernels that make them, and products with quantised weights."""

import pytest
import torch
from torch import Tensor

from models.checkpoint.precision import Kind
from models.checkpoint.quantized import KINDS, QuantizedMatrix, concatenated, quantize
from tests.models.compare import assert_same
from tests.models.kernels.test_quantized_gemm import DEVICES, check, cpu_only, drawn, exact

pytest.importorskip("triton")

from models.kernels import paired_rows as paired_rows_module
from models.kernels.attention import AttentionInputs, slot_attention, slot_attention_pairs
from models.kernels.launch import SMALL_WEIGHT
from models.kernels.paired_gemm import PairedTiles, paired_product, paired_tiles
from models.kernels.paired_rows import PairedRows, paired_rows, takes_pairs
from models.kernels.quantized_gemm import (
    quantized_gated_linear,
    quantized_linear,
    quantized_parts,
)
from models.kernels.rows import add_rms_norm, add_rms_norm_pairs, silu_mul
from models.kernels.skinny_gemm import MAX_ROWS

K = 512
MAX_ERROR = 2e-5  # of numbers far below their group's largest; others are exact
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")


@pytest.fixture
def pairs_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small weights multiply pairs too, on every device."""
    monkeypatch.setattr(paired_rows_module, "SMALL_WEIGHT", 0)
    monkeypatch.setattr(paired_rows_module, "multiplies_pairs", lambda device: True)


def numbers(pairs: PairedRows) -> Tensor:
    """The rows [M, K] in float64."""
    high, low = pairs.values.cpu().double().flatten(0, -3).unbind(1)
    steps = pairs.steps.cpu().double().T.repeat_interleave(128, 1)
    return steps * (high + low / 16 if pairs.is_fp8 else 256 * high + low)


def assert_same_pairs(got: PairedRows, want: PairedRows, name: str) -> None:
    assert got.shape == want.shape, f"{name}: expected {want.shape}, got {got.shape}"
    for field, one, other in zip(PairedRows._fields, got, want, strict=True):
        of = (one.view(torch.uint8), other.view(torch.uint8)) if one.dtype is torch.float8_e4m3fn else (one, other)
        assert_same(*of, f"{name}: {field}")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_pairs_are_the_rows(kind: Kind, device: str) -> None:
    x = (drawn(5, 640) * torch.logspace(-4, 4, 640)).bfloat16().double()
    x[1], x[2, 130:140], x[3, 7] = 0.0, 1e-42, 255.0 * 2**100  # zeros, subnormal, a row with one large number
    got = paired_rows(x.bfloat16().to(device), kind)
    assert got.shape == x.shape and got.n_rows == 5
    largest = x.bfloat16().double().abs().unflatten(1, (-1, 128)).amax(2).repeat_interleave(128, 1)
    error = (numbers(got) - x.bfloat16().double()).abs()
    # Triton's interpreter truncates numbers that are too small for fp8.
    most = largest * 2.0 ** (-16 if kind == "fp8" else -14)
    assert (error <= most).all(), f"expected errors of at most {most[error > most]}, got {error[error > most]}"
    near = x.bfloat16().double().abs() >= largest / (8192 if kind == "fp8" else 64)
    assert not error[near].any(), f"expected numbers near the largest to be exact, got errors up to {error[near].max()}"
    whole = (x.bfloat16().double() / got.steps.cpu().double().T.repeat_interleave(128, 1)).round()
    assert_same(got.sums.cpu(), whole.unflatten(1, (-1, 128)).sum(2).T.int(), "sums of groups")


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_a_group_that_is_not_finite_is_nan(kind: Kind) -> None:
    x = drawn(3, 256).bfloat16()
    x[0, 3], x[1, 200] = float("nan"), float("-inf")
    steps = paired_rows(x, kind).steps
    assert steps.isnan().tolist() == [[True, False, False], [False, True, False]], steps


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_norms_and_attention_as_pairs(kind: Kind, device: str) -> None:
    """What a kernel stores as pairs are the pairs of what it stores otherwise."""
    x, added, gain = (one.bfloat16().to(device) for one in (drawn(2, 3, 384), drawn(2, 3, 384, seed=1), drawn(384)))
    stream, normed = add_rms_norm(x, added, gain, 1e-6)
    same, pairs = add_rms_norm_pairs(x, added, gain, 1e-6, kind)
    assert_same(same, stream, "sum")
    assert_same_pairs(pairs, paired_rows(normed, kind), "norm")
    q, k, v = (drawn(*sizes).bfloat16().to(device) for sizes in ((2, 2, 4, 128), (2, 2, 600, 128), (2, 2, 600, 128)))
    last = torch.tensor([[300, 301], [598, 599]], device=device)
    for most in (256, 600):  # one part, and three
        inputs = AttentionInputs(q, k, v, None, None, last.clamp(max=most - 1))
        want = paired_rows(slot_attention(*inputs, most=most), kind)
        assert_same_pairs(slot_attention_pairs(inputs, kind, most=most), want, f"attention to {most} rows")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("plan", [PairedTiles(64, 1), PairedTiles(32, 2), PairedTiles(128, 4, 3)], ids=str)
def test_products_of_pairs(kind: Kind, plan: PairedTiles) -> None:
    x, weight = drawn(5, K).bfloat16(), quantize(drawn(72, K, seed=1), kind)  # 72: the last tile is partly filled
    out = torch.empty(plan.splits, 5, 72)
    paired_product(paired_rows(x, kind), weight, out, plan)
    check(out.double().sum(0), exact(x, weight), MAX_ERROR)


@pytest.mark.usefixtures("pairs_everywhere")
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_does_not_depend_on_the_others(kind: Kind) -> None:
    x, weight = drawn(MAX_ROWS, K).bfloat16(), quantize(drawn(72, K, seed=1), kind)
    x[4] = float("nan")
    alone = quantized_linear(x[2:3], weight)
    check(alone, exact(x[2:3], weight), 4e-3)
    for n_rows in (3, 5, 9, 33, MAX_ROWS):
        got = quantized_linear(x[:n_rows], weight)
        assert_same(got[2:3], alone, f"a row beside {n_rows - 1} others")
        assert n_rows < 5 or got[4].isnan().all(), f"expected a row of NaN, got {got[4]}"


@pytest.mark.usefixtures("pairs_everywhere")
@pytest.mark.parametrize("kind", KINDS)
def test_gated_products_of_pairs(kind: Kind) -> None:
    x, halves = drawn(3, K).bfloat16(), [quantize(drawn(68, K, seed=seed), kind) for seed in (1, 2)]
    weight = concatenated(halves)
    product = torch.cat([exact(x, half) for half in halves], 1).bfloat16()
    got = quantized_gated_linear(x, weight)
    check(got, silu_mul(product).double(), 8e-3)
    assert_same(quantized_gated_linear(paired_rows(x, kind), weight), got, "of rows that are pairs already")
    assert quantized_parts(paired_rows(x, kind), weight).shape[1:] == (3, 136)


def test_which_weights_multiply_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    def matrix(N: int, K: int, kind: Kind, group: int = 128) -> QuantizedMatrix:
        with torch.device("meta"):
            if kind != "int4":
                dtype = torch.int8 if kind == "int8" else torch.float8_e4m3fn
                return QuantizedMatrix(torch.empty(N, K, dtype=dtype), torch.empty(N))
            scale = torch.empty(K // group, N, dtype=torch.float16)
            return QuantizedMatrix(torch.empty(N, K // 2, dtype=torch.uint8), scale, scale.to(torch.uint8))

    bf16 = torch.bfloat16
    assert not takes_pairs(matrix(4096, 4096, "int8"), 1, bf16), "expected none on a device without such products"
    monkeypatch.setattr(paired_rows_module, "multiplies_pairs", lambda device: True)
    for kind in KINDS:
        assert takes_pairs(matrix(4096, 4096, kind), MAX_ROWS, bf16), kind
        assert not takes_pairs(matrix(4096, 4096, kind), MAX_ROWS + 1, bf16), kind
        assert not takes_pairs(matrix(4096, 4096, kind), 1, torch.float32), kind
        assert not takes_pairs(matrix(2048, SMALL_WEIGHT // 2048, kind), 1, bf16), kind
        plans = [paired_tiles(matrix(4096, 12288, kind), n_rows) for n_rows in (1, 5, 9, 33, MAX_ROWS)]
        assert len({plan.splits for plan in plans}) == 1, f"expected sums in one order, got {plans}"
        assert plans[0].splits == (8 if kind == "int4" else 4), plans
        assert paired_tiles(matrix(24576, 4096, kind), 1, gated=True).splits == 1, kind
    # Large tiles of many rows leave no multiprocessor without a program.
    assert [paired_tiles(matrix(N, K, "fp8"), 33).rows for N, K in ((24576, 4096), (6144, 4096))] == [128, 128]
    assert [paired_tiles(matrix(N, K, "fp8"), 33).rows for N, K in ((4096, 12288), (4096, 4096))] == [64, 64]
    assert not takes_pairs(matrix(4096, 4160, "int8"), 1, bf16), "expected whole groups"
    assert not takes_pairs(matrix(4098, 4096, "int4"), 1, bf16), "expected rows by fours for int4"
    assert not takes_pairs(matrix(4096, 4096, "int4", group=64), 1, bf16), "expected groups of 128"
    assert not takes_pairs(torch.empty(4096, 4096, dtype=bf16), 1, bf16), "expected none for a plain weight"


@cpu_only
def test_pairs_of_another_kind_are_refused() -> None:
    x, weight = drawn(1, K).bfloat16(), quantize(drawn(64, K), "int8")
    with pytest.raises(AssertionError, match="expected those of int8, got"):
        paired_product(paired_rows(x, "fp8"), weight, torch.empty(1, 1, 64), PairedTiles(64))
    zeros = torch.zeros(6, 64, dtype=torch.uint8)
    small_groups = QuantizedMatrix(torch.zeros(64, 192, dtype=torch.uint8), zeros.half(), zeros)
    with pytest.raises(AssertionError, match="group: expected 128, got 64"):
        paired_product(
            paired_rows(drawn(1, 384).bfloat16(), "int4"), small_groups, torch.empty(1, 1, 64), PairedTiles(64)
        )
