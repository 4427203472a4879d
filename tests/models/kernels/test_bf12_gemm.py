"""Products with weights in 12 bits against those of the weights. On a CPU the kernel runs in Triton's interpreter."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.kernels.bf12 import GROUP, GROUP_WORDS, LEAST_ENTRIES, Bf12Matrix, encode
from tests.models.compare import assert_close, assert_same

pytest.importorskip("triton")

from models.kernels import bf12_gemm
from models.kernels.bf12_gemm import bf12_gated_linear, bf12_linear, bf12_parts, bf12_tiles
from models.kernels.skinny_gemm import MAX_ROWS

pytestmark = pytest.mark.usefixtures("exact_products")
K = 3 * GROUP
DEVICES = (
    pytest.param("cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are built for the GPU")),
    pytest.param("cuda", marks=pytest.mark.gpu),
)
# Of the language model at released size.
SHAPES = ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288))


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weight_with_exceptions(n_rows: int, n_columns: int = K) -> Tensor:
    """Rows of different size; zeros, and one row with more exceptions than entries of every row."""
    weight = noise(n_rows, n_columns, seed=1) * torch.logspace(-2, 2, n_rows)[:, None]
    weight[3, 7], weight[4, 1], weight[5, 0] = 0.0, -(2.0**-30), 2.0**-28
    weight[n_rows - 1, : LEAST_ENTRIES + 3] = 2.0**-9  # counts beside numbers of about 100
    return weight.bfloat16()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("n_rows", [1, 5, 33])
def test_product_equals_that_of_the_weight(n_rows: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bf12_gemm, "MIN_SPLIT_GROUPS", 1)
    # 70: the last tile is partly filled.
    x, weight = noise(n_rows, K).to(device), weight_with_exceptions(70).to(device)
    matrix = encode(weight)
    assert matrix is not None
    assert len(matrix.exceptions) > LEAST_ENTRIES
    wide = weight.double()
    expected = F.linear(x.double(), wide).float()
    sizes = wide.abs().sum(1).float()
    assert_close(bf12_linear(x, matrix) / sizes, expected / sizes, 1e-6, "product")
    parts = bf12_parts(x, matrix)
    assert len(parts) == bf12_tiles(matrix, n_rows).splits
    halves = encode(weight[:64])
    assert halves is not None
    gate, up = expected[:, :32], expected[:, 32:64]
    got = bf12_gated_linear(x, halves)
    assert_close(got / sizes[32:64], F.silu(gate) * up / sizes[32:64], 2e-5, "gated product")


def test_sums_are_split_in_the_same_way_for_all_numbers_of_rows() -> None:
    found = []
    for n_rows, n_columns in SHAPES:
        words = n_columns // GROUP * GROUP_WORDS
        sizes = ((n_rows, words), torch.int32), ((n_rows,), torch.uint8), ((LEAST_ENTRIES, n_rows), torch.int32)
        matrix = Bf12Matrix(*(torch.empty(size, dtype=dtype, device="meta") for size, dtype in sizes))
        plans = {(bf12_tiles(matrix, n).splits, bf12_tiles(matrix, n).warps) for n in (1, 8, 9, 32, 64)}
        assert len(plans) == 1, f"{n_rows} x {n_columns}: expected one split, got {plans}"
        found += [splits for splits, _ in plans]
    assert found == [2, 4, 1, 4]


def test_no_rows() -> None:
    matrix = encode(noise(64, GROUP).bfloat16())
    assert matrix is not None
    empty = torch.empty(0, GROUP)
    assert bf12_linear(empty, matrix).shape == (0, 64)
    assert bf12_gated_linear(empty, matrix).shape == (0, 32)
    with pytest.raises(AssertionError, match=f"expected at most {MAX_ROWS}, got 65"):
        bf12_linear(torch.empty(65, GROUP), matrix)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_other_rows_change_no_bit_on_the_gpu(shape: tuple[int, int]) -> None:
    weight = weight_with_exceptions(*shape).cuda()
    matrix = encode(weight)
    assert matrix is not None
    x = noise(64, shape[1]).cuda().bfloat16()
    alone, alone_gated = bf12_linear(x[:1], matrix), bf12_gated_linear(x[:1], matrix)
    exact = F.linear(x[:1].double(), weight.double())
    error = ((bf12_parts(x[:1], matrix).double().sum(0) - exact).norm() / exact.norm()).item()
    limit = 1e-5 if bf12_tiles(matrix, 1).splits > 1 else 3e-3  # sums are rounded to bfloat16 if they are not split
    assert error < limit, f"relative error: expected below {limit}, got {error:.2e}"
    for n_rows in (2, 8, 9, 16, 17, 32, 33, 64):
        assert_same(bf12_linear(x[:n_rows], matrix)[:1], alone, f"beside {n_rows - 1} rows")
        assert_same(bf12_gated_linear(x[:n_rows], matrix)[:1], alone_gated, f"gated, beside {n_rows - 1} rows")
