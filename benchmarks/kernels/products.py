"""Skinny GEMMs compared with the library's: every weight shape with tile sizes, and whole decoders of them.

A decoder here has all layers, the head and the row kernels, and no attention. Both variants differ only in their GEMMs
and the operations fused into these (gating, adding partial sums).
"""

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels.timing import Case, Figures, Meter, gb_per_s, relative_error
from models.kernels.rows import CacheRows, HeadNorms, add_rms_norm, qkv_rows, silu_mul
from models.kernels.skinny_gemm import TILE_SIZES, skinny_gated_linear, skinny_linear, skinny_parts

ROWS = (1, 8, 32, 64)
STACK_ROWS = (1, 8, 32)
EPS = 1e-6
SCALE = 0.02  # of weights, so that activations stay finite


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
    """Single weights, then whole decoders."""
    shapes, rows = ([(80, 64), (128, 64)], (3,)) if meter.is_tiny else (list(TILE_SIZES), ROWS)
    largest = max(N * K for N, K in shapes)
    pool = meter.randn(largest, scale=SCALE)
    for N, K in shapes:
        for M in rows:
            yield Case("product", {"N": N, "K": K, "M": M}, partial(_measure_product, meter, pool, N, K, M))
    del pool
    for sizes, rows in ((TINY, (2,)),) if meter.is_tiny else ((LLM, STACK_ROWS), (SPEECH, STACK_ROWS)):
        stack = cache(partial(Stack, meter, sizes))  # gigabytes, so created when its first row starts
        for M in rows:
            yield Case(
                f"all of {sizes.name}", {"layers": sizes.n_layers, "M": M}, partial(_measure_stack, meter, stack, M)
            )
        del stack


def _measure_product(meter: Meter, pool: Tensor, N: int, K: int, M: int) -> Figures:
    size = N * K
    n_copies = min(meter.n_copies(size * pool.element_size()), pool.numel() // size)
    weights = [pool[i * size : (i + 1) * size].view(N, K) for i in range(n_copies)]
    x, is_gated = meter.randn(M, K), (N, K) in GATED

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
    error = relative_error(got if is_gated else got.float().sum(0), exact)
    n = max(n_copies, 4)
    ours_us, library_us, n_bytes = meter.time_us(ours, n), meter.time_us(library, n), size * pool.element_size()
    return {
        "ours_us": ours_us,
        "library_us": library_us,
        "gb_per_s": gb_per_s(n_bytes, ours_us),
        "library_gb_per_s": gb_per_s(n_bytes, library_us),
        "error": error,
    }


class Stack:
    """All weights of a decoder in separate memory, and a forward pass of its GEMMs and row kernels."""

    def __init__(self, meter: Meter, sizes: StackSizes):
        self.sizes, self.meter = sizes, meter
        n_heads, width, D = sizes.heads + 2 * sizes.kv_heads, sizes.width, sizes.head_dim
        shapes = ((n_heads * D, width), (width, sizes.heads * D), (2 * sizes.inner, width), (width, sizes.inner))
        self.layers = [[meter.randn(*shape, scale=SCALE) for shape in shapes] for _ in range(sizes.n_layers)]
        self.head = meter.randn(sizes.vocab_size, width, scale=SCALE)
        self.norm = torch.ones(width, dtype=meter.dtype, device=meter.device)
        self.head_norms = HeadNorms(self.norm[:D], self.norm[:D], EPS) if sizes.has_head_norms else None
        self.n_bytes = self.head.nbytes + sum(weight.nbytes for layer in self.layers for weight in layer)
        self.cache = [meter.randn(1, sizes.kv_heads, 64, D) for _ in range(2)]

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, index: Tensor, *, ours: bool) -> Tensor:
        """Forward pass. x: [M, width], one sequence per row. Returns: logits [M, vocab_size]."""
        sizes, M = self.sizes, len(x)
        linear = skinny_parts if ours else F.linear
        rows = CacheRows(slots, index, *self.cache)
        stream, added = x, None
        for qkv_weight, out_weight, gate_up, down in self.layers:
            stream, x = add_rms_norm(stream, added, self.norm, EPS)
            qkv = linear(x, qkv_weight)
            qkv = qkv.unsqueeze(-2) if not ours or len(qkv) > 1 else qkv[0].unsqueeze(-2)
            q = qkv_rows(qkv, sizes.heads, sizes.kv_heads, rows, (cos, sin), self.head_norms)
            stream, x = add_rms_norm(stream, _squeeze_parts(linear(q.view(M, -1), out_weight)), self.norm, EPS)
            inner = skinny_gated_linear(x, gate_up) if ours else silu_mul(F.linear(x, gate_up))
            added = _squeeze_parts(linear(inner, down))
        x = add_rms_norm(stream, added, self.norm, EPS)[1]
        return skinny_linear(x, self.head) if ours else F.linear(x, self.head)


def _squeeze_parts(product: Tensor) -> Tensor:
    """The product, or its split-K partial sums if there are several."""
    return product[0] if product.dim() == 3 and len(product) == 1 else product


def _measure_stack(meter: Meter, made: Callable[[], Stack], M: int) -> Figures:
    """Time both variants. Error: relative to the library's GEMMs in the model's dtype."""
    stack = made()
    angles = torch.rand(M, 1, stack.sizes.head_dim // 2, device=meter.device)
    slots = torch.zeros(M, 1, dtype=torch.int64, device=meter.device)
    places = torch.arange(M, device=meter.device)[:, None]
    inputs = (meter.randn(M, stack.sizes.width), angles.cos(), angles.sin(), slots, places)
    error = relative_error(stack(*inputs, ours=True), stack(*inputs, ours=False))
    ours_us, library_us = (meter.time_us(lambda i, ours=ours: stack(*inputs, ours=ours), 1) for ours in (True, False))
    return {
        "ours_us": ours_us,
        "library_us": library_us,
        "gb_per_s": gb_per_s(stack.n_bytes, ours_us),
        "library_gb_per_s": gb_per_s(stack.n_bytes, library_us),
        "error": error,
    }
