"""Kernels that choose a text token for each slot: masks, penalties, stop probe, listen rule, top-k, top-p, draw.

They compute the same as `models.stages.regions.choose`; exponentials and logarithms may differ in their last bits. Four
launches: clear the marks, mark the ids of a slot's history, score the vocabulary in blocks, choose. Requires Triton.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from models.kernels.launch import launch_options
from models.kernels.samplers.drawn_column import drawn_column
from models.kernels.samplers.draws import N_ROUNDS, uniform
from models.sampling.rng import N_STREAMS, STREAM_STOP_PROBE, STREAM_TEXT, WEIGHT_ONE
from models.sampling.text import SamplerState, TokenSets

ID_BITS = 20  # bits of a sort key that hold the id; no text vocabulary is larger
MARKED = 1024  # history entries per program
BLOCK, SPAN = 2048, 256  # columns per scoring program; columns per maximum
SPANS = 32  # spans searched at once for candidates
RANKED = 256  # most candidates that are ranked by comparison: about 200 in practice, plus ties
AGAINST = 32  # candidates compared at once
PASSED = 8192  # scores read at once in a pass over a row
WEIGHTLESS = 28.0  # distance from the best score at which the fixed-point weight is 0
WARPS = 16


@triton.jit
def _mark_kernel(
    seen, slots, history, count, chunk_start, window, chunked, V, H, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """1 for each id that the slot chose within its repetition window, as `models.sampling.text._seen`."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, place = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + row)
    n = tl.load(count + slot)
    back = (n - 1 - place) % H
    number = n - 1 - tl.where(back < 0, back + H, back)
    first = tl.where(tl.load(chunked + slot) != 0, tl.load(chunk_start + slot), n) - tl.load(window + slot)
    is_held = (place < H) & (number >= 0)
    held = tl.load(history + slot * H + place, mask=is_held, other=0)
    tl.store(seen + row.to(tl.int64) * V + held, 1, mask=is_held & (number >= first))


@triton.jit
def _scaled(scores, factor, divides):
    """scores / factor where `divides`, scores * factor elsewhere, with the same bits as in PyTorch."""
    return tl.where(divides, tl.div_rn(scores, factor), scores * factor)


@triton.jit
def _penalised(given, is_forbidden, is_seen, is_long, is_listen, penalty, blind, long_penalty, scale, on_probability):
    """`models.sampling.text.penalise`; all arguments have one shape."""
    scores = tl.where(is_forbidden, float("-inf"), given)
    scores = tl.where(is_seen, _scaled(scores, penalty, blind | (scores > 0)), scores)
    scores = tl.where(is_long, _scaled(scores, long_penalty, scores > 0), scores)
    return tl.where(is_listen, tl.where(on_probability, scores + tl.log(scale), scores * scale), scores)


@triton.jit
def _score_kernel(
    logits, fed, sample, slots, seen, set_index, forbidden, length_ids, listen_ids, temperature, repetition, sign_blind,
    length, listen_scale, on_probability, scores, highs, tops, sums, places, V, N,
    BLOCK: tl.constexpr, SPAN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One block of the vocabulary: its tempered scores and the maxima of their spans; the best logit and the best score
    with their columns; the sum of exponentials relative to the best logit; the number of ids that outscore listen.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if (tl.load(fed + row) | tl.load(sample + row)) == 0:
        return
    slot = tl.load(slots + row)
    at = tl.load(set_index + slot) * V
    listen_id = tl.load(listen_ids + tl.load(set_index + slot))
    heat, penalty, long_penalty = tl.load(temperature + slot), tl.load(repetition + slot), tl.load(length + slot)
    blind, scale = tl.load(sign_blind + slot) != 0, tl.load(listen_scale + slot)
    scales_probability = tl.load(on_probability + slot) != 0

    column = block * BLOCK + tl.arange(0, BLOCK)
    inside = column < V
    given = tl.load(logits + row * V + column, mask=inside, other=float("-inf"))
    is_forbidden = tl.load(forbidden + at + column, mask=inside, other=1) != 0
    is_seen = tl.load(seen + row * V + column, mask=inside, other=0) != 0
    is_long = tl.load(length_ids + at + column, mask=inside, other=0) != 0
    is_listen = column == listen_id
    score = _penalised(
        given, is_forbidden, is_seen, is_long, is_listen, penalty, blind, long_penalty, scale, scales_probability
    )  # fmt: skip

    # The score of the listen token, which every block compares its ids with.
    listen = tl.maximum(listen_id, 0)
    listen_score = _penalised(
        tl.load(logits + row * V + listen), tl.load(forbidden + at + listen) != 0,
        tl.load(seen + row * V + listen) != 0, tl.load(length_ids + at + listen) != 0, listen_id >= 0,
        penalty, blind, long_penalty, scale, scales_probability,
    )  # fmt: skip

    tempered = tl.div_rn(score, heat)
    tl.store(scores + row * V + column, tempered, mask=inside)
    n_spans: tl.constexpr = BLOCK // SPAN
    highest = tl.max(tl.reshape(tempered, (n_spans, SPAN)), 1)
    tl.store(highs + (row * N + block) * n_spans + tl.arange(0, n_spans), highest)

    is_number = tl.sum((given != given).to(tl.int32), 0) == 0
    top_logit, top_score = tl.max(given, 0), tl.max(score, 0)
    center = tl.where(tl.abs(top_logit) < float("inf"), top_logit, 0.0)
    part = row * 2 * N + block
    tl.store(tops + part, tl.where(is_number, top_logit, float("nan")))
    tl.store(tops + part + N, top_score)
    tl.store(sums + row * N + block, tl.sum(tl.exp(given - center), 0))
    part = row * 3 * N + block
    tl.store(places + part, tl.min(tl.where(given == top_logit, column, V), 0))
    tl.store(places + part + N, tl.min(tl.where(score == top_score, column, V), 0))
    tl.store(places + part + 2 * N, tl.sum((score > listen_score).to(tl.int32), 0))


@triton.jit
def _choose_kernel(
    logits, fed, sample, slots, scores, highs, tops, sums, places, spans, found, chosen, set_index, stop_ids,
    listen_ids, pad_ids, unremembered, history, count, seed, draws, greedy, temperature, top_k, top_p, listen_top_k,
    stop_probe, V, H, N,
    STREAMS: tl.constexpr, PROBE: tl.constexpr, TEXT: tl.constexpr, ROUNDS: tl.constexpr, ONE: tl.constexpr,
    BITS: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr, SPANS: tl.constexpr, PARTS: tl.constexpr,
    RANKED: tl.constexpr, AGAINST: tl.constexpr, PASSED: tl.constexpr, WEIGHTLESS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    of = tl.load(set_index + slot)
    is_fed, is_wanted = tl.load(fed + row) != 0, tl.load(sample + row) != 0
    token, is_bad, remembered = tl.load(pad_ids + of), tl.full((), 0, tl.int1), tl.full((), 0, tl.int1)
    if is_fed | is_wanted:
        lane = tl.arange(0, PARTS)
        inside = lane < N
        part = row * 2 * N + lane
        top = tl.load(tops + part, mask=inside, other=float("-inf"))
        top_score = tl.load(tops + part + N, mask=inside, other=float("-inf"))
        is_number = tl.sum((top != top).to(tl.int32), 0) == 0
        best_logit, best_score = tl.max(top, 0), tl.max(top_score, 0)
        is_finite = is_number & (tl.abs(best_logit) < float("inf"))
        usable = is_finite & (tl.abs(best_score) < float("inf"))
        is_bad = (is_fed & ~is_finite) | (is_wanted & ~usable)
        if is_wanted & usable:
            places_of = places + row * 3 * N + lane
            is_greedy = tl.load(greedy + slot) != 0
            n_draws, slot_seed = tl.load(draws + slot), tl.load(seed + slot)

            stop_id, listen_id = tl.load(stop_ids + of), tl.load(listen_ids + of)
            share = tl.exp(tl.where(top > float("-inf"), top, best_logit) - best_logit)
            total = tl.sum(share * tl.load(sums + row * N + lane, mask=inside, other=0.0), 0)
            chance = tl.exp(tl.load(logits + row * V + tl.maximum(stop_id, 0)) - (best_logit + tl.log(total)))
            by_draw = uniform(slot_seed, n_draws, STREAMS, PROBE, ROUNDS) < chance.to(tl.float64)
            first = tl.min(tl.where(top == best_logit, tl.load(places_of, mask=inside, other=V), V), 0)
            stops = tl.where(is_greedy, first == stop_id, by_draw)
            stops = stops & (tl.load(stop_probe + slot) != 0) & (stop_id >= 0)
            rank = tl.sum(tl.load(places_of + 2 * N, mask=inside, other=0), 0)
            listens = (rank < tl.load(listen_top_k + slot)) & (listen_id >= 0)

            if stops:
                token = stop_id
            elif listens:
                token = listen_id
            elif is_greedy:
                at = tl.load(places_of + N, mask=inside, other=V)
                token = tl.min(tl.where(top_score == best_score, at, V), 0).to(tl.int64)
            else:
                n_spans = N * (BLOCK // SPAN)
                token = drawn_column(
                    scores + row * V, highs + row * n_spans, spans + row * n_spans, found + row * RANKED,
                    uniform(slot_seed, n_draws, STREAMS, TEXT, ROUNDS),
                    tl.div_rn(best_score, tl.load(temperature + slot)), tl.load(top_k + slot), tl.load(top_p + slot),
                    V, n_spans, BITS, ONE, PARTS * (BLOCK // SPAN), SPAN, SPANS, RANKED, AGAINST, PASSED,
                    WEIGHTLESS,
                ).to(tl.int64)  # fmt: skip
            remembered = ~stops & ~listens & (tl.load(unremembered + of * V + token) == 0)
            n = tl.load(count + slot)
            tl.debug_barrier()  # every warp has read the counters that are written now
            tl.store(history + slot * H + n % H, token, mask=remembered)
            tl.store(count + slot, n + 1, mask=remembered)
            tl.store(draws + slot, n_draws + 1)
    B = tl.num_programs(0)
    tl.store(chosen + row, token)
    tl.store(chosen + B + row, is_bad.to(tl.int64))
    tl.store(chosen + 2 * B + row, remembered.to(tl.int64))


def choose_tokens(
    state: SamplerState, sets: TokenSets, slots: Tensor, logits: Tensor, fed: Tensor, sample: Tensor
) -> Tensor:
    """Shapes and effects as `models.stages.regions.choose`; logits: float32, contiguous."""
    (B, V), H, device = logits.shape, state.history.shape[1], logits.device
    assert V < 1 << ID_BITS, f"choose_tokens: expected a vocabulary below {1 << ID_BITS}, got {V}"
    N = triton.cdiv(V, BLOCK)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def bytes_of(flags: Tensor) -> Tensor:
        return flags.view(torch.int8)

    is_fed, is_wanted = bytes_of(fed), bytes_of(sample)
    seen = torch.zeros(B, V, dtype=torch.int8, device=device)
    _mark_kernel[(B, triton.cdiv(H, MARKED))](
        seen, slots, state.history, state.count, state.chunk_start, state.repetition_window,
        bytes_of(state.chunked_window), V, H, BLOCK=MARKED, **launch_options(device),
    )  # fmt: skip
    n_spans = N * (BLOCK // SPAN)
    scores, highs = empty(B, V), empty(B, n_spans)
    tops, sums, places = empty(B, 2, N), empty(B, N), empty(B, 3, N, dtype=torch.int32)
    _score_kernel[(B, N)](
        logits, is_fed, is_wanted, slots, seen, state.set_index, bytes_of(sets.forbidden), bytes_of(sets.length_ids),
        sets.listen_id, state.temperature, state.repetition_penalty, bytes_of(state.sign_blind), state.length_penalty,
        state.listen_scale, bytes_of(state.listen_scale_on_probability), scores, highs, tops, sums, places, V, N,
        BLOCK=BLOCK, SPAN=SPAN, num_warps=8, **launch_options(device, B * N),
    )  # fmt: skip
    chosen = empty(3, B, dtype=torch.int64)
    _choose_kernel[(B,)](
        logits, is_fed, is_wanted, slots, scores, highs, tops, sums, places, empty(B, n_spans, dtype=torch.int32),
        empty(B, RANKED, dtype=torch.int64), chosen, state.set_index, sets.stop_id, sets.listen_id, sets.pad_id,
        bytes_of(sets.unremembered), state.history, state.count, state.seed, state.draws, bytes_of(state.greedy),
        state.temperature, state.top_k, state.top_p, state.listen_top_k, bytes_of(state.stop_probe), V, H, N,
        STREAMS=N_STREAMS, PROBE=STREAM_STOP_PROBE, TEXT=STREAM_TEXT, ROUNDS=N_ROUNDS, ONE=float(WEIGHT_ONE),
        BITS=ID_BITS, BLOCK=BLOCK, SPAN=SPAN, SPANS=SPANS, PARTS=triton.next_power_of_2(N), RANKED=RANKED,
        AGAINST=AGAINST, PASSED=PASSED, WEIGHTLESS=WEIGHTLESS, num_warps=WARPS, **launch_options(device),
    )  # fmt: skip
    return chosen
