"""Triton kernels between the passes of a frame of Qwen3-TTS: each in place of five to thirty PyTorch operations.

They compute what `models.qwen3_tts.frame_steps.FrameSteps` computes; sums of rows may differ in their last bits. One
program handles one row of the batch. Requires Triton.
"""

from typing import Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from models.kernels.launch import launch_options
from models.layers.kv_cache import KVCache

SCORES_BLOCK = 1024  # columns of one program


class FrameState(Protocol):
    """The tensors of `models.qwen3_tts.state.TalkerState` that the kernels read and write."""

    hidden: Tensor
    row: Tensor
    frames: Tensor
    limit: Tensor
    seen: Tensor
    done: Tensor
    text: Tensor
    text_len: Tensor
    text_open: Tensor
    repetition_penalty: Tensor


@triton.jit
def _begin_kernel(
    slots, done, frames, text, text_len, text_open, text_rows, row, rows, active, n_new, pad_id, W,
    RING: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    b = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < W
    slot = tl.load(slots + b)
    number = tl.load(frames + slot) - 1
    has_text = number < tl.load(text_len + slot)
    waits = (number >= 0) & (has_text == 0) & (tl.load(text_open + slot) != 0)
    is_active = (tl.load(done + slot) == 0) & (waits == 0)
    tl.store(active + b, is_active.to(tl.int8))
    tl.store(n_new + b, (is_active & (number >= 0)).to(tl.int64))
    token = tl.where(has_text, tl.load(text + slot * RING + tl.maximum(number, 0) % RING), pad_id)
    of_text = tl.load(text_rows + token * W + column, mask=inside).to(tl.float32)
    value = of_text + tl.load(row + slot * W + column, mask=inside).to(tl.float32)
    tl.store(rows + b * W + column, value.to(rows.dtype.element_ty), mask=inside)


@triton.jit
def _keep_kernel(slots, hidden, n_new, kept, out, W, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    b = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < W
    slot, is_fed = tl.load(slots + b), tl.load(n_new + b) > 0
    value = tl.load(kept + slot * W + column, mask=inside)
    value = tl.where(is_fed, tl.load(hidden + b * W + column, mask=inside), value)
    tl.store(out + b * W + column, value, mask=inside)
    tl.store(kept + slot * W + column, value, mask=inside)


@triton.jit(do_not_specialize=["B"])
def _scores_kernel(
    logits, slots, penalty, seen, frames, scores, numbers, B, V, eos_id, n_control, min_frames,
    GROUPS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    b = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < V
    slot = tl.load(slots + b)
    given = tl.load(logits + b * V + column, mask=inside, other=0.0).to(tl.float32)
    factor, n_frames = tl.load(penalty + slot), tl.load(frames + slot)
    lowered = tl.where(given < 0, given * factor, tl.div_rn(given, factor))
    is_seen = tl.load(seen + slot * V + column, mask=inside, other=0) != 0
    value = tl.where(is_seen, lowered, given)
    is_end = column == eos_id
    excluded = ((column >= V - n_control) & (column != eos_id)) | (is_end & (n_frames < min_frames))
    tl.store(scores + b * V + column, tl.where(excluded, float("-inf"), value), mask=inside)
    if tl.program_id(1) == 0:
        group = tl.arange(0, GROUPS)
        tl.store(numbers + group * B + b, n_frames * GROUPS + group)


@triton.jit
def _begin_codes_kernel(
    slots, first, usable, active, hidden, code_rows, lengths, positions, codes, rows, n_new, eos_id, W,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    b = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < W
    slot, code = tl.load(slots + b), tl.load(first + b)
    begun = (tl.load(active + b) != 0) & (tl.load(usable + b) != 0) & (code != eos_id)
    code = tl.where(begun, code, 0)
    tl.store(codes + b, code)
    tl.store(n_new + b, begun.to(tl.int64))
    tl.store(rows + b * 2 * W + column, tl.load(hidden + b * W + column, mask=inside), mask=inside)
    tl.store(rows + (b * 2 + 1) * W + column, tl.load(code_rows + code * W + column, mask=inside), mask=inside)
    position = tl.load(positions + slot) - tl.load(lengths + slot)
    tl.debug_barrier()  # all threads have read the length
    tl.store(positions + slot, position)
    tl.store(lengths + slot, 0)


@triton.jit
def _end_kernel(
    slots, codes, drawn_first, usable_first, usable_last, active, n_new, code_rows, tables,
    row, seen, frames, limit, done, outcomes, eos_id, V, K, W,
    GROUPS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    b = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < W
    slot, first = tl.load(slots + b), tl.load(codes + b * GROUPS)
    drawn = (tl.load(n_new + b) > 0) & (tl.load(usable_last + b) != 0)
    total = tl.load(code_rows + first * W + column, mask=inside).to(tl.float32)
    for group in tl.static_range(1, GROUPS):
        place = tl.load(codes + b * GROUPS + group) + (group - 1) * K
        total += tl.load(tables + place * W + column, mask=inside).to(tl.float32)
    if drawn:
        tl.store(row + slot * W + column, total.to(row.dtype.element_ty), mask=inside)
        tl.store(seen + slot * V + first, 1)
    n_frames = tl.load(frames + slot) + drawn.to(tl.int64)
    is_last = n_frames >= tl.load(limit + slot)
    has_ended = (tl.load(usable_first + b) != 0) & (tl.load(drawn_first + b) == eos_id)
    # As in `models.qwen3_tts.frame_steps`: a frame, the last frame, the end of speech, unusable logits.
    outcome = tl.where(drawn, tl.where(is_last, 2, 1), tl.where(has_ended, 3, 4))
    outcome = tl.where(tl.load(active + b) != 0, outcome, 0)
    tl.store(outcomes + b, outcome.to(tl.int64))
    tl.debug_barrier()  # all threads have read the number of frames
    tl.store(frames + slot, n_frames, mask=drawn)
    tl.store(done + slot, 1, mask=outcome >= 2)


def begin_frame(state: FrameState, slots: Tensor, text_rows: Tensor, pad_id: int) -> tuple[Tensor, Tensor, Tensor]:
    """As `FrameSteps.begin`; text_rows: [text vocabulary, D]. Returns: the fields of `Fed`."""
    B, W = len(slots), text_rows.shape[1]
    rows = torch.empty(B, 1, W, dtype=text_rows.dtype, device=slots.device)
    active, n_new = torch.empty(B, dtype=torch.bool, device=slots.device), torch.empty_like(slots)
    _begin_kernel[(B,)](
        slots, _bytes(state.done), state.frames, state.text, state.text_len, _bytes(state.text_open), text_rows,
        state.row, rows, _bytes(active), n_new, pad_id, W,
        RING=state.text.shape[1], BLOCK=triton.next_power_of_2(W), **launch_options(slots.device),
    )  # fmt: skip
    return rows, active, n_new


def keep_hidden(state: FrameState, slots: Tensor, hidden: Tensor, n_new: Tensor) -> Tensor:
    """As `FrameSteps.keep_hidden`; hidden: [B, D] contiguous."""
    B, W = hidden.shape
    out = torch.empty_like(hidden)
    _keep_kernel[(B,)](
        slots, hidden, n_new, state.hidden, out, W, BLOCK=triton.next_power_of_2(W), **launch_options(slots.device)
    )
    return out


def first_scores(
    state: FrameState, slots: Tensor, logits: Tensor, eos_id: int, n_control: int, min_frames: int, groups: int
) -> tuple[Tensor, Tensor]:
    """As `FrameSteps.first_scores`.

    Args:
        logits: [B, V] of any float type.
        n_control: control codes, the last of the vocabulary.
        min_frames: frames before the end may be drawn.
        groups: codes of a frame.
    """
    B, V = logits.shape
    scores = torch.empty(B, V, dtype=torch.float32, device=slots.device)
    numbers = torch.empty(groups, B, dtype=torch.int64, device=slots.device)
    _scores_kernel[(B, triton.cdiv(V, SCORES_BLOCK))](
        logits, slots, state.repetition_penalty, _bytes(state.seen), state.frames, scores, numbers,
        B, V, eos_id, n_control, min_frames, GROUPS=groups, BLOCK=SCORES_BLOCK, **launch_options(slots.device),
    )  # fmt: skip
    return scores, numbers


def begin_codes(
    cache: KVCache,
    slots: Tensor,
    hidden: Tensor,
    code_rows: Tensor,
    drawn: tuple[Tensor, Tensor],
    active: Tensor,
    eos_id: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `FrameSteps.begin_codes`.

    Args:
        cache: the code predictor's.
        code_rows: [vocabulary, D].
        drawn: [B] first codes, and [B] whether their scores were finite.
    Returns: the fields of `Residual`.
    """
    B, W = hidden.shape
    rows = torch.empty(B, 2, W, dtype=hidden.dtype, device=slots.device)
    codes, n_new = torch.empty_like(slots), torch.empty_like(slots)
    first, usable = drawn
    _begin_codes_kernel[(B,)](
        slots, first, _bytes(usable), _bytes(active), hidden, code_rows, cache.lengths, cache.positions,
        codes, rows, n_new, eos_id, W, BLOCK=triton.next_power_of_2(W), **launch_options(slots.device),
    )  # fmt: skip
    return rows, codes, n_new


def end_frame(
    state: FrameState,
    slots: Tensor,
    codes: Tensor,
    n_new: Tensor,
    active: Tensor,
    drawn: tuple[Tensor, Tensor],
    usable: Tensor,
    tables: tuple[Tensor, Tensor],
    eos_id: int,
) -> Tensor:
    """As `FrameSteps.end`.

    Args:
        drawn: as for `begin_codes`.
        tables: rows [vocabulary, D] of the first codes, and [15, K, D] of the residual ones.
    """
    code_rows, residual = tables
    outcomes, (first, usable_first) = torch.empty_like(slots), drawn
    _end_kernel[(len(slots),)](
        slots, codes, first, _bytes(usable_first), _bytes(usable), _bytes(active), n_new, code_rows, residual,
        state.row, _bytes(state.seen), state.frames, state.limit, _bytes(state.done), outcomes, eos_id,
        state.seen.shape[1], residual.shape[1], residual.shape[2],
        GROUPS=codes.shape[1], BLOCK=triton.next_power_of_2(residual.shape[2]), num_warps=8,
        **launch_options(slots.device),
    )  # fmt: skip
    return outcomes


def _bytes(flags: Tensor) -> Tensor:
    """A view of bool as int8, which Triton takes."""
    return flags.view(torch.int8)
