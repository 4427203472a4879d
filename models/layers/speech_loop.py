"""Speech codes from conditioning rows: the code loop over slots, and the three ways of speaking.

Knows when a call to the code model begins, steps and ends. Does not know text, units or sound.

The loop never looks at a code on the host: a slot that drew its end, or its last allowed code, stands still.
The newest code is fed only when another follows it, so a slot's cache holds `n_sampled - 1` codes of a call.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from models.layers.kv_cache import KVCache
from models.layers.tts import TTS
from models.sampling.speech import SpeechSamplerState, sample_speech_tokens

Drawer = Callable[..., Tensor]  # `draw_speech_tokens`, or the same compiled by itself

SPEECH_TOKENS_PER_CALL = 2048  # most codes one call may draw (82 s of speech)


@dataclass
class SpeechState:
    """Per slot, row n_slots being scratch.

    cache    keys and values of the code model
    sampler  settings, recent codes, random numbers, and how many codes the current call has drawn
    codes    [S + 1, 2048] int64  codes drawn by the current call, the end code included
    newest   [S + 1] int64  code drawn last
    limit    [S + 1] int64  most codes the current call may draw, the end code counted
    done     [S + 1] bool   the current call is over
    bad      [S + 1] bool   it is over because its logits were NaN or infinite
    """

    cache: KVCache
    sampler: SpeechSamplerState
    speech_tokens: Tensor
    newest: Tensor
    limit: Tensor
    done: Tensor
    bad: Tensor

    @classmethod
    def allocate(cls, cache: KVCache) -> "SpeechState":
        device, rows = cache.lengths.device, cache.n_slots + 1
        return cls(
            cache=cache,
            sampler=SpeechSamplerState.allocate(cache.n_slots, device=device),
            speech_tokens=torch.zeros(rows, SPEECH_TOKENS_PER_CALL, dtype=torch.int64, device=device),
            newest=torch.zeros(rows, dtype=torch.int64, device=device),
            limit=torch.zeros(rows, dtype=torch.int64, device=device),
            done=torch.ones(rows, dtype=torch.bool, device=device),
            bad=torch.zeros(rows, dtype=torch.bool, device=device),
        )

    def reset(self, slots: Tensor) -> None:
        self.cache.reset(slots)
        self.sampler.reset(slots)
        for tensor in (self.speech_tokens, self.newest, self.limit):
            tensor.index_fill_(0, slots, 0)
        self.done.index_fill_(0, slots, True)
        self.bad.index_fill_(0, slots, False)


def begin(
    tts: TTS,
    state: SpeechState,
    slots: Tensor,
    rows: Tensor,
    n_rows: Tensor,
    min_speech_tokens: Tensor,
    limit: Tensor,
    kv_len: int,
    draw: Drawer | None = None,
) -> Tensor:
    """Feed conditioning rows and draw the first code of a call.

    Args:
        rows: [B, T, D], n_rows [B] of them valid; 0 for a slot that sits out, whose own call is not disturbed.
        min_codes: [B] the end code is out of reach before this many. limit: [B] most codes to draw.
        draw: what takes the place of `draw_speech_tokens`.
    Returns: [B] int64 codes drawn; the end code for a slot that sits out.
    """
    logits = tts.prefill(rows, state.cache, slots, n_rows, kv_len)
    active = n_rows > 0
    state.sampler.begin_call(slots, min_speech_tokens, active)
    state.limit.index_copy_(0, slots, torch.where(active, limit, state.limit[slots]))
    state.bad.index_copy_(0, slots, state.bad[slots] & ~active)
    return (tts.draw or draw or draw_speech_tokens)(state, slots, logits, active)


def step(tts: TTS, state: SpeechState, slots: Tensor, kv_len: int, draw: Drawer | None = None) -> Tensor:
    """Feed the newest code of each slot [B] that is not done and draw the next. Returns: [B] int64 codes drawn."""
    active = ~state.done[slots]
    logits = tts.decode(state.newest[slots], state.cache, slots, active, kv_len)
    return (tts.draw or draw or draw_speech_tokens)(state, slots, logits, active)


def draw_speech_tokens(state: SpeechState, slots: Tensor, logits: Tensor, active: Tensor) -> Tensor:
    """Choose a code for each active slot from logits [B, codes] and count it in its call. Returns: [B] int64."""
    place = state.sampler.step[slots].clamp(max=SPEECH_TOKENS_PER_CALL - 1)
    drawn, bad, _ = sample_speech_tokens(logits, slots, active, state.sampler)
    kept = active & ~bad
    state.speech_tokens[slots, place] = torch.where(kept, drawn, state.speech_tokens[slots, place])
    state.newest.index_copy_(0, slots, torch.where(kept, drawn, state.newest[slots]))
    ended = drawn == state.sampler.eos_id[slots]
    state.bad.index_copy_(0, slots, state.bad[slots] | bad)
    over = ended | bad | (state.sampler.step[slots] >= state.limit[slots])
    state.done.index_copy_(0, slots, torch.where(active, over, state.done[slots]))
    return drawn
