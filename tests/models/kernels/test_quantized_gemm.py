"""Products with quantised weights against their formula in float64: tiles, splits, groups, gating, many rows."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.checkpoint.precision import Kind
from models.checkpoint.quantized import KINDS, QuantizedMatrix, concatenated, quantize
from tests.models.compare import assert_same

pytest.importorskip("triton")

from models.kernels import paired_gemm, quantized_gemm, word_gemm
from models.kernels.quantized_gemm import (
    MAX_SPLIT_ROWS,
    PAIR_ROWS,
    WIDE_ROWS,
    ManyTiles,
    dequantized,
    fp8_rows,
    many_tiles,
    quantized_gated_linear,
    quantized_linear,
    quantized_parts,
    quantized_tiles,
)
from models.kernels.rows import silu_mul
from models.kernels.skinny_gemm import MAX_ROWS, TILE_SIZES, TileSizes
from models.kernels.word_gemm import INT4_WORDS, WordTiles, word_tiles

K = 256
CUTS = [TileSizes(64, 64, splits=2), WordTiles(32, 32), WordTiles(64, 16, splits=2)]
MANY = ManyTiles(32, 64, 32)
# Sums of 256 products in float32, in another order.
MAX_ERROR = 2e-6
gpu = pytest.mark.gpu
cpu_only = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is off on a GPU")
DEVICES = (pytest.param("cpu", marks=cpu_only), pytest.param("cuda", marks=gpu))
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def exact(x: Tensor, weight: QuantizedMatrix) -> Tensor:
    """x times the weight by the formula, in float64, without the code under test."""
    values, scale = weight.values.double() if weight.zeros is None else None, weight.scale.double()
    if values is not None:
        return x.double() @ (values * scale[:, None]).T
    assert weight.zeros is not None
    columns = []
    half = weight.group // 2
    for column in range(weight.shape[1]):
        group, place = divmod(column, weight.group)
        byte = weight.values[:, group * half + place % half].int()
        value = (byte // 16 if place >= half else byte % 16).double()
        columns.append((value - weight.zeros[group].double()) * scale[group])
    return x.double() @ torch.stack(columns, 1).T


def check(got: Tensor, want: Tensor, most: float = MAX_ERROR) -> None:
    error = ((got.double() - want).norm() / want.norm()).item()
    assert error <= most, f"expected a relative error of at most {most}, got {error:.3g}"


def use_tiles(monkeypatch: pytest.MonkeyPatch, plan: TileSizes | WordTiles, weight: QuantizedMatrix) -> None:
    if isinstance(plan, WordTiles):
        own = plan if weight.zeros is None else plan._replace(words=INT4_WORDS)
        monkeypatch.setattr(quantized_gemm, "word_tiles", lambda *args, **options: own)
    else:
        monkeypatch.setattr(quantized_gemm, "word_tiles", lambda *args, **options: None)
        monkeypatch.setitem(TILE_SIZES, weight.shape, plan)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("plan", CUTS)
def test_few_rows(kind: Kind, plan: TileSizes | WordTiles, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = drawn(5, K), quantize(drawn(72, K, seed=1), kind)  # 72: the last tile is partly filled
    use_tiles(monkeypatch, plan, weight)
    check(quantized_linear(x, weight), exact(x, weight))
    parts = quantized_parts(x, weight)
    assert parts.shape == (plan.splits, 5, 72)
    check(parts.double().sum(0), exact(x, weight))
    together = quantized_linear(x, weight)
    x[:2], x[3:] = float("nan"), float("inf")
    assert_same(quantized_linear(x, weight)[2:3], together[2:3], "a row beside others that are not finite")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("plan", CUTS[:2])
def test_gated(kind: Kind, plan: TileSizes | WordTiles, monkeypatch: pytest.MonkeyPatch) -> None:
    x, halves = drawn(3, K).half(), [quantize(drawn(68, K, seed=seed), kind) for seed in (1, 2)]
    use_tiles(monkeypatch, plan, weight := concatenated(halves))
    product = torch.cat([exact(x, half) for half in halves], 1).half()
    got = quantized_gated_linear(x, weight)
    check(got, silu_mul(product).double(), 2e-3)


def test_which_weights_are_read_as_words() -> None:
    def tiles(N: int, K: int, kind: Kind, M: int = 1, *, gated: bool = False) -> WordTiles | None:
        return word_tiles(quantize(torch.zeros(N, K), kind), M, gated=gated)

    for kind in KINDS:
        few, many = tiles(768, 3072, kind), tiles(768, 3072, kind, MAX_ROWS)
        assert few is not None and many is not None and few.splits > 1, (kind, few, many)
        assert few[1:3] == many[1:3], f"{kind}: expected sums in one order for all numbers of rows, got {few}, {many}"
        gated = tiles(768, 3072, kind, gated=True)
        assert gated is not None and gated.splits == 1, (kind, gated)
    assert tiles(70, 256, "int8") is not None and tiles(70, 256, "int4") is None, "expected rows by fours for int4"
    assert tiles(72, 192, "int4") is None and tiles(72, 48, "fp8") is None, "expected whole groups and tiles"


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_many_rows_with_a_bias(kind: Kind, splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def tiles(weight: QuantizedMatrix) -> ManyTiles:
        return MANY._replace(inner=MANY.inner if weight.zeros is None else weight.group // 2, splits=splits)

    monkeypatch.setattr(quantized_gemm, "many_tiles", tiles)
    x, weight, bias = drawn(MAX_ROWS + 1, K), quantize(drawn(70, K, seed=1), kind), drawn(70, seed=2)
    got = quantized_linear(x, weight, bias)
    check(got, exact(x, weight) + bias)
    check(quantized_linear(x[:3], weight, bias), exact(x[:3], weight) + bias)


@pytest.mark.parametrize("kind", KINDS)
def test_products_of_65_rows_with_their_own_tiles(kind: Kind) -> None:
    x, weight = drawn(MAX_ROWS + 1, 512), quantize(drawn(70, 512, seed=1), kind)
    assert many_tiles(weight).splits == 4
    check(quantized_linear(x, weight), exact(x, weight))


@pytest.mark.parametrize("kind", KINDS)
def test_tiles_of_many_rows_divide_the_weight(kind: Kind) -> None:
    for N, columns in ((70, 256), (70, 96), (512, 3072), (MAX_SPLIT_ROWS + 8, 128)):
        weight = quantize(torch.zeros(N, columns), kind)
        stored = weight.values.shape[1]
        plan = many_tiles(weight)
        assert stored % (plan.inner * plan.splits) == 0, f"{kind} {N} x {columns}: expected whole tiles, got {plan}"
        expected = 4 if (N, columns) == (512, 3072) else 1
        assert plan.splits == expected or N == 70, f"expected {expected} parts, got {plan}"
        assert plan.inner == (weight.group // 2 if kind == "int4" else plan.inner) >= 16, f"{kind}: got {plan}"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_more_rows_are_products_of_the_dequantised_weight(kind: Kind, device: str) -> None:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    for N, columns in ((70, 96), (33, 640), (1, 32)):
        weight = quantize(drawn(N, columns, seed=1), kind).to(device)
        got = dequantized(weight, dtype)
        assert_same(got, weight.dequantized(dtype=dtype), f"{kind} {N} x {columns}")
        x, bias = drawn(PAIR_ROWS + 1, columns).to(device, dtype), drawn(N, seed=2).to(device, dtype)
        assert_same(quantized_linear(x, weight, bias), F.linear(x, got, bias), f"{kind} product of {N} x {columns}")
    x, weight = drawn(WIDE_ROWS + 1, 96).to(device, dtype), quantize(drawn(32, 96, seed=1), kind).to(device)
    check(quantized_linear(x, weight).cpu(), exact(x.cpu(), weight.to("cpu")), 2e-2 if device == "cuda" else MAX_ERROR)


def test_groups_of_32_and_every_fp8_number() -> None:
    weight = quantize(drawn(40, 96, seed=3), "int4")
    assert weight.group == 32 and quantized_tiles(weight).columns == 16
    x = drawn(2, 96)
    check(quantized_linear(x, weight), exact(x, weight))
    # Both zeros, subnormal and all other finite numbers.
    numbers = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn)
    numbers = torch.where(numbers.float().isfinite(), numbers.float(), 0).to(torch.float8_e4m3fn)
    every = QuantizedMatrix(numbers.view(16, 16), torch.ones(16))
    assert_same(quantized_linear(torch.eye(16), every), numbers.float().view(16, 16).T + 0.0)


def test_fp8_rows_are_sums_of_two() -> None:
    x = drawn(3, 300, seed=5) * torch.logspace(-3, 3, 300)
    values, scale = fp8_rows(x)
    first, rest = (values.double() * scale.double()).split(3)
    check(first, x.double(), 6e-2)  # Triton's interpreter does not round to the nearest number
    check(first + rest, x.double(), 4e-3)


def test_no_rows_and_too_many() -> None:
    weight = quantize(drawn(32, 64), "int8")
    assert quantized_linear(drawn(0, 64), weight).shape == (0, 32)
    with pytest.raises(AssertionError, match=f"at most {MAX_ROWS}, got {MAX_ROWS + 1}"):
        quantized_gated_linear(drawn(MAX_ROWS + 1, 64), weight)


def run_ptx(code: str, *operands: int) -> int:
    """The result of a block of PTX: $0 of operands $1, $2, ..., of 32 or 64 bits."""
    names = {f"${i}": operand for i, operand in enumerate(operands, 1)}

    def value(text: str) -> int:
        return names[text] if text in names else int(text, 0)

    def bfloat16_pairs(*words: int) -> list[Tensor]:
        return [
            torch.tensor([word & 0xFFFF, word >> 16]).to(torch.uint16).view(torch.bfloat16).double() for word in words
        ]

    for line in code.strip("{} \n").replace("{", "").replace("}", "").split(";"):
        operation, _, rest = line.strip().partition(" ")
        if not operation or operation == ".reg":
            continue
        to, *of = [part.strip() for part in rest.split(",")]
        if operation == "mov.b64":
            low, high = to, of[0]
            names |= {low: value(of[1]) & 0xFFFFFFFF, high: value(of[1]) >> 32}
            continue
        a, *others = [value(part) for part in of]
        if operation == "prmt.b32":
            both = others[0] << 32 | a
            result = sum(((both >> 8 * (others[1] >> 4 * i & 7)) & 255) << 8 * i for i in range(4))
        elif operation == "fma.rn.bf16x2":
            x, y, z = bfloat16_pairs(a, *others)
            first, second = (x * y + z).bfloat16().view(torch.uint16).tolist()
            result = second << 16 | first
        elif operation == "lop3.b32":
            assert others[2] == 0xEA, f"expected (a & b) | c, got {line}"
            result = (a & others[0]) | others[1]
        elif operation == "and.b32":
            result = a & others[0]
        else:
            assert operation in ("mov.b32", "shr.u32"), f"expected a known operation, got {line}"
            result = a >> others[0] if others else a
        names[to] = result
    return names["$0"]


def numbers(word: int) -> list[float]:
    return torch.tensor([word & 0xFFFF, word >> 16]).to(torch.uint16).view(torch.bfloat16).tolist()


def test_bits_of_words_become_bfloat16_pairs() -> None:
    """The inline PTX, which the interpreter does not run, by its definition."""
    fp8 = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).float().tolist()
    for byte in range(256):
        other = byte * 7 % 256
        for i in range(4):
            words = [one << 8 * i | 0x5A5A5A5A & ~(255 << 8 * i) for one in (byte, other)]
            got = numbers(run_ptx(getattr(word_gemm, f"INT8_{i}").value, *words))
            assert got == [(one ^ 128) - 128 for one in (byte, other)], f"int8, byte {i}: {byte}, {other}: got {got}"
            if byte & 127 != 127 and other & 127 != 127:
                got = numbers(run_ptx(getattr(word_gemm, f"FP8_{i}").value, *words))
                assert got == [fp8[byte], fp8[other]], f"fp8, byte {i}: {byte}, {other}: got {got}"
    for i in range(8):
        words = [0xFEDCBA98, 0x76543210]
        got = numbers(run_ptx(getattr(word_gemm, f"INT4_{i}").value, *words))
        assert got == [128 + 8 + i, 128 + i], f"int4, value {i}: got {got}"
    for i in range(4):
        got_word = run_ptx(getattr(word_gemm, f"COLUMN_{i}").value, 0x4444333322221111, 0x8888777766665555)
        assert got_word == (0x5555 + 0x1111 * i) << 16 | 0x1111 * (i + 1), f"column {i}: got {got_word:x}"
    low, high = (run_ptx(code.value, 0xFEDCBA98) for code in (paired_gemm._LOW, paired_gemm._HIGH))
    assert (low, high) == (0x0E0C0A08, 0x0F0D0B09), f"halves of bytes: got {low:x}, {high:x}"


@gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(6144, 4096), (4096, 12288), (768, 3072), (6562, 768)], ids=str)
def test_products_on_the_gpu(kind: Kind, shape: tuple[int, int]) -> None:
    """In bfloat16: the output is rounded once, for many rows and fp8 twice."""
    weight = quantize(torch.randn(shape, device="cuda") / shape[1] ** 0.5, kind)
    x = torch.randn(300, shape[1], device="cuda").bfloat16()
    want = x.double() @ weight.dequantized(dtype=torch.float64).T
    is_gated = shape[0] % 2 == 0
    for n_rows in (1, 2, 5, 8, 9, 17, 32, 33, MAX_ROWS):  # each width of the kernel's tiles
        few, last = x[:n_rows], x[n_rows - 1 : n_rows]
        check(quantized_linear(few, weight), want[:n_rows], 4e-3)
        assert_same(quantized_linear(few, weight)[-1:], quantized_linear(last, weight), f"beside {n_rows - 1} rows")
        if is_gated:
            got, alone = quantized_gated_linear(few, weight), quantized_gated_linear(last, weight)
            assert_same(got[-1:], alone, f"gated, beside {n_rows - 1} rows")
    check(quantized_linear(x, weight), want, 4e-3)
    if is_gated:
        gate, up = want[:8].bfloat16().chunk(2, 1)
        check(quantized_gated_linear(x[:8], weight), (torch.nn.functional.silu(gate) * up).double(), 1e-2)


@gpu
def test_every_fp8_number_on_the_gpu() -> None:
    numbers = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn).float()
    numbers = torch.where(numbers.isfinite(), numbers, 0).to(torch.float8_e4m3fn).cuda()
    for N, K in ((16, 16), (4, 64)):  # the second is read as words
        every = QuantizedMatrix(numbers.view(N, K), torch.ones(N, device="cuda"))
        got = quantized_linear(torch.eye(K, device="cuda").bfloat16(), every)
        assert_same(got, numbers.float().view(N, K).T.bfloat16() + 0.0)
