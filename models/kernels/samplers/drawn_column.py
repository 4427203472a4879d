"""Device functions that draw one column of a row of scores: top-k, top-p, weighted draw.

Candidates are the few scores that top-k and top-p may keep. They are ranked by comparing each with all others. If there
are too many of them, the drawn column is found by bisection over scores, one pass over the row per bit. One program
handles one row. Requires Triton.
"""

import triton
import triton.language as tl

from models.kernels.samplers.draws import LOWEST, NO_KEY, column_of, fixed_point, ordered, score_of, sort_key


@triton.jit
def _count_from(scores, least, peak, weighs, V, ONE: tl.constexpr, PASSED: tl.constexpr):
    """The number of scores of a row that reach `least` (as `ordered`); if `weighs`, the sum of their weights."""
    total = tl.zeros((PASSED,), tl.int64)
    for start in range(0, V, PASSED):
        column = start + tl.arange(0, PASSED)
        score = tl.load(scores + column, mask=column < V, other=float("-inf"))
        reaches = (ordered(score) >= least) & (column < V)
        total += tl.where(reaches, tl.where(weighs, fixed_point(score, peak, ONE), 1), 0)
    return tl.sum(total, 0)


@triton.jit
def _nth_equal(scores, order, n, V, PASSED: tl.constexpr):
    """The column of the n-th score, counted from 0, that equals `order`."""
    found, before = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
    for start in range(0, V, PASSED):
        column = start + tl.arange(0, PASSED)
        score = tl.load(scores + column, mask=column < V, other=float("-inf"))
        equal = ((ordered(score) == order) & (column < V)).to(tl.int64)
        is_match = (equal != 0) & (before + tl.cumsum(equal, 0) - 1 == n)
        found += tl.sum(tl.where(is_match, column, 0).to(tl.int64), 0)
        before += tl.sum(equal, 0)
    return found


@triton.jit
def _draw_by_bisection(scores, number, peak, top_k, top_p, V, ONE: tl.constexpr, PASSED: tl.constexpr):
    """The drawn column, for any number of candidates, by three bisections: the k-th best score, the last score that
    top-p keeps, the drawn score. Each finds the highest score such that the scores that reach it have a count or
    weight above `amount`. If the peak is not finite, the first column that equals it.
    """
    is_finite = tl.abs(peak) < float("inf")
    low = tl.where(is_finite, tl.full((), LOWEST, tl.int64), ordered(peak).to(tl.int64))
    total = tl.full((), 0, tl.int64)
    above, weight, amount = tl.full((), 0, tl.int64), tl.full((), 1, tl.int64), tl.full((), 0, tl.int64)
    for stage in range(3):
        weighs = stage > 0
        if stage == 0:
            amount, is_enabled = tl.minimum(top_k, V) - 1, top_k > 0
        elif stage == 1:
            total = _count_from(scores, low.to(tl.int32), peak, weighs, V, ONE, PASSED)
            amount, is_enabled = (total.to(tl.float64) * top_p.to(tl.float64)).to(tl.int64), (top_p > 0) & (top_p < 1)
        else:
            amount, is_enabled = (
                tl.minimum((number * total.to(tl.float64)).to(tl.int64), total - 1),
                tl.full((), 1, tl.int1),
            )
        if is_enabled:
            it, high = low, ordered(peak).to(tl.int64)
            while it < high:
                middle = it + (high - it + 1) // 2
                if _count_from(scores, middle.to(tl.int32), peak, weighs, V, ONE, PASSED) > amount:
                    it = middle
                else:
                    high = middle - 1
            if stage == 0:
                low = it
            else:
                above = _count_from(scores, (it + 1).to(tl.int32), peak, weighs, V, ONE, PASSED)
                weight = fixed_point(score_of(it.to(tl.int32)), peak, ONE)
                if stage == 1:
                    total = above + ((amount - above) // weight + 1) * weight
                else:
                    low = it
    nth = tl.where(is_finite, (amount - above) // weight, 0)
    return _nth_equal(scores, low.to(tl.int32), nth, V, PASSED)


@triton.jit
def _draw_by_rank(found, n_found, number, peak, top_k, top_p, ONE: tl.constexpr, BITS: tl.constexpr,
                   RANKED: tl.constexpr, AGAINST: tl.constexpr):  # fmt: skip
    """The drawn column, ranking all `n_found` candidates by comparing each with all others."""
    lane = tl.arange(0, RANKED)
    is_found = lane < n_found
    key = tl.load(found + lane, mask=is_found, other=NO_KEY)
    rank, above = tl.zeros((RANKED,), tl.int32), tl.zeros((RANKED,), tl.int64)
    for start in range(0, n_found, AGAINST):
        nth = start + tl.arange(0, AGAINST)
        other = tl.load(found + nth, mask=nth < n_found, other=NO_KEY)
        weight = tl.where(nth < n_found, fixed_point(score_of((other >> BITS).to(tl.int32)), peak, ONE), 0)
        is_better = other[None, :] > key[:, None]
        rank += tl.sum(is_better.to(tl.int32), 1)
        above += tl.sum(tl.where(is_better, weight[None, :], 0), 1)
    values = tl.where(is_found, score_of((key >> BITS).to(tl.int32)), float("-inf"))
    # Fewer than k candidates were found if all others have no weight.
    last = tl.min(tl.where((rank < top_k) & is_found, values, float("inf")), 0)
    kept = is_found & (values >= tl.where(top_k == 0, float("-inf"), last))
    weights = tl.where(kept, fixed_point(values, peak, ONE), 0)
    total = tl.sum(weights, 0)
    if (top_p > 0) & (top_p < 1):
        amount = (total.to(tl.float64) * top_p.to(tl.float64)).to(tl.int64)
        weights = tl.where(above > amount, 0, weights)
        total = tl.sum(weights, 0)
    target = tl.minimum((number * total.to(tl.float64)).to(tl.int64), total - 1)
    is_match = (above <= target) & (target < above + weights)
    return column_of(tl.sum(tl.where(is_match, key, 0), 0), BITS)


@triton.jit
def drawn_column(
    scores, highs, spans, found, number, peak, top_k, top_p, V, n_spans, BITS: tl.constexpr, ONE: tl.constexpr,
    HIGHS: tl.constexpr, SPAN: tl.constexpr, SPANS: tl.constexpr, RANKED: tl.constexpr, AGAINST: tl.constexpr,
    PASSED: tl.constexpr, WEIGHTLESS: tl.constexpr,
):  # fmt: skip
    """The column drawn from a row of V tempered scores by top-k, top-p and a number in [0, 1).

    Equals `models.sampling.text`, which sorts the whole row.

    highs: maxima of n_spans spans of SPAN columns each, at most HIGHS.
    spans, found: buffers for the indices of all spans and for RANKED keys, private to the program.
    """
    lane = tl.arange(0, HIGHS)
    high = tl.load(highs + lane, mask=lane < n_spans, other=float("-inf"))
    # k spans whose maxima reach a score contain k scores that reach it, so the k-th best maximum bounds the k-th score.
    low, top = tl.full((), LOWEST, tl.int64), ordered(peak).to(tl.int64)
    if (top_k > 0) & (top_k <= n_spans):
        while low < top:
            middle = low + (top - low + 1) // 2
            if tl.sum((ordered(high) >= middle).to(tl.int32), 0) >= top_k:
                low = middle
            else:
                top = middle - 1
    least = tl.maximum(score_of(low.to(tl.int32)), peak - WEIGHTLESS)
    reaches = (high >= least) & (lane < n_spans)
    n_reaching = tl.sum(reaches.to(tl.int32), 0)
    tl.store(spans + tl.cumsum(reaches.to(tl.int32), 0) - 1, lane, mask=reaches)
    tl.debug_barrier()
    n_found = tl.full((), 0, tl.int32)
    for start in range(0, n_reaching, SPANS):
        nth = start + tl.arange(0, SPANS)
        span = tl.load(spans + nth, mask=nth < n_reaching, other=0)
        column = span[:, None] * SPAN + tl.arange(0, SPAN)[None, :]
        inside = (nth < n_reaching)[:, None] & (column < V)
        score = tl.load(scores + column, mask=inside, other=float("-inf"))
        score, column = tl.reshape(score, (SPANS * SPAN,)), tl.reshape(column, (SPANS * SPAN,))
        takes = (score >= least) & tl.reshape(inside, (SPANS * SPAN,))
        place = n_found + tl.cumsum(takes.to(tl.int32), 0) - 1
        tl.store(found + place, sort_key(score, column, BITS), mask=takes & (place < RANKED))
        n_found += tl.sum(takes.to(tl.int32), 0)
    tl.debug_barrier()
    # If the temperature has made a score infinite, no weights can be computed.
    if (n_found <= RANKED) & (tl.abs(peak) < float("inf")):
        column = _draw_by_rank(found, n_found, number, peak, top_k, top_p, ONE, BITS, RANKED, AGAINST)
    else:
        column = _draw_by_bisection(scores, number, peak, top_k, top_p, V, ONE, PASSED)
    return column
