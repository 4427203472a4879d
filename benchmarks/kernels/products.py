"""Products of few rows against the library's: every weight with a plan, and whole stacks of them.

Knows weights' shapes and what stands between products. A stack here has all layers, head and row kernels, and no
attention; the two ways differ in their products and in what these do on the side (gating, adding partial sums).
"""

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels.timing import Case, Figures, Meter, error_of, rate
from models.kernels.rows import CacheRows, HeadNorms, add_rms_norm, qkv_rows, silu_mul
from models.kernels.skinny_gemm import TILE_SIZES, skinny_gated_linear, skinny_linear, skinny_parts

ROWS = (1, 8, 32, 64)
STACK_ROWS = (1, 8, 32)
EPS = 1e-6
SCALE = 0.02  # of weights: what passes through stays finite


class StackSizes(NamedTuple):
    """Sizes of a decoder."""

    name: str
    n_layers: int
    width: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    has_head_norms: bool


LLM = StackSizes("language model", 36, 4096, 12288, 32, 8, 128, 151748, True)
SPEECH = StackSizes("speech", 20, 768, 3072, 12, 12, 64, 6562, False)
TINY = StackSizes("tiny", 1, 64, 64, 2, 1, 16, 64, True)
GATED = {(2 * sizes.inner, sizes.width) for sizes in (LLM, SPEECH, TINY)}


def cases(meter: Meter) -> Iterator[Case]:
    """Single weights, then whole stacks."""
    shapes, rows = ([(80, 64), (128, 64)], (3,)) if meter.is_tiny else (list(TILE_SIZES), ROWS)
    largest = max(N * K for N, K in shapes)
    pool = meter.noise(largest, scale=SCALE)
    for N, K in shapes:
        for M in rows:
            yield Case("product", {"N": N, "K": K, "M": M}, partial(_product, meter, pool, N, K, M))
    del pool
    for sizes, rows in ((TINY, (2,)),) if meter.is_tiny else ((LLM, STACK_ROWS), (SPEECH, STACK_ROWS)):
        stack = cache(partial(Stack, meter, sizes))  # gigabytes: made when the first of its rows is begun
        for M in rows:
            yield Case(f"all of {sizes.name}", {"layers": sizes.n_layers, "M": M}, partial(_stack, meter, stack, M))
        del stack


def _product(meter: Meter, pool: Tensor, N: int, K: int, M: int) -> Figures:
    size = N * K
    n_copies = min(meter.copies(size * pool.element_size()), pool.numel() // size)
    weights = [pool[i * size : (i + 1) * size].view(N, K) for i in range(n_copies)]
    x, is_gated = meter.noise(M, K), (N, K) in GATED

    def ours(i: int) -> Tensor:
        weight = weights[i % n_copies]
        return skinny_gated_linear(x, weight) if is_gated else skinny_parts(x, weight)

    def library(i: int) -> Tensor:
        product = F.linear(x, weights[i % n_copies])
        return silu_mul(product) if is_gated else product

    exact = F.linear(x.float(), weights[0].float())
    if is_gated:
        gate, up = exact.to(meter.dtype).float().chunk(2, -1)
        exact = F.silu(gate) * up
    got = ours(0)
    error = error_of(got if is_gated else got.float().sum(0), exact)
    n = max(n_copies, 4)
    mine, theirs, n_bytes = meter.us(ours, n), meter.us(library, n), size * pool.element_size()
    return {
        "ours_us": mine,
        "library_us": theirs,
        "gb_per_s": rate(n_bytes, mine),
        "library_gb_per_s": rate(n_bytes, theirs),
        "error": error,
    }


class Stack:
    """All weights of a decoder, each its own memory, and its products with the row kernels between them."""

    def __init__(self, meter: Meter, sizes: StackSizes):
        self.sizes, self.meter = sizes, meter
        n_heads, width, D = sizes.heads + 2 * sizes.kv_heads, sizes.width, sizes.head_dim
        shapes = ((n_heads * D, width), (width, sizes.heads * D), (2 * sizes.inner, width), (width, sizes.inner))
        self.layers = [[meter.noise(*shape, scale=SCALE) for shape in shapes] for _ in range(sizes.n_layers)]
        self.head = meter.noise(sizes.vocab_size, width, scale=SCALE)
        self.norm = torch.ones(width, dtype=meter.dtype, device=meter.device)
        self.head_norms = HeadNorms(self.norm[:D], self.norm[:D], EPS) if sizes.has_head_norms else None
        self.n_bytes = self.head.nbytes + sum(weight.nbytes for layer in self.layers for weight in layer)
        self.cache = [meter.noise(1, sizes.kv_heads, 64, D) for _ in range(2)]

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, index: Tensor, *, ours: bool) -> Tensor:
        """Rows x [M, width], each a sequence of its own. Returns: logits [M, vocab_size]."""
        sizes, M = self.sizes, len(x)
        times = skinny_parts if ours else F.linear
        rows = CacheRows(slots, index, *self.cache)
        stream, added = x, None
        for qkv_weight, out_weight, gate_up, down in self.layers:
            stream, x = add_rms_norm(stream, added, self.norm, EPS)
            qkv = times(x, qkv_weight)
            qkv = qkv.unsqueeze(-2) if not ours or len(qkv) > 1 else qkv[0].unsqueeze(-2)
            q = qkv_rows(qkv, sizes.heads, sizes.kv_heads, rows, (cos, sin), self.head_norms)
            stream, x = add_rms_norm(stream, _rows(times(q.view(M, -1), out_weight)), self.norm, EPS)
            inner = skinny_gated_linear(x, gate_up) if ours else silu_mul(F.linear(x, gate_up))
            added = _rows(times(inner, down))
        x = add_rms_norm(stream, added, self.norm, EPS)[1]
        return skinny_linear(x, self.head) if ours else F.linear(x, self.head)


def _rows(product: Tensor) -> Tensor:
    """Partial sums as they are; one alone is the product."""
    return product[0] if product.dim() == 3 and len(product) == 1 else product


def _stack(meter: Meter, made: Callable[[], Stack], M: int) -> Figures:
    """Error: against the same with the library's products, in the model's type."""
    stack = made()
    angles = torch.rand(M, 1, stack.sizes.head_dim // 2, device=meter.device)
    slots = torch.zeros(M, 1, dtype=torch.int64, device=meter.device)
    places = torch.arange(M, device=meter.device)[:, None]
    inputs = (meter.noise(M, stack.sizes.width), angles.cos(), angles.sin(), slots, places)
    error = error_of(stack(*inputs, ours=True), stack(*inputs, ours=False))
    mine, theirs = (meter.us(lambda i, ours=ours: stack(*inputs, ours=ours), 1) for ours in (True, False))
    return {
        "ours_us": mine,
        "library_us": theirs,
        "gb_per_s": rate(stack.n_bytes, mine),
        "library_gb_per_s": rate(stack.n_bytes, theirs),
        "error": error,
    }
