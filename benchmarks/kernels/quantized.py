"""Products with quantised weights, next to the same in bfloat16, with a sweep of tile sizes.

A row of the table has the fastest tiles of each kind; the result has the times of all. fp8 and int4 are swept at the
rows of SWEPT. int8 has the tiles of fp8, and other numbers of rows have those of the next smaller one. A product of
more than 64 rows has no tiles of these kernels and is timed as it is. Pairs of 8-bit numbers are made before the
product is timed, as the kernel before it makes them.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cached_property, partial
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels.timing import Case, Figures, Meter, gb_per_s, relative_error
from models.checkpoint.precision import Kind
from models.checkpoint.quantized import KINDS, VALUE_TYPES, QuantizedMatrix, quantize
from models.kernels.paired_gemm import PairedTiles, paired_kernel, paired_launch
from models.kernels.paired_rows import GROUP, PairedRows, empty_pairs, paired_rows
from models.kernels.quantized_gemm import few_product, few_tiles, quantized_linear
from models.kernels.rows import silu_mul
from models.kernels.skinny_gemm import MAX_ROWS, TileSizes, skinny_gated_linear, skinny_parts
from models.kernels.word_gemm import INT4_WORDS, WordTiles, word_kernel, word_launch

Plan = PairedTiles | WordTiles

ROWS = (1, 2, 4, 8, 16, 32, 64)
SWEPT = (1, 16, 32, 64)
COMPILED_ROWS = (1, 16, 32, 64)  # one for each width of the kernel's tiles
MANY_ROWS = 512  # of the language model's layers
MIN_COLUMNS = 4096  # of a weight that many rows multiply
COMPILERS = 12  # processes that compile ahead
SCALE = 0.02
SAMPLE_MS = 1.5
# (rows, words, stages, warps); int4 has tiles of one group.
FEW = ((64, 32, 4, 4), (32, 32, 5, 2), (64, 64, 3, 4), (64, 32, 4, 2), (64, 64, 3, 2), (128, 32, 4, 4))
MORE = ((32, 32, 4, 2), (64, 32, 4, 2), (64, 32, 4, 4), (64, 64, 3, 4), (128, 32, 3, 4), (128, 32, 4, 8))
INT4_FEW = ((64, 4, 4), (64, 6, 4), (32, 6, 2), (128, 4, 4), (64, 6, 2), (32, 6, 1))
INT4_MORE = ((32, 5, 2), (32, 4, 4), (64, 3, 2), (64, 4, 4), (128, 3, 8))
# (rows, stages, warps) of weights that multiply pairs.
PAIRED = ((64, 4, 4), (64, 6, 4), (64, 4, 2), (128, 3, 4), (128, 4, 4), (128, 4, 8))


class Shape(NamedTuple):
    """A weight [N, K]. splits: numbers of programs that share a row, to be timed; none: no sweep."""

    name: str
    N: int
    K: int
    splits: tuple[int, ...] = ()
    is_gated: bool = False


SHAPES = (
    Shape("llm gate, up", 24576, 4096, (1,), is_gated=True),
    Shape("llm down", 4096, 12288, (4, 8, 16)),
    Shape("llm qkv", 6144, 4096, (2, 4, 8)),
    Shape("llm o", 4096, 4096, (4, 8, 16)),
    Shape("llm head", 151748, 4096),
    Shape("tts gate, up", 6144, 768, (1,), is_gated=True),
    Shape("tts down", 768, 3072, (2, 4, 6)),
    Shape("tts qkv", 2304, 768, (1, 2, 3)),
    Shape("tts o", 768, 768, (1, 2, 3)),
    Shape("tts head", 6562, 768),
)
TINY_SHAPES = (Shape("tiny", 80, 256, (1, 2)), Shape("tiny, gated", 64, 128, (1,), is_gated=True))


def product_cases(meter: Meter) -> Iterator[Case]:
    """Every shape at every number of rows."""
    shapes = TINY_SHAPES if meter.is_tiny else SHAPES
    if meter.is_cuda:
        _compile_ahead(meter, shapes)
    for shape in shapes:
        products = _Products(meter, shape)
        many = (MANY_ROWS,) if shape.K >= MIN_COLUMNS and shape.splits else ()
        for M in (3, 20) if meter.is_tiny else (*ROWS, *many):
            yield Case(shape.name, {"N": shape.N, "K": shape.K, "M": M}, partial(products.measure, M))
        del products


def _plans(shape: Shape, kind: Kind, M: int, device: torch.device, *, is_tiny: bool = False) -> list[Plan]:
    """What is timed on `device`: the default first. None of a shape that these kernels do not multiply."""
    if M > MAX_ROWS:
        return []
    with torch.device(device):
        weight = _empty_matrix(shape, kind)
    default = few_tiles(weight, M, torch.bfloat16, gated=shape.is_gated)
    if isinstance(default, TileSizes):
        return []
    if isinstance(default, PairedTiles):
        groups = shape.K // GROUP
        paired = [PairedTiles(rows, n, *rest) for rows, *rest in PAIRED for n in shape.splits if groups % n == 0]
        paired = [plan for plan in paired if _has_product(plan, kind, M)]
        return list(dict.fromkeys([default, *paired]))
    if kind == "int4":
        tiles = [(rows, INT4_WORDS, stages, warps) for rows, stages, warps in (INT4_FEW if M <= 8 else INT4_MORE)]
    else:
        tiles = list(FEW if M <= 8 else MORE)
    n_words = shape.K // (8 if kind == "int4" else 4)
    plans: list[Plan] = [
        WordTiles(rows, words, splits, stages, warps)
        for rows, words, stages, warps in (tiles[:1] if is_tiny else tiles)
        for splits in shape.splits
        if n_words % (words * splits) == 0
    ]
    return list(dict.fromkeys([default, *plans]))


def _has_product(plan: PairedTiles, kind: Kind, M: int) -> bool:
    """Two warps have no product of fp8, and none of sixteen columns of pairs or more."""
    return plan.warps > 2 or (kind != "fp8" and M <= 4)


def _empty_matrix(shape: Shape, kind: Kind) -> QuantizedMatrix:
    """A matrix of any values, on the current device."""
    N, K = shape.N, shape.K
    if kind != "int4":
        return QuantizedMatrix(torch.empty(N, K, dtype=VALUE_TYPES[kind]), torch.empty(N))
    values, zeros = (torch.empty(sizes, dtype=torch.uint8) for sizes in ((N, K // 2), (K // 128, N)))
    return QuantizedMatrix(values, torch.empty(K // 128, N, dtype=torch.float16), zeros)


def _out(shape: Shape, M: int, plan: Plan, dtype: torch.dtype, device: torch.device) -> Tensor:
    if shape.is_gated:
        return torch.empty(M, shape.N // 2, dtype=dtype, device=device)
    dtype = dtype if plan.splits == 1 else torch.float32
    return torch.empty(plan.splits, M, shape.N, dtype=dtype, device=device)


def compile_plans(device: torch.device, dtype: torch.dtype, shape: Shape, kind: Kind, M: int) -> None:
    """Compile the kernels of all plans into Triton's cache."""
    with torch.device(device):
        x, weight = torch.empty(M, shape.K, dtype=dtype), _empty_matrix(shape, kind)
    for plan in _plans(shape, kind, M, device):
        out = _out(shape, M, plan, dtype, device)
        if isinstance(plan, PairedTiles):
            launch = paired_launch(empty_pairs(x.shape, kind, device), weight, out, plan, gated=shape.is_gated)
            paired_kernel.warmup(*launch.args, grid=launch.grid, **launch.options)
        else:
            launch = word_launch(x, weight, out, plan, gated=shape.is_gated)
            word_kernel.warmup(*launch.args, grid=launch.grid, **launch.options)


def _compile_ahead(meter: Meter, shapes: tuple[Shape, ...]) -> None:
    """Compile in several processes. What fails there fails again, and is reported, where it is timed."""
    work = [(meter.device, meter.dtype, shape, kind, M) for M in COMPILED_ROWS for shape in shapes for kind in KINDS]
    n = min(COMPILERS, os.cpu_count() or 1)
    with ProcessPoolExecutor(n, mp_context=get_context("spawn")) as pool:
        for done in [pool.submit(compile_plans, *one) for one in work]:
            done.exception()


class _Products:
    """The weights of one shape in each kind, in more copies than fit in the L2 cache."""

    def __init__(self, meter: Meter, shape: Shape):
        self.meter, self.shape = meter, shape
        self.fastest: dict[Kind, Plan | None] = dict.fromkeys(KINDS)

    @cached_property
    def plain(self) -> list[Tensor]:
        N, K = self.shape.N, self.shape.K
        return [self.meter.randn(N, K, scale=SCALE) for _ in range(self.meter.n_copies(2 * N * K))]

    @cached_property
    def matrices(self) -> dict[Kind, list[QuantizedMatrix]]:
        found = {}
        for kind in KINDS:
            first = quantize(self.plain[0], kind)
            n = self.meter.n_copies(first.nbytes)
            found[kind] = [QuantizedMatrix(*(one.clone() for one in first.tensors())) for _ in range(n)]
        return found

    def measure(self, M: int) -> Figures:
        x, is_gated = self.meter.randn(M, self.shape.K), self.shape.is_gated
        figures: Figures = {"bf16_us": self._time(partial(self._plain, x), len(self.plain)), "error": 0.0, "sweep": []}
        for kind, matrices in self.matrices.items():
            want = self._gated(F.linear(x.float(), matrices[0].dequantized(dtype=torch.float32)))
            outs: dict[tuple[int, int], Tensor] = {}
            best: float | None = None
            for plan in self._chosen(kind, M):
                rows = paired_rows(x, kind) if isinstance(plan, PairedTiles) else x
                call = partial(self._quantized, rows, matrices, plan)
                us, got = self._time(call, len(matrices)), call(0)
                row: Figures = {"kind": kind, "us": us, "tiles": None if plan is None else plan._asdict()}
                if plan is not None:
                    order = (plan.words if isinstance(plan, WordTiles) else 0, plan.splits)
                    row["same_bits"] = torch.equal(outs.setdefault(order, got), got)
                    got = got if is_gated else got.float().sum(0)
                row["error"] = relative_error(got, want)
                figures["error"] = max(figures["error"], row["error"])
                figures["sweep"].append(row)
                if best is None or (us is not None and us < best):
                    best, self.fastest[kind] = us, plan
            figures |= {f"{kind}_us": best, f"{kind}_gb_per_s": gb_per_s(matrices[0].nbytes, best)}
            figures[f"{kind}_tiles"] = _label(self.fastest[kind])
        return figures

    def _chosen(self, kind: Kind, M: int) -> list[Plan | None]:
        """The plans to time; None: the product as it is."""
        plans: list[Plan | None] = [*_plans(self.shape, kind, M, self.meter.device, is_tiny=self.meter.is_tiny)]
        if not plans:
            return [None]
        if self.meter.is_tiny or (M in SWEPT and kind != "int8" and self.shape.splits):
            return plans
        own = self.fastest["fp8" if kind == "int8" else kind]
        if isinstance(own, PairedTiles) and not _has_product(own, kind, M):
            own = None
        return plans[:1] if own is None or not self.shape.splits else [own]

    def _plain(self, x: Tensor, i: int) -> Tensor:
        weight = self.plain[i % len(self.plain)]
        if len(x) > MAX_ROWS:
            return self._gated(F.linear(x, weight))
        return skinny_gated_linear(x, weight) if self.shape.is_gated else skinny_parts(x, weight)

    def _quantized(self, x: Tensor | PairedRows, matrices: list[QuantizedMatrix], plan: Plan | None, i: int) -> Tensor:
        """The product, or its partial sums, which the next kernel of a layer adds."""
        weight = matrices[i % len(matrices)]
        if plan is None:
            assert isinstance(x, Tensor)
            return self._gated(quantized_linear(x, weight))
        n_rows = x.n_rows if isinstance(x, PairedRows) else len(x)
        out = _out(self.shape, n_rows, plan, self.meter.dtype, self.meter.device)
        few_product(x, weight, out, plan, gated=self.shape.is_gated)
        return out

    def _gated(self, product: Tensor) -> Tensor:
        return silu_mul(product.to(self.meter.dtype)) if self.shape.is_gated else product

    def _time(self, call: Callable[[int], Any], n: int) -> float | None:
        return self.meter.time_us(call, max(n, 4), SAMPLE_MS)


def _label(plan: Plan | None) -> str:
    """Rows x words, of pairs rows alone, / splits, stages, warps."""
    if plan is None:
        return "-"
    tile = f"{plan.rows}x{plan.words}" if isinstance(plan, WordTiles) else f"{plan.rows}"
    return f"{tile}/{plan.splits} s{plan.stages} w{plan.warps}"
