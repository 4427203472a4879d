"""Speech tokens from conditioning rows: begin a call of the `tts` model and step it, over slots.

Contains the plain sampler. Does not contain text, units or sound.

The loop reads no speech token on the host: a slot that has drawn its end token, or as many tokens as it may, does not
change any more. The newest token is fed only when another one follows, so a slot's cache holds `n_sampled - 1` tokens
of a call.
"""

from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from models.layers.backend import Backend, SpeechSampler
from models.layers.speech_state import SPEECH_TOKENS_PER_CALL, SpeechState
from models.layers.tts import TTS
from models.sampling.speech import sample_speech_tokens


class SpeechInputs(NamedTuple):
    """Inputs of one call for each of B slots.

    rows: [B, T, D] conditioning rows. n_rows: [B] valid ones; 0 = no call for this slot, whose own call goes on.
    min_speech_tokens: [B] the end token is not drawn before this many. limit: [B] most tokens to draw.
    """

    rows: Tensor
    n_rows: Tensor
    min_speech_tokens: Tensor
    limit: Tensor


def begin(
    tts: TTS,
    backend: Backend,
    state: SpeechState,
    slots: Tensor,
    call: SpeechInputs,
    kv_len: int,
    draw: SpeechSampler | None = None,
) -> Tensor:
    """Feed conditioning rows and draw the first speech token of a call.

    Args:
        slots: [B] int64, distinct except for the scratch slot.
        kv_len: cache rows to attend to; static.
        draw: `draw_speech_tokens`, plain or compiled; a backend with its own sampler does not use it.
    Returns: [B] int64 tokens drawn; the end token for a slot without a call.
    """
    logits = tts.prefill(call.rows, state.cache, slots, call.n_rows, kv_len, backend)
    active = call.n_rows > 0
    state.sampler.begin_call(slots, call.min_speech_tokens, active)
    state.limit.index_copy_(0, slots, torch.where(active, call.limit, state.limit[slots]))
    state.bad.index_copy_(0, slots, state.bad[slots] & ~active)
    return backend.speech_sampler(draw or draw_speech_tokens)(state, slots, logits, active)


def step(
    tts: TTS, backend: Backend, state: SpeechState, slots: Tensor, kv_len: int, draw: SpeechSampler | None = None
) -> Tensor:
    """Feed the newest speech token of each slot [B] that is not done, and draw the next.

    Returns: [B] int64 tokens drawn.
    """
    rows, active, n_new = backend.speech_inputs(cast(nn.Embedding, tts.emb_code[0]), state, slots)
    logits = tts.decode(rows, state.cache, slots, n_new, kv_len, backend)
    return backend.speech_sampler(draw or draw_speech_tokens)(state, slots, logits, active)


def draw_speech_tokens(state: SpeechState, slots: Tensor, logits: Tensor, active: Tensor) -> Tensor:
    """Draw a speech token for each active slot and record it in the slot's call.

    Args:
        slots: [B] int64, distinct except for the scratch slot.
        logits: [B, speech tokens] of any float type.
        active: [B] bool.
    Returns: [B] int64; the end token for a slot that is not active.
    """
    place = state.sampler.step[slots].clamp(max=SPEECH_TOKENS_PER_CALL - 1)
    drawn, bad, _ = sample_speech_tokens(logits.float(), slots, active, state.sampler)
    kept = active & ~bad
    state.speech_tokens[slots, place] = torch.where(kept, drawn, state.speech_tokens[slots, place])
    state.newest.index_copy_(0, slots, torch.where(kept, drawn, state.newest[slots]))
    ended = drawn == state.sampler.eos_id[slots]
    state.bad.index_copy_(0, slots, state.bad[slots] | bad)
    over = ended | bad | (state.sampler.step[slots] >= state.limit[slots])
    state.done.index_copy_(0, slots, torch.where(active, over, state.done[slots]))
    return drawn
