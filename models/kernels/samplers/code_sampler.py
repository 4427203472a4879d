"""One kernel that draws one code of a frame for each slot: temperature, top-k, top-p, random number, draw.

It computes the same as `models.qwen3_tts.draws.draw_codes`; exponentials may differ in their last bits. One program
handles one row of scores. Requires Triton.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from models.kernels.launch import launch_options
from models.kernels.samplers.draws import LOWEST, N_ROUNDS, NO_KEY, fixed_point, nth_score, ordered, sort_key, uniform
from models.sampling.rng import N_STREAMS, STREAM_SPEECH, WEIGHT_ONE

WARPS = 8
MARKS = tl.constexpr(8)  # scores that one pass over the row compares with
ID_BITS = 16  # bits of a sort key that hold the code; no codec vocabulary is larger


class CodeSamplerSettings(NamedTuple):
    """Settings of every slot. seed: [S + 1] int64. The others are [S + 1, 2], for the two kinds of codes:
    greedy bool, temperature and top_p float32, top_k int64.
    """

    seed: Tensor
    greedy: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor


@triton.jit
def _kept(scores, column, inside, peak, top_k, top_p, ONE: tl.constexpr, BITS: tl.constexpr):
    """The columns that top-k, then top-p keep: [BLOCK] bool. Both bounds are found by search."""
    kept = inside
    if top_k != 0:
        k = tl.minimum(top_k, tl.sum(inside.to(tl.int32), 0))
        score = tl.where(inside, ordered(scores), LOWEST)
        kept &= score >= nth_score(score, k, MARKS)
    if top_p < 1.0:
        weights = tl.where(kept, fixed_point(scores, peak, ONE), 0)
        key = tl.where(kept, sort_key(scores, column, BITS), NO_KEY)
        total = tl.sum(weights, 0)
        allowed_tail = (total.to(tl.float64) * (1.0 - top_p.to(tl.float64))).to(tl.int64)
        low, high = tl.full((), -(1 << (31 + BITS)), tl.int64), tl.max(key, 0)
        while low < high:  # the lowest key with more weight than the tail may have, itself included
            middle = low + (high - low) // 2
            if tl.sum(tl.where(key > middle, weights, 0), 0) < total - allowed_tail:
                high = middle
            else:
                low = middle + 1
        kept &= key >= high
    return kept


# `draws` is a row of a table: with an odd number of slots, every other row is not aligned.
@triton.jit(do_not_specialize_on_alignment=["draws"])
def _draw_code_kernel(
    given, slots, draws, seed, greedy, temperature, top_k, top_p, table, drawn, finite, rows, V, stride, which, W,
    STREAMS: tl.constexpr, STREAM: tl.constexpr, ROUNDS: tl.constexpr, ONE: tl.constexpr,
    BITS: tl.constexpr, BLOCK: tl.constexpr, ROW_BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """ROW_BLOCK: at least the width W of the table's rows, or 0 without one."""
    # The next kernel starts when this one ends. All others of the code predictor's passes start the next one early, and
    # would wait on the multiprocessors by the hundred.
    if PDL:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    setting = slot * 2 + which
    column = tl.arange(0, BLOCK)
    inside = column < V
    values = tl.load(given + row.to(tl.int64) * stride + column, mask=inside, other=float("-inf")).to(tl.float32)
    scores = tl.div_rn(values, tl.load(temperature + setting))
    peak = tl.max(scores, 0)
    is_number = tl.sum((values != values).to(tl.int32), 0) == 0
    usable = is_number & (tl.abs(peak) < float("inf"))
    safe = tl.where(usable, peak, 0.0)

    kept = _kept(scores, column, inside, safe, tl.load(top_k + setting), tl.load(top_p + setting), ONE, BITS)
    weights = tl.where(kept & usable, fixed_point(scores, safe, ONE), 0)
    total = tl.sum(weights, 0)
    number = uniform(tl.load(seed + slot), tl.load(draws + row), STREAMS, STREAM, ROUNDS)
    target = tl.minimum((number * total.to(tl.float64)).to(tl.int64), total - 1)
    below = tl.sum(((tl.cumsum(weights, 0) <= target) & inside).to(tl.int64), 0)
    highest = tl.max(values, 0)
    best = tl.min(tl.where((values == highest) & inside, column, BLOCK), 0).to(tl.int64)
    code = tl.where(tl.load(greedy + setting) != 0, best, below)
    code = tl.where(usable, code, 0)
    tl.store(drawn + row, code)
    tl.store(finite + row, (is_number & (tl.abs(highest) < float("inf"))).to(tl.int8))
    if ROW_BLOCK > 0:
        at = tl.arange(0, ROW_BLOCK)
        values = tl.load(table + code * W + at, mask=at < W)
        tl.store(rows + row.to(tl.int64) * W + at, values, mask=at < W)


def draw_code(
    scores: Tensor,
    slots: Tensor,
    settings: CodeSamplerSettings,
    draws: Tensor,
    which: int,
    table: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """One code for each slot.

    Args:
        scores: [B, V] of any float type.
        slots: [B] int64.
        draws: [B] int64, number of the draw among those with the slot's seed.
        which: column of the settings.
        table: [K, W] contiguous, K at least every code + 1.
    Returns: codes [B] int64, 0 in a row whose scores are not finite numbers; whether the highest score is finite, [B]
        bool; with a table the codes' rows of it, [B, 1, W].
    """
    B, V = scores.shape
    drawn, finite = torch.empty_like(slots), torch.empty(B, dtype=torch.bool, device=slots.device)
    width = 0 if table is None else table.shape[1]
    rows = None if table is None else torch.empty(B, 1, width, dtype=table.dtype, device=slots.device)
    _draw_code_kernel[(B,)](
        scores, slots, draws, settings.seed, settings.greedy.view(torch.int8), settings.temperature,
        settings.top_k, settings.top_p, table, drawn, finite.view(torch.int8), rows, V, scores.stride(0), which, width,
        STREAMS=N_STREAMS, STREAM=STREAM_SPEECH, ROUNDS=N_ROUNDS, ONE=float(WEIGHT_ONE), BITS=ID_BITS,
        BLOCK=triton.next_power_of_2(V), ROW_BLOCK=triton.next_power_of_2(width) if width else 0,
        num_warps=WARPS, **launch_options(scores.device),
    )  # fmt: skip
    return drawn, finite, rows
