"""The interface through which a model runs its layers, embeddings and samplers, and its PyTorch implementation.

`models.kernels.backend.TritonBackend` is the other implementation. `OmniModel` holds the backend and passes it to every
call; the layers do not choose one.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.layers.kv_cache import CacheView, KVCache
from models.layers.rotary import rotary_angles
from models.sampling.text import SamplerState, TokenSets

if TYPE_CHECKING:
    from models.layers.apm import Apm
    from models.layers.speech_loop import SpeechState
    from models.layers.transformer import Backbone
    from models.layers.vpm import Vpm

# (sampler state, token sets, slots, logits, fed, wants) -> [3, B]; see `models.stages.regions.choose`.
TextSampler = Callable[[SamplerState, TokenSets, Tensor, Tensor, Tensor, Tensor], Tensor]
# (speech state, slots, logits, active) -> [B]; see `models.layers.speech_loop.draw_speech_tokens`.
SpeechSampler = Callable[["SpeechState", Tensor, Tensor, Tensor], Tensor]


class Backend(ABC):
    """How one model computes. All implementations have the same shapes and effects, and agree to rounding.

    needs_mask: `audio_layers` takes a view with a mask; otherwise a view with its first and last rows.
    """

    needs_mask: ClassVar[bool]

    @abstractmethod
    def decoder_layers(
        self, stack: "Backbone", embeds: Tensor, cache: KVCache, slots: Tensor, n_new: Tensor, kv_len: int
    ) -> Tensor:
        """Run a decoder stack; shapes and effects as `Backbone.forward`."""

    @abstractmethod
    def vision_layers(self, vpm: "Vpm", x: Tensor, mask: Tensor) -> Tensor:
        """Run the layers and the final norm of `vpm`.

        Args:
            x: [B, L, D] embedded patches.
            mask: [B, L] bool, true for real patches, which come first.
        Returns: [B, L, D]; padding rows are meaningless.
        """

    @abstractmethod
    def audio_layers(self, apm: "Apm", x: Tensor, view: CacheView, cache: KVCache) -> Tensor:
        """Run the layers and the final norm of `apm` over its slot cache; writes rows, does not advance the cache.

        Args:
            x: [B, T, D] convolved rows with positions added.
            view: where the rows go; made with `masked=needs_mask`.
        Returns: [B, T, D].
        """

    @abstractmethod
    def embed(self, embedding: nn.Embedding, ids: Tensor) -> Tensor:
        """Rows [..., D] of a text embedding for ids [...] int64."""

    @abstractmethod
    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [..., K] times weight [N, K]; for output heads. Returns: [..., N]."""

    @abstractmethod
    def text_sampler(self, eager: TextSampler) -> TextSampler:
        """The function that chooses text tokens. eager: the PyTorch one, plain or compiled."""

    @abstractmethod
    def speech_sampler(self, eager: SpeechSampler) -> SpeechSampler:
        """The function that draws speech tokens. eager: the PyTorch one, plain or compiled."""

    @abstractmethod
    def release(self) -> None:
        """Undo what the backend changed in the model's weights. It must not run afterwards."""


class TorchBackend(Backend):
    """PyTorch operations; the layers of each stack may be compiled."""

    needs_mask = True

    def decoder_layers(
        self, stack: "Backbone", embeds: Tensor, cache: KVCache, slots: Tensor, n_new: Tensor, kv_len: int
    ) -> Tensor:
        view = cache.view(slots, n_new, embeds.shape[1], kv_len)
        cos, sin = (part.unsqueeze(2) for part in rotary_angles(view.positions, stack.frequencies))  # for all heads
        x = embeds
        for layer, k_cache, v_cache in zip(stack.layers, cache.k, cache.v, strict=True):
            x = layer(x, cos, sin, view, k_cache, v_cache)
        cache.advance(slots, n_new)
        return stack.norm(x)

    def vision_layers(self, vpm: "Vpm", x: Tensor, mask: Tensor) -> Tensor:
        # A large negative number instead of -inf keeps a row without any patch finite.
        bias = torch.zeros_like(mask, dtype=x.dtype).masked_fill(~mask, torch.finfo(x.dtype).min)[:, None]
        for layer in vpm.encoder.layers:
            x = layer(x, bias)
        return vpm.post_layernorm(x)

    def audio_layers(self, apm: "Apm", x: Tensor, view: CacheView, cache: KVCache) -> Tensor:
        return apm.layer_norm(apm.stream_layers(x, view, cache))

    def embed(self, embedding: nn.Embedding, ids: Tensor) -> Tensor:
        return embedding(ids)

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight)

    def text_sampler(self, eager: TextSampler) -> TextSampler:
        return eager

    def speech_sampler(self, eager: SpeechSampler) -> SpeechSampler:
        return eager

    def release(self) -> None:
        """There is nothing to undo."""


TORCH = TorchBackend()
