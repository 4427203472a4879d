"""State of the `tts` model's current call, per slot. Does not contain the loop that advances it (`speech_loop`)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from models.layers.kv_cache import KVCache
from models.sampling.speech import SpeechSamplerState

SPEECH_TOKENS_PER_CALL = 2048  # limit of one call (82 s of speech)


@dataclass
class SpeechState:
    """State per slot; row n_slots is the scratch slot.

    cache          keys and values of the `tts` model
    sampler        settings, recent speech tokens, random numbers, and how many tokens the current call has drawn
    speech_tokens  [S + 1, 2048] int64  tokens drawn by the current call, the end token included
    newest         [S + 1] int64  token drawn last
    limit          [S + 1] int64  most tokens the current call may draw, the end token counted
    done           [S + 1] bool   the current call is over
    bad            [S + 1] bool   it is over because its logits were NaN or infinite
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
