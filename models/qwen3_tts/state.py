"""State of every slot of the language models, in preallocated tensors. Does not contain the regions (`regions`)."""

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from models.layers.kv_cache import KVCache
from models.qwen3_tts.code_predictor import PASS_ROWS
from models.qwen3_tts.settings import FrameSampling
from models.qwen3_tts.talker import Talker
from models.sampling.settings import signed_seed

GROUPS = 16  # codes of a frame
FIRST, REST = 0, 1  # columns of the sampling settings: the talker's code, the code predictor's
TEXT_RING = 1024  # text tokens that wait for their frames
_RELEASED = FrameSampling()  # both kinds of codes have the same settings


@dataclass
class TalkerState:
    """State per slot; row n_slots is the scratch slot of padding rows.

    cache, predictor_cache   keys and values; the predictor's start over in each frame
    hidden       [S + 1, D]  talker's state after the newest row
    row          [S + 1, D]  sum of the rows of the newest frame's codes
    frames       [S + 1] int64  frames drawn
    limit        [S + 1] int64  most frames to draw
    seen         [S + 1, V] bool  first codes drawn
    done         [S + 1] bool  no more frames: ended, at its limit, or without a request
    text         [S + 1, 1024] int64  ring of text tokens to feed with the frames; number n is at n % 1024
    text_len     [S + 1] int64  text tokens written
    text_open    [S + 1] bool  more follow: a slot without text for its next row waits
    seed         [S + 1] int64  all 64 bits
    Settings of sampling: greedy, temperature, top_k, top_p [S + 1, 2]; repetition_penalty [S + 1].
    """

    cache: KVCache
    predictor_cache: KVCache
    hidden: Tensor
    row: Tensor
    frames: Tensor
    limit: Tensor
    seen: Tensor
    done: Tensor
    text: Tensor
    text_len: Tensor
    text_open: Tensor
    seed: Tensor
    greedy: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    repetition_penalty: Tensor

    @classmethod
    def allocate(cls, talker: Talker, n_slots: int, max_len: int) -> "TalkerState":
        """The state of `n_slots` slots of `max_len` rows each, on the talker's device, in its dtype."""
        weight, config = talker.codec_head.weight, talker.config
        predictor = config.code_predictor_config

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(n_slots + 1, *shape, dtype=dtype, device=weight.device)

        def cache(n_layers: int, rows: int, kv_heads: int, head_dim: int) -> KVCache:
            return KVCache(
                n_layers=n_layers,
                n_slots=n_slots,
                max_len=rows,
                kv_heads=kv_heads,
                head_dim=head_dim,
                dtype=weight.dtype,
                device=weight.device,
                spare=1,
            )

        state = cls(
            cache=cache(config.num_hidden_layers, max_len, config.num_key_value_heads, config.head_dim),
            predictor_cache=cache(
                predictor.num_hidden_layers, PASS_ROWS, predictor.num_key_value_heads, predictor.head_dim
            ),
            hidden=zeros(config.hidden_size, dtype=weight.dtype),
            row=zeros(config.hidden_size, dtype=weight.dtype),
            frames=zeros(),
            limit=zeros(),
            seen=zeros(config.vocab_size, dtype=torch.bool),
            done=zeros(dtype=torch.bool),
            text=zeros(TEXT_RING),
            text_len=zeros(),
            text_open=zeros(dtype=torch.bool),
            seed=zeros(),
            greedy=zeros(2, dtype=torch.bool),
            temperature=zeros(2, dtype=torch.float32),
            top_k=zeros(2),
            top_p=zeros(2, dtype=torch.float32),
            repetition_penalty=zeros(dtype=torch.float32),
        )
        state.reset(torch.arange(n_slots + 1, device=weight.device))
        return state

    @property
    def scratch(self) -> int:
        """Number of the scratch slot."""
        return self.cache.scratch

    def reset(self, slots: Tensor) -> None:
        """Set slots [N] to the state after allocation: no rows, no request, released sampling, seed 0."""
        self.cache.reset(slots)
        self.predictor_cache.reset(slots)
        for one in fields(self):
            tensor = getattr(self, one.name)
            if isinstance(tensor, Tensor):
                tensor.index_fill_(0, slots, 0)
        self.done.index_fill_(0, slots, True)
        self.temperature.index_fill_(0, slots, _RELEASED.first.temperature)
        self.top_k.index_fill_(0, slots, _RELEASED.first.top_k)
        self.top_p.index_fill_(0, slots, _RELEASED.first.top_p)
        self.repetition_penalty.index_fill_(0, slots, _RELEASED.repetition_penalty)

    def configure(self, slot: int, sampling: FrameSampling, seed: int, limit: int) -> None:
        """Write the settings of one slot. Raises: SettingsError for a seed out of range; nothing is written then."""
        self.seed[slot] = signed_seed(seed)
        self.limit[slot] = limit
        for which, codes in ((FIRST, sampling.first), (REST, sampling.rest)):
            self.greedy[slot, which] = codes.greedy
            self.temperature[slot, which] = codes.temperature
            self.top_k[slot, which] = codes.top_k
            self.top_p[slot, which] = codes.top_p
        self.repetition_penalty[slot] = sampling.repetition_penalty


# (scores, slots, state, draws, which, candidates) -> codes; see `draws.draw_codes`.
DrawCodes = Callable[[Tensor, Tensor, TalkerState, Tensor, int, int | None], Tensor]
