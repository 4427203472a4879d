"""The regions: every stage a unit or a chat runs, as plain functions of weights, slot state and tensors.

A region has fixed shapes per bucket, reads nothing back to the host and changes slot state in place, so it
can run eager, compiled or captured without a second version. Rows of padding name the scratch slot.
Which shapes exist is the business of `graphs`.
"""

from typing import Literal

import torch
from torch import Tensor

from models.inputs.audio import LogMel
from models.inputs.mel_stream import mel_step
from models.layers import speech_loop as speech
from models.layers.audio_overlap import overlap_encode, store_recent
from models.layers.backend import SpeechSampler, TextSampler
from models.omni import OmniModel
from models.sampling import text as sampling
from models.stages.state import SlotState


def vision(model: OmniModel, pixels: Tensor, position_ids: Tensor, coords: Tensor, mask: Tensor) -> Tensor:
    """Image slices to LLM rows [B, query_num, D]; shapes as `OmniModel.encode_images`."""
    return model.encode_images(pixels, position_ids, coords, mask)


def clips(model: OmniModel, mel: Tensor, n_frames: Tensor, n_keys: Tensor, chunk: int) -> Tensor:
    """Whole clips to LLM rows; shapes as `OmniModel.encode_clips`."""
    return model.encode_clips(mel, n_frames, n_keys, chunk)


def mel_unit(
    log_mel: LogMel,
    state: SlotState,
    slots: Tensor,
    samples: Tensor,
    n_new: Tensor,
    emit: Tensor,
    last: Tensor,
    redundancy: int,
    clip: Literal["auto", "fixed", "dynamic"],
) -> tuple[Tensor, Tensor, Tensor]:
    """New samples to one unit of log-mel per slot; shapes as `mel_stream.mel_step`."""
    return mel_step(log_mel, state.mel, slots, samples, n_new, emit, last, redundancy=redundancy, clip=clip)


def audio_unit(
    model: OmniModel, state: SlotState, slots: Tensor, mel: Tensor, first: Tensor, end: Tensor
) -> tuple[Tensor, Tensor]:
    """One unit of log-mel per slot to LLM rows [B, 10, D], and kept for `audio_overlap`; shapes as `Apm.stream`."""
    store_recent(state.recent_mel, slots, mel, first, end)
    return model.encode_unit(mel, first, end, state.apm, slots)


def audio_overlap(model: OmniModel, state: SlotState, slots: Tensor, active: Tensor) -> None:
    """Start the audio cache of active slots [B] over from the last seconds they heard; see `overlap_encode`."""
    overlap_encode(model.apm, state.recent_mel, state.apm, slots, active)


def llm_prefill(
    model: OmniModel,
    state: SlotState,
    slots: Tensor,
    ids: Tensor,
    rows: Tensor,
    is_row: Tensor,
    n_new: Tensor,
    kv_len: int,
) -> tuple[Tensor, Tensor]:
    """Feed a mix of tokens and media rows.

    Args:
        ids: [B, T] token ids. rows: [B, T, D] media rows, used where is_row [B, T] is true.
        n_new: [B] valid rows, left-aligned. kv_len: cache rows to look at (static).
    Returns: hidden states [B, T, D] and logits [B, V] after each slot's last valid row.
    """
    embeds = torch.where(is_row[..., None], rows.to(model.dtype), model.llm.embed(ids, model.backend))
    return model.llm.prefill(embeds, state.llm, slots, n_new, kv_len, model.backend)


def llm_decode(
    model: OmniModel, state: SlotState, slots: Tensor, ids: Tensor, active: Tensor, kv_len: int
) -> tuple[Tensor, Tensor]:
    """Feed one token per active slot. Returns: hidden states [B, D] and logits [B, V]."""
    return model.llm.decode(ids, state.llm, slots, active, kv_len, model.backend)


def sample_text(
    state: SlotState,
    sets: sampling.TokenSets,
    slots: Tensor,
    logits: Tensor,
    active: Tensor,
    candidates: int | None,
) -> sampling.Sampled:
    """Choose one token per active slot [B] by the slot's own settings; shapes as `sampling.sample_text`."""
    return sampling.sample_text(logits, slots, active, state.text, sets, candidates)


def unit_prefill(
    model: OmniModel,
    state: SlotState,
    sets: sampling.TokenSets,
    choose: TextSampler,
    slots: Tensor,
    ids: Tensor,
    rows: Tensor,
    is_row: Tensor,
    n_new: Tensor,
    wants: Tensor,
    kv_len: int,
) -> tuple[Tensor, Tensor]:
    """Feed as `llm_prefill`, then choose a token where `wants` [B] says so; returns as `unit_step`."""
    _, logits = llm_prefill(model, state, slots, ids, rows, is_row, n_new, kv_len)
    chosen = model.backend.text_sampler(choose)(state.text, sets, slots, logits, n_new > 0, wants)
    return chosen, logits


def unit_step(
    model: OmniModel,
    state: SlotState,
    sets: sampling.TokenSets,
    choose: TextSampler,
    slots: Tensor,
    ids: Tensor,
    active: Tensor,
    places: Tensor,
    wants: Tensor,
    kv_len: int,
) -> tuple[Tensor, Tensor]:
    """Feed one token per active slot, keep its state for speech, and choose the next.

    Args:
        ids: [B]. places: [B] row of the slot's `hidden` that takes the token's state, -1: it is not spoken.
        wants: [B] bool, choose another token.
    Returns: [3, B] int64: token chosen, 1 if the logits were not usable, 1 if the token went into the history; and
        the logits [B, V].
    """
    hidden, logits = model.llm.decode(ids, state.llm, slots, active, kv_len, model.backend)
    kept = active & (places >= 0)
    state.hidden[torch.where(kept, slots, state.scratch), places.clamp(min=0)] = hidden
    chosen = model.backend.text_sampler(choose)(state.text, sets, slots, logits, active, wants)
    return chosen, logits


def choose(
    state: sampling.SamplerState,
    sets: sampling.TokenSets,
    slots: Tensor,
    logits: Tensor,
    fed: Tensor,
    wants: Tensor,
) -> Tensor:
    """A token for each slot [B] that `wants` one, from logits [B, V]; `fed` [B] tells slots from padding.

    Returns: [3, B] as `unit_step`.
    """
    chosen = sampling.sample_text(logits, slots, wants, state, sets)
    bad = chosen.bad | (fed & ~sampling.highest(logits).isfinite())
    return torch.stack((chosen.ids, bad.long(), chosen.remembered.long()))


def spoken_rows(
    model: OmniModel, state: SlotState, slots: Tensor, ids: Tensor, n_text: Tensor, text_eos: Tensor
) -> Tensor:
    """Conditioning rows [B, T + 2, D] of the tokens ids [B, T] whose states wait in the slots; see `TTS.condition`."""
    hidden = state.hidden[slots, : ids.shape[1]]
    rows, _ = speech_condition(model, ids, hidden, n_text, text_eos)
    return rows


def speech_condition(
    model: OmniModel, ids: Tensor, hidden: Tensor, n_text: Tensor, text_eos: Tensor
) -> tuple[Tensor, Tensor]:
    """Spoken tokens and their LLM states to conditioning rows; shapes as `TTS.condition`."""
    normalize = model.config.tts_config.normalize_projected_hidden
    return model.tts.condition(ids, hidden, n_text, text_eos, normalize, model.backend)


def speech_begin(
    model: OmniModel,
    state: SlotState,
    draw: SpeechSampler,
    slots: Tensor,
    rows: Tensor,
    n_rows: Tensor,
    min_speech_tokens: Tensor,
    limit: Tensor,
    kv_len: int,
) -> Tensor:
    """Feed conditioning rows and draw each slot's first code [B]; shapes as `speech.begin`."""
    call = speech.SpeechInputs(rows, n_rows, min_speech_tokens, limit)
    return speech.begin(model.tts, model.backend, state.speech, slots, call, kv_len, draw)


def speech_step(
    model: OmniModel, state: SlotState, draw: SpeechSampler, slots: Tensor, kv_len: int, n_steps: int
) -> Tensor:
    """Feed each slot's newest code and choose the next, `n_steps` times; slots that are done stand still.

    kv_len: holds the rows after the last of the steps. Returns: [B] codes chosen last.
    """
    for _ in range(n_steps):
        drawn = speech.step(model.tts, model.backend, state.speech, slots, kv_len, draw)
    return drawn


def llm_evict(model: OmniModel, state: SlotState, slots: Tensor, keep: Tensor, drop: Tensor, turn: bool) -> None:
    """Drop LLM rows [keep, keep + drop) of each slot and close the gap; see `KVCache.evict`.

    turn: keys behind the gap take the positions of their new places. Otherwise they and the next row keep theirs, and
    what is in front of the gap is for the caller to bring up behind.
    """
    state.llm.evict(slots, keep, drop, model.llm.model.frequencies, turn)
    if not turn:
        state.llm.positions.index_add_(0, slots, drop)


def reset(state: SlotState, slots: Tensor) -> None:
    """Empty slots."""
    state.reset(slots)
