"""The regions of the language models: prompt and frame as plain functions of weights, slot state and tensors.

A region has fixed shapes per bucket, reads nothing back to the host and changes slot state in place, so the same
function runs eager, compiled and captured. Rows of padding name the scratch slot.
"""

import torch
from torch import Tensor

from models.qwen3_tts.draws import allowed_scores
from models.qwen3_tts.model import Qwen3TTS
from models.qwen3_tts.state import FIRST, GROUPS, REST, TEXT_RING, DrawCodes, TalkerState

# Outcomes of a slot in one frame.
WAITED = 0  # no frame: no request, over, or waiting for text
FRAME = 1
LAST_FRAME = 2  # a frame, and the slot is at its limit
ENDED = 3  # no frame: the end of speech was drawn
BAD = 4  # no frame: the logits are NaN or infinite; the slot is over


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
    talker = model.talker
    number = state.frames[slots] - 1  # of the newest frame
    has_text = number < state.text_len[slots]
    waits = (number >= 0) & ~has_text & state.text_open[slots]
    active = ~state.done[slots] & ~waits
    text = state.text[slots, number.clamp(min=0) % TEXT_RING]
    rows = talker.text_rows[torch.where(has_text, text, model.config.tts_pad_token_id)] + state.row[slots]
    fed = active & (number >= 0)
    hidden = talker(rows[:, None], state.cache, slots, fed.long(), kv_len, model.backend)[:, 0]
    state.hidden.index_copy_(0, slots, torch.where(fed[:, None], hidden, state.hidden[slots]))
    return _draw_frame(model, state, draw, slots, active, candidates)


def first_frame(
    model: Qwen3TTS, state: TalkerState, draw: DrawCodes, slots: Tensor, candidates: int | None
) -> tuple[Tensor, Tensor]:
    """Draw the first frame of slots whose prompts are complete: `frame` without a step of the talker."""
    active = ~state.done[slots] & (state.frames[slots] == 0)
    return _draw_frame(model, state, draw, slots, active, candidates)


def _draw_frame(
    model: Qwen3TTS, state: TalkerState, draw: DrawCodes, slots: Tensor, active: Tensor, candidates: int | None
) -> tuple[Tensor, Tensor]:
    """Draw sixteen codes of each active slot from its state, and advance it. Returns: as `frame`."""
    draw = model.kernel_draw or draw
    talker, hidden, frames = model.talker, state.hidden[slots], state.frames[slots]
    eos_id = model.config.talker_config.codec_eos_token_id
    scores = allowed_scores(talker.logits(hidden, model.backend), slots, state, eos_id)
    usable = [scores.amax(1).isfinite()]
    numbers = frames * GROUPS + torch.arange(GROUPS, device=frames.device)[:, None]  # of the frame's draws
    first = draw(scores, slots, state, numbers[0], FIRST, candidates)
    ended = first == eos_id
    begun = active & usable[0] & ~ended

    def draw_residual(logits: Tensor, group: int) -> Tensor:
        if group == GROUPS - 1:  # a NaN of any pass is in the keys and values that the last one reads
            usable.append(logits.amax(1).isfinite())
        return draw(logits, slots, state, numbers[group], REST, candidates)

    # Padding and idle rows run too, on an acoustic code.
    first = torch.where(begun, first, 0)
    rest = talker.code_predictor(
        hidden, talker.code_rows[first], state.predictor_cache, slots, begun, draw_residual, model.backend
    )
    codes = torch.cat((first[:, None], rest), dim=1)
    drawn = begun & usable[1]

    state.row.index_copy_(0, slots, torch.where(drawn[:, None], talker.frame_rows(codes), state.row[slots]))
    state.seen[slots, first] = state.seen[slots, first] | drawn
    state.frames.index_copy_(0, slots, frames + drawn)
    is_last = drawn & (frames + 1 >= state.limit[slots])
    outcome = torch.where(drawn, torch.where(is_last, LAST_FRAME, FRAME), torch.where(usable[0] & ended, ENDED, BAD))
    outcome = torch.where(active, outcome, WAITED)
    state.done.index_copy_(0, slots, state.done[slots] | (outcome >= LAST_FRAME))
    return codes, outcome
