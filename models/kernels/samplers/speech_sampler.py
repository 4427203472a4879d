"""One kernel that draws a speech token for each slot: penalties, top-p, top-k, random number, draw, state update.

It computes the same as `models.layers.speech_loop.draw_speech_tokens`; exponentials and powers of the penalty may
differ in their last bits. One program handles one row of logits. Requires Triton.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from models.kernels.launch import launch_options
from models.kernels.samplers.draws import LOWEST, N_ROUNDS, fixed_point, nth_score, ordered, uniform
from models.layers.speech_state import SPEECH_TOKENS_PER_CALL, SpeechState
from models.sampling.rng import N_STREAMS, STREAM_SPEECH, WEIGHT_ONE
from models.sampling.speech import PENALTY_WINDOW

WARPS = 16
MARKS = tl.constexpr(4)  # scores that one pass over the row compares with


@triton.jit
def _kept_from(scores, inside, top_p, top_k, min_keep, ONE: tl.constexpr):
    """The columns that top-p and top-k keep: [BLOCK] bool.

    They are the best ones in one order, by score and then by lower column, so their bound is found by bisection over
    scores. Sorting takes as long, and compiling a sort takes 15 s.
    """
    score = tl.where(inside, ordered(scores), LOWEST)
    peak = tl.max(scores, 0)
    weights = tl.where(inside, fixed_point(scores, peak, ONE), 0)
    weights = tl.where(tl.abs(peak) < float("inf"), weights, 0)
    total = tl.sum(weights, 0)
    allowed_tail = (total.to(tl.float64) * (1.0 - top_p.to(tl.float64))).to(tl.int64)
    max_above = tl.where(top_p >= 1.0, total, total - allowed_tail - 1)
    low, high = tl.full((), LOWEST, tl.int64), tl.max(score, 0).to(tl.int64)
    while low < high:  # the lowest score with at most `max_above` above it
        middle = low + (high - low) // 2
        if tl.sum(tl.where(score > middle.to(tl.int32), weights, 0), 0) <= max_above:
            high = middle
        else:
            low = middle + 1
    bound = high.to(tl.int32)
    n_equal = tl.sum(((score == bound) & inside).to(tl.int32), 0)
    above = tl.sum(tl.where(score > bound, weights, 0), 0)
    weight = tl.max(tl.where(score == bound, weights, 0), 0)
    # Of equal scores, those with at most `max_above` above them.
    n_light = tl.where(weight > 0, (max_above - above) // tl.maximum(weight, 1) + 1, n_equal)
    n_kept = tl.minimum(n_light, n_equal).to(tl.int32) + tl.sum((score > bound).to(tl.int32), 0)
    least = tl.minimum(min_keep, tl.sum(inside.to(tl.int64), 0)).to(tl.int32)
    if n_kept < least:
        n_kept = least
        bound = nth_score(score, least, MARKS)
    n_equal_kept = n_kept - tl.sum((score > bound).to(tl.int32), 0)
    kept = score >= bound
    equal = (score == bound) & inside
    if n_equal_kept < tl.sum(equal.to(tl.int32), 0):
        kept = (score > bound) | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= n_equal_kept))
    if top_k != 0:
        k = tl.minimum(tl.maximum(top_k, min_keep), tl.sum(inside.to(tl.int64), 0)).to(tl.int32)
        kept &= score >= nth_score(score, k, MARKS)
    return kept & inside


@triton.jit
def _draw_kernel(
    logits, slots, active, history, count, step, min_speech_tokens, seed, draws, eos_id, greedy, temperature,
    penalty, top_p,
    top_k, min_keep, speech_tokens, newest, limit, done, bad, drawn, V,
    WINDOW: tl.constexpr, MOST: tl.constexpr, STREAMS: tl.constexpr, STREAM: tl.constexpr, ROUNDS: tl.constexpr,
    ONE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # The next kernel starts when this one ends, for the reason in `code_sampler`.
    if PDL:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    is_active = tl.load(active + row) != 0
    column = tl.arange(0, BLOCK)
    inside = column < V
    given = tl.load(logits + row.to(tl.int64) * V + column, mask=inside, other=float("-inf")).to(tl.float32)
    n_held, n_step = tl.load(count + slot), tl.load(step + slot)
    end = tl.load(eos_id + slot)
    p, k, least = tl.load(top_p + slot), tl.load(top_k + slot), tl.load(min_keep + slot)

    scores = tl.div_rn(given, tl.load(temperature + slot))
    factor, rate = tl.full((BLOCK,), 1.0, tl.float32), tl.load(penalty + slot)
    for i in tl.static_range(WINDOW):
        recent = tl.load(history + slot * WINDOW + i)
        factor = tl.where((column == recent) & (i < n_held), factor * rate, factor)
    scores = tl.where(scores < 0, scores * factor, tl.div_rn(scores, factor))

    kept = inside
    if (n_held > 0) & ((p < 1.0) | (k != 0)):
        kept &= _kept_from(scores, inside, p, k, least, ONE)
    too_early = n_step < tl.load(min_speech_tokens + slot)
    scores = tl.where(kept & ~((column == end) & too_early), scores, float("-inf"))

    highest, peak = tl.max(given, 0), tl.max(scores, 0)
    is_number = tl.sum((given != given).to(tl.int32), 0) == 0
    usable = is_number & (tl.abs(highest) < float("inf")) & (tl.abs(peak) < float("inf"))
    weights = tl.where(usable, fixed_point(scores, tl.where(usable, peak, 0.0), ONE), 0)
    total = tl.sum(weights, 0)
    number = uniform(tl.load(seed + slot), tl.load(draws + slot), STREAMS, STREAM, ROUNDS)
    target = tl.minimum((number * total.to(tl.float64)).to(tl.int64), total - 1)
    below = tl.sum(((tl.cumsum(weights, 0) <= target) & inside).to(tl.int64), 0)
    best = tl.min(tl.where(scores == peak, column, BLOCK), 0).to(tl.int64)
    counts = is_active & usable
    token = tl.where(counts, tl.where(tl.load(greedy + slot) != 0, best, below), end)
    tl.store(drawn + row, token)

    remembered = counts & (token != end)
    tl.store(history + slot * WINDOW + n_held % WINDOW, token, mask=remembered)
    tl.store(count + slot, n_held + 1, mask=remembered)
    tl.store(step + slot, n_step + 1, mask=counts)
    tl.store(draws + slot, tl.load(draws + slot) + 1, mask=counts)
    tl.store(speech_tokens + slot * MOST + tl.minimum(n_step, MOST - 1), token, mask=counts)
    tl.store(newest + slot, token, mask=counts)
    tl.store(bad + slot, 1, mask=is_active & ~usable)
    over = ~usable | (token == end) | (n_step + 1 >= tl.load(limit + slot))
    tl.store(done + slot, over.to(tl.int8), mask=is_active)


def draw_speech_tokens(state: SpeechState, slots: Tensor, logits: Tensor, active: Tensor) -> Tensor:
    """Shapes and effects as `models.layers.speech_loop.draw_speech_tokens`."""
    sampler, (B, V) = state.sampler, logits.shape
    drawn = torch.empty_like(slots)
    flags = (tensor.view(torch.int8) for tensor in (active, sampler.greedy, state.done, state.bad))
    is_active, greedy, done, bad = flags
    _draw_kernel[(B,)](
        logits, slots, is_active, sampler.history, sampler.count, sampler.step, sampler.min_speech_tokens, sampler.seed,
        sampler.draws, sampler.eos_id, greedy, sampler.temperature, sampler.repetition_penalty, sampler.top_p,
        sampler.top_k, sampler.min_keep, state.speech_tokens, state.newest, state.limit, done, bad, drawn, V,
        WINDOW=PENALTY_WINDOW, MOST=SPEECH_TOKENS_PER_CALL, STREAMS=N_STREAMS, STREAM=STREAM_SPEECH, ROUNDS=N_ROUNDS,
        ONE=float(WEIGHT_ONE), BLOCK=triton.next_power_of_2(V), num_warps=WARPS, **launch_options(logits.device),
    )  # fmt: skip
    return drawn
