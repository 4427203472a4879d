"""The regions of the omni model: every stage of a unit as a plain function of weights, slot state and tensors.

A region has fixed shapes per bucket, reads nothing back to the host and changes slot state in place, so the same
function runs eager, compiled and captured. Rows of padding name the scratch slot. This file does not list the shapes
(`region_table`) and does not compile or capture (`models.graphs`).
"""

from typing import Literal

import torch
from torch import Tensor

from models.inputs.audio import LogMel
from models.inputs.mel_stream import mel_step
from models.layers import speech_loop
from models.layers.audio_overlap import overlap_encode, store_recent
from models.layers.backend import SpeechSampler, TextSampler
from models.omni import OmniModel
from models.sampling import text as sampling
from models.stages.state import SlotState


def vision(model: OmniModel, pixels: Tensor, position_ids: Tensor, coords: Tensor, mask: Tensor) -> Tensor:
    """Encode image slices into LLM rows [B, query_num, D]; shapes as `OmniModel.encode_images`."""
    return model.encode_images(pixels, position_ids, coords, mask)


def clips(model: OmniModel, mel: Tensor, n_frames: Tensor, n_keys: Tensor, chunk: int) -> Tensor:
    """Encode whole clips into LLM rows; shapes as `OmniModel.encode_clips`."""
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
    """Turn new samples into one unit of log-mel per slot; shapes as `mel_stream.mel_step`."""
    assert state.mel is not None
    return mel_step(log_mel, state.mel, slots, samples, n_new, emit, last, redundancy=redundancy, clip=clip)


def audio_unit(
    model: OmniModel, state: SlotState, slots: Tensor, mel: Tensor, first: Tensor, end: Tensor
) -> tuple[Tensor, Tensor]:
    """Encode one unit of log-mel per slot into LLM rows [B, 10, D]; shapes as `Apm.stream`.

    The log-mel is stored in the slots for `audio_overlap`.
    """
    assert state.recent_mel is not None and state.apm is not None
    store_recent(state.recent_mel, slots, mel, first, end)
    return model.encode_unit(mel, first, end, state.apm, slots)


def audio_overlap(model: OmniModel, state: SlotState, slots: Tensor, active: Tensor) -> None:
    """Rebuild the audio cache of `active` [B] slots from the last seconds of log-mel; see `overlap_encode`."""
    assert state.recent_mel is not None and state.apm is not None
    overlap_encode(model.apm, state.recent_mel, state.apm, slots, active)


def unit_prefill(
    model: OmniModel,
    state: SlotState,
    sets: sampling.TokenSets,
    sampler: TextSampler,
    slots: Tensor,
    ids: Tensor,
    rows: Tensor,
    is_row: Tensor,
    n_new: Tensor,
    sample: Tensor,
    kv_len: int,
) -> tuple[Tensor, Tensor]:
    """Append a mix of tokens and media rows to each slot, then choose a token where `sample` is true.

    Args:
        ids: [B, T] token ids.
        rows: [B, T, D] media rows, used where is_row [B, T] is true.
        n_new: [B] valid rows, left-aligned.
        sample: [B] bool, choose a token after the slot's last valid row.
        kv_len: cache rows to read (static).
    Returns: as `unit_step`.
    """
    embeds = torch.where(is_row[..., None], rows.to(model.dtype), model.llm.embed(ids, model.backend))
    _, logits = model.llm.prefill(embeds, state.llm, slots, n_new, kv_len, model.backend)
    chosen = model.backend.text_sampler(sampler)(state.text, sets, slots, logits, n_new > 0, sample)
    return chosen, logits


def unit_step(
    model: OmniModel,
    state: SlotState,
    sets: sampling.TokenSets,
    sampler: TextSampler,
    slots: Tensor,
    ids: Tensor,
    active: Tensor,
    places: Tensor,
    sample: Tensor,
    kv_len: int,
) -> tuple[Tensor, Tensor]:
    """Append one token to each active slot and choose the next one where `sample` is true.

    Args:
        places: [B] row of the slot's `hidden` that receives the token's state for speech; -1: not spoken.
        sample: [B] bool, choose another token.
        kv_len: cache rows to read (static).
    Returns: [3, B] int64: chosen token, 1 if the logits were not usable, 1 if the token went into the history; and
        the logits [B, V].
    """
    hidden, logits = model.llm.decode(ids, state.llm, slots, active, kv_len, model.backend)
    model.backend.keep_hidden(state.hidden, slots, places, active, hidden)
    chosen = model.backend.text_sampler(sampler)(state.text, sets, slots, logits, active, sample)
    return chosen, logits


def choose(
    state: sampling.SamplerState,
    sets: sampling.TokenSets,
    slots: Tensor,
    logits: Tensor,
    fed: Tensor,
    sample: Tensor,
) -> Tensor:
    """Choose a token for each slot where `sample` [B] is true.

    Args:
        logits: [B, V].
        fed: [B] bool, false for padding.
    Returns: the first tensor of `unit_step`.
    """
    chosen = sampling.sample_text(logits, slots, sample, state, sets)
    bad = chosen.bad | (fed & ~sampling.highest(logits).isfinite())
    return torch.stack((chosen.ids, bad.long(), chosen.remembered.long()))


def spoken_rows(
    model: OmniModel, state: SlotState, slots: Tensor, ids: Tensor, n_text: Tensor, text_eos: Tensor
) -> Tensor:
    """Conditioning rows [B, T + 2, D] of tokens ids [B, T], from the states in the slots' `hidden`.

    Shapes as `TTS.condition`.
    """
    hidden = state.hidden[slots, : ids.shape[1]]
    normalize = model.config.tts_config.normalize_projected_hidden
    rows, _ = model.tts.condition(ids, hidden, n_text, text_eos, normalize, model.backend)
    return rows


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
    """Append conditioning rows and draw each slot's first speech token [B]; shapes as `speech_loop.begin`."""
    assert state.speech is not None
    call = speech_loop.SpeechInputs(rows, n_rows, min_speech_tokens, limit)
    return speech_loop.begin(model.tts, model.backend, state.speech, slots, call, kv_len, draw)


def speech_step(
    model: OmniModel, state: SlotState, draw: SpeechSampler, slots: Tensor, kv_len: int, n_steps: int
) -> Tensor:
    """Append each slot's newest speech token and draw the next, `n_steps` times; slots that are done do not change.

    Args:
        kv_len: cache rows to read (static); holds the rows after the last step.
    Returns: [B] speech tokens drawn last.
    """
    assert state.speech is not None
    for _ in range(n_steps):
        drawn = speech_loop.step(model.tts, model.backend, state.speech, slots, kv_len, draw)
    return drawn


def llm_evict(model: OmniModel, state: SlotState, slots: Tensor, keep: Tensor, drop: Tensor, rotates: bool) -> None:
    """Drop LLM rows [keep, keep + drop) of each slot and close the gap; see `KVCache.evict`.

    Args:
        rotates: rotate the keys after the gap to the positions of their new places. Otherwise these keys and the next
            row keep their positions, and the caller moves the keys before the gap (`ContextMover`).
    """
    model.backend.evict(state.llm, slots, keep, drop, model.llm.model.frequencies, rotates)
    if not rotates:
        state.llm.positions.index_add_(0, slots, drop)


def reset(state: SlotState, slots: Tensor) -> None:
    """Empty slots."""
    state.reset(slots)
