"""Device functions of the sampler kernels: random numbers, fixed-point weights, integer sort keys, the n-th score.

They compute the same as `models.sampling.rng`. Requires Triton.
"""

import triton
import triton.language as tl

N_ROUNDS = 10  # of `models.sampling.rng.philox2x32`
LOWEST = tl.constexpr(-2139095041)  # the `ordered` of -inf
NO_KEY = tl.constexpr(-(1 << 62))  # below every `sort_key`


@triton.jit
def uniform(seed, draw, N: tl.constexpr, STREAM: tl.constexpr, ROUNDS: tl.constexpr):
    """`models.sampling.rng.uniform` for one number."""
    low, high, key = (draw * N + STREAM) & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF, seed & 0xFFFFFFFF
    for n in tl.static_range(ROUNDS):
        product_low = 0xD256D193 * (low & 0xFFFF)
        product_high = 0xD256D193 * (low >> 16)
        upper = (product_high + (product_low >> 16)) >> 16
        lower = (product_low + ((product_high & 0xFFFF) << 16)) & 0xFFFFFFFF
        round_key = (key + n * 0x9E3779B9) & 0xFFFFFFFF
        low, high = upper ^ round_key ^ high, lower
    return ((low << 21) | (high >> 11)).to(tl.float64) * 1.1102230246251565e-16  # 2**-53


@triton.jit
def fixed_point(scores, peak, ONE: tl.constexpr):
    """`models.sampling.rng.fixed_point_weights` for one row with a finite peak."""
    return (tl.exp(scores - peak) * ONE).to(tl.int64)


@triton.jit
def ordered(scores):
    """int32 in the same order as float32 scores; both zeros map to one value."""
    bits = (scores + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def score_of(order):
    """The score of an `ordered`."""
    return tl.where(order < 0, order ^ 0x7FFFFFFF, order).to(tl.float32, bitcast=True)


@triton.jit
def sort_key(scores, column, BITS: tl.constexpr):
    """int64 that orders by score, then by lower column. BITS: enough to hold every column."""
    return (ordered(scores).to(tl.int64) << BITS) | ((1 << BITS) - 1 - column)


@triton.jit
def column_of(key, BITS: tl.constexpr):
    """The column of a `sort_key`, int64."""
    return (1 << BITS) - 1 - (key & ((1 << BITS) - 1))


@triton.jit
def nth_score(score, n, MARKS: tl.constexpr):
    """The highest of a row's scores that `n` of them reach, all as `ordered`.

    Args:
        score: [BLOCK] int32.
        n: at least 1 and at most BLOCK.
        MARKS: scores that one pass over the row compares with.
    Returns: int32.
    """
    low, high = tl.full((), LOWEST, tl.int64), tl.max(score, 0).to(tl.int64)
    while low < high:
        step = (high - low + MARKS - 1) // MARKS
        marks = tl.minimum(low + step * (1 + tl.arange(0, MARKS)), high).to(tl.int32)
        counts = tl.sum((score[None, :] >= marks[:, None]).to(tl.int32), 1)
        reached = tl.sum((counts >= n).to(tl.int64), 0)
        if reached < MARKS:
            high = tl.minimum(low + step * (reached + 1), high) - 1
            low += step * reached
        else:
            low = high
    return low.to(tl.int32)
