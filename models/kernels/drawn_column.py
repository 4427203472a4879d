"""One column of a row of scores, drawn by its weight from the best of them: top-k, top-p, draw.

Of the whole row only the few scores that may be kept are put in order, by measuring each against all others; where
more are kept than that is for, the drawn one is found by halving, which takes a pass over the row for each bit.

Knows one program's row. Does not know tokens. Import only where Triton is.
"""

import triton
import triton.language as tl

from models.kernels.draws import LOWEST, NO_KEY, column_of, fixed_point, ordered, score_of, sort_key


@triton.jit
def _held_from(scores, least, peak, weighs, V, ONE: tl.constexpr, PASSED: tl.constexpr):
    """How many of a row's scores reach `least`, an `ordered`; or, if it weighs, what they weigh together."""
    held = tl.zeros((PASSED,), tl.int64)
    for start in range(0, V, PASSED):
        column = start + tl.arange(0, PASSED)
        score = tl.load(scores + column, mask=column < V, other=float("-inf"))
        reaches = (ordered(score) >= least) & (column < V)
        held += tl.where(reaches, tl.where(weighs, fixed_point(score, peak, ONE), 1), 0)
    return tl.sum(held, 0)


@triton.jit
def _nth_equal(scores, order, n, V, PASSED: tl.constexpr):
    """The column of the n-th score, from 0, that is this one."""
    found, before = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
    for start in range(0, V, PASSED):
        column = start + tl.arange(0, PASSED)
        score = tl.load(scores + column, mask=column < V, other=float("-inf"))
        equal = ((ordered(score) == order) & (column < V)).to(tl.int64)
        is_it = (equal != 0) & (before + tl.cumsum(equal, 0) - 1 == n)
        found += tl.sum(tl.where(is_it, column, 0).to(tl.int64), 0)
        before += tl.sum(equal, 0)
    return found


@triton.jit
def _drawn_by_halving(scores, number, peak, top_k, top_p, V, ONE: tl.constexpr, PASSED: tl.constexpr):
    """The column drawn, of any number of columns. Three questions of one form: the k-th best score, the last that top-p
    keeps, the one drawn; each is the highest score from which on more than an amount is held. Of a peak that is not
    finite, the first column that has it.
    """
    is_finite = tl.abs(peak) < float("inf")
    low = tl.where(is_finite, tl.full((), LOWEST, tl.int64), ordered(peak).to(tl.int64))
    total = tl.full((), 0, tl.int64)
    above, weight, amount = tl.full((), 0, tl.int64), tl.full((), 1, tl.int64), tl.full((), 0, tl.int64)
    for question in range(3):
        weighs = question > 0
        if question == 0:
            amount, is_asked = tl.minimum(top_k, V) - 1, top_k > 0
        elif question == 1:
            total = _held_from(scores, low.to(tl.int32), peak, weighs, V, ONE, PASSED)
            amount, is_asked = (total.to(tl.float64) * top_p.to(tl.float64)).to(tl.int64), (top_p > 0) & (top_p < 1)
        else:
            amount, is_asked = (
                tl.minimum((number * total.to(tl.float64)).to(tl.int64), total - 1),
                tl.full((), 1, tl.int1),
            )
        if is_asked:
            it, high = low, ordered(peak).to(tl.int64)
            while it < high:
                middle = it + (high - it + 1) // 2
                if _held_from(scores, middle.to(tl.int32), peak, weighs, V, ONE, PASSED) > amount:
                    it = middle
                else:
                    high = middle - 1
            if question == 0:
                low = it
            else:
                above = _held_from(scores, (it + 1).to(tl.int32), peak, weighs, V, ONE, PASSED)
                weight = fixed_point(score_of(it.to(tl.int32)), peak, ONE)
                if question == 1:
                    total = above + ((amount - above) // weight + 1) * weight
                else:
                    low = it
    nth = tl.where(is_finite, (amount - above) // weight, 0)
    return _nth_equal(scores, low.to(tl.int32), nth, V, PASSED)


@triton.jit
def _drawn_by_rank(found, n_found, number, peak, top_k, top_p, ONE: tl.constexpr, BITS: tl.constexpr,
                   RANKED: tl.constexpr, AGAINST: tl.constexpr):  # fmt: skip
    """The column drawn, of those found, which are all that may be kept: each is measured against all others."""
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
    # Fewer than k were found where those beyond weigh nothing.
    last = tl.min(tl.where((rank < top_k) & is_found, values, float("inf")), 0)
    kept = is_found & (values >= tl.where(top_k == 0, float("-inf"), last))
    weights = tl.where(kept, fixed_point(values, peak, ONE), 0)
    total = tl.sum(weights, 0)
    if (top_p > 0) & (top_p < 1):
        amount = (total.to(tl.float64) * top_p.to(tl.float64)).to(tl.int64)
        weights = tl.where(above > amount, 0, weights)
        total = tl.sum(weights, 0)
    target = tl.minimum((number * total.to(tl.float64)).to(tl.int64), total - 1)
    is_it = (above <= target) & (target < above + weights)
    return column_of(tl.sum(tl.where(is_it, key, 0), 0), BITS)


@triton.jit
def drawn_column(
    scores, highs, pieces, found, number, peak, top_k, top_p, V, n_pieces, BITS: tl.constexpr, ONE: tl.constexpr,
    HIGHS: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr, RANKED: tl.constexpr, AGAINST: tl.constexpr,
    PASSED: tl.constexpr, WEIGHTLESS: tl.constexpr,
):  # fmt: skip
    """The column drawn from a row of V tempered scores by top-k, top-p and a number in [0, 1), as by
    `models.sampling.text`,
    which puts all of them in order.

    highs: the maxima of n_pieces pieces of PIECE columns each, at most HIGHS. pieces, found: room for the numbers of
    all pieces, and for RANKED keys; nothing else may write there meanwhile.
    """
    lane = tl.arange(0, HIGHS)
    high = tl.load(highs + lane, mask=lane < n_pieces, other=float("-inf"))
    # k pieces whose best reach a score hold k scores that do: the k-th best piece bounds the k-th best id from below.
    low, top = tl.full((), LOWEST, tl.int64), ordered(peak).to(tl.int64)
    if (top_k > 0) & (top_k <= n_pieces):
        while low < top:
            middle = low + (top - low + 1) // 2
            if tl.sum((ordered(high) >= middle).to(tl.int32), 0) >= top_k:
                low = middle
            else:
                top = middle - 1
    least = tl.maximum(score_of(low.to(tl.int32)), peak - WEIGHTLESS)
    reaches = (high >= least) & (lane < n_pieces)
    n_reaching = tl.sum(reaches.to(tl.int32), 0)
    tl.store(pieces + tl.cumsum(reaches.to(tl.int32), 0) - 1, lane, mask=reaches)
    tl.debug_barrier()
    n_found = tl.full((), 0, tl.int32)
    for start in range(0, n_reaching, PIECES):
        nth = start + tl.arange(0, PIECES)
        piece = tl.load(pieces + nth, mask=nth < n_reaching, other=0)
        column = piece[:, None] * PIECE + tl.arange(0, PIECE)[None, :]
        inside = (nth < n_reaching)[:, None] & (column < V)
        score = tl.load(scores + column, mask=inside, other=float("-inf"))
        score, column = tl.reshape(score, (PIECES * PIECE,)), tl.reshape(column, (PIECES * PIECE,))
        takes = (score >= least) & tl.reshape(inside, (PIECES * PIECE,))
        place = n_found + tl.cumsum(takes.to(tl.int32), 0) - 1
        tl.store(found + place, sort_key(score, column, BITS), mask=takes & (place < RANKED))
        n_found += tl.sum(takes.to(tl.int32), 0)
    tl.debug_barrier()
    # Beside a score that the temperature has made infinite, nothing can be weighed.
    if (n_found <= RANKED) & (tl.abs(peak) < float("inf")):
        column = _drawn_by_rank(found, n_found, number, peak, top_k, top_p, ONE, BITS, RANKED, AGAINST)
    else:
        column = _drawn_by_halving(scores, number, peak, top_k, top_p, V, ONE, PASSED)
    return column
