"""The regions of the language models: prompt and frame as plain functions of weights, slot state and tensors.

A region has fixed shapes per bucket, reads nothing back to the host and changes slot state in place, so the same
function runs eager, compiled and captured. Rows of padding name the scratch slot.
"""

import torch
from torch import Tensor

from models.qwen3_tts.model import Qwen3TTS
from models.qwen3_tts.state import FIRST, REST, TEXT_RING, DrawCodes, TalkerState


def reset(state: TalkerState, slots: Tensor) -> None:
    """Empty slots [B]."""
    state.reset(slots)


def feed_prompt(
    model: Qwen3TTS,
    state: TalkerState,
    slots: Tensor,
    text: Tensor,
    codes: Tensor,
    speakers: Tensor,
    speaker_row: Tensor,
    n_new: Tensor,
    kv_len: int,
) -> None:
    """Append rows of a prompt to slots. The state after the last becomes the state that the first frame is drawn from.

    Args:
        slots: [B] int64, distinct except for the scratch slot.
        text: [B, T] int64 text token of each row, -1 for none; n_new[b] rows are valid, left-aligned.
        codes: [B, T, 16] int64, -1 for none.
        speakers: [B, D] float32 speaker embeddings.
        speaker_row: [B] int64 row that the embedding is added to, -1 for none.
        n_new: [B] int64, 0..T.
        kv_len: cache rows to attend to; static.
    """
    rows = prompt_rows(model, text, codes, speakers, speaker_row)
    hidden = model.talker(rows, state.cache, slots, n_new, kv_len, model.backend)
    last = (n_new - 1).clamp(min=0)[:, None, None].expand(-1, 1, hidden.shape[-1])
    newest = torch.where((n_new > 0)[:, None], hidden.gather(1, last)[:, 0], state.hidden[slots])
    state.hidden.index_copy_(0, slots, newest)


def prompt_rows(model: Qwen3TTS, text: Tensor, codes: Tensor, speakers: Tensor, speaker_row: Tensor) -> Tensor:
    """Rows [B, T, D] of a prompt; arguments as for `feed_prompt`."""
    rows = model.talker.rows_of_text(text) + model.talker.rows_of_codes(codes)
    is_speaker = torch.arange(text.shape[1], device=text.device) == speaker_row[:, None]
    return torch.where(is_speaker[..., None], rows + speakers[:, None].to(rows.dtype), rows)


def append_text(state: TalkerState, slots: Tensor, ids: Tensor, n_new: Tensor, is_open: Tensor) -> None:
    """Append text tokens to the rings of slots.

    Args:
        slots: [B] int64, distinct except for the scratch slot.
        ids: [B, N] int64; n_new[b] are valid, left-aligned.
        n_new: [B] int64, 0..N.
        is_open: [B] bool, more text follows.
    """
    offset = torch.arange(ids.shape[1], device=ids.device)
    place = (state.text_len[slots][:, None] + offset) % TEXT_RING
    old = state.text[slots[:, None], place]
    state.text[slots[:, None], place] = torch.where(offset < n_new[:, None], ids, old)
    state.text_len.index_copy_(0, slots, state.text_len[slots] + n_new)
    state.text_open.index_copy_(0, slots, is_open)


def start(state: TalkerState, slots: Tensor, starts: Tensor) -> None:
    """Let slots [B] draw frames where the mask `starts` [B] is true: their prompts are complete."""
    state.done.index_copy_(0, slots, state.done[slots] & ~starts)


def frame(
    model: Qwen3TTS, state: TalkerState, draw: DrawCodes, slots: Tensor, kv_len: int, candidates: int | None
) -> tuple[Tensor, Tensor]:
    """Feed the newest frame of each slot, and draw the next. A slot without a frame draws its first.

    Args:
        slots: [B] int64, distinct except for the scratch slot.
        kv_len: cache rows to attend to; static.
        candidates: as for `draws.keep_codes`; static.
    Returns: codes [B, 16] int64, meaningful for the outcomes FRAME and LAST_FRAME, and outcomes [B] int64.
    """
    talker, steps = model.talker, model.frame_steps
    fed = steps.begin(state, slots)
    hidden = talker(fed.rows, state.cache, slots, fed.n_new, kv_len, model.backend)[:, 0]
    newest = steps.keep_hidden(state, slots, hidden.contiguous(), fed.n_new)
    return _draw_frame(model, state, draw, slots, newest, fed.active, candidates)


def first_frame(
    model: Qwen3TTS, state: TalkerState, draw: DrawCodes, slots: Tensor, candidates: int | None
) -> tuple[Tensor, Tensor]:
    """Draw the first frame of slots whose prompts are complete: `frame` without a step of the talker."""
    active = ~state.done[slots] & (state.frames[slots] == 0)
    return _draw_frame(model, state, draw, slots, state.hidden[slots], active, candidates)


def _draw_frame(
    model: Qwen3TTS,
    state: TalkerState,
    draw: DrawCodes,
    slots: Tensor,
    hidden: Tensor,
    active: Tensor,
    candidates: int | None,
) -> tuple[Tensor, Tensor]:
    """Draw sixteen codes of each active slot from its state [B, D], and advance it. Returns: as `frame`."""
    talker, steps = model.talker, model.frame_steps
    scores, numbers = steps.first_scores(state, slots, talker.logits(hidden, model.backend))
    first, _ = steps.draw(draw, scores, slots, state, numbers[0], FIRST, candidates)
    residual = steps.begin_codes(state, slots, hidden, first, active)
    usable = first.usable

    def draw_residual(logits: Tensor, group: int, table: Tensor | None) -> tuple[Tensor, Tensor | None]:
        # A NaN of any pass is in the keys and values that the last one reads, so the last draw finds it.
        nonlocal usable
        drawn, rows = steps.draw(draw, logits, slots, state, numbers[group], REST, candidates, table)
        usable = drawn.usable
        return drawn.codes, rows

    rest = talker.code_predictor(
        residual.rows, state.predictor_cache, slots, residual.n_new, draw_residual, model.backend
    )
    codes = torch.cat((residual.codes[:, None], rest), dim=1)
    return codes, steps.end(state, slots, codes, residual.n_new, active, first, usable)
