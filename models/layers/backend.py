"""The interface through which a model runs its layers, embeddings and samplers, and its PyTorch implementation.

`models.kernels.backend.TritonBackend` is the other implementation. `OmniModel` holds the backend and passes it to every
call; the layers do not choose one.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from models.checkpoint.quantized import QuantizedMatrix
from models.layers.kv_cache import CacheView, KVCache
from models.layers.speech_state import SpeechState
from models.sampling.text import SamplerState, TokenSets

# (sampler state, token sets, slots, logits, fed, sample) -> [3, B]; see `models.stages.regions.choose`.
TextSampler = Callable[[SamplerState, TokenSets, Tensor, Tensor, Tensor, Tensor], Tensor]
# (speech state, slots, logits, active) -> [B]; see `models.layers.speech_loop.draw_speech_tokens`.
SpeechSampler = Callable[[SpeechState, Tensor, Tensor, Tensor], Tensor]


class DecoderStack(Protocol):
    """`LayerStack`, as a backend uses it."""

    def run_layers(self, embeds: Tensor, cache: KVCache, slots: Tensor, n_new: Tensor, kv_len: int) -> Tensor:
        """`Backend.decoder_layers` in PyTorch operations."""


class VisionStack(Protocol):
    """`Vpm`, as a backend uses it."""

    def run_layers(self, x: Tensor, mask: Tensor) -> Tensor:
        """`Backend.vision_layers` in PyTorch operations."""


class AudioStack(Protocol):
    """`Apm`, as a backend uses it."""

    def run_layers(self, x: Tensor, view: CacheView, cache: KVCache) -> Tensor:
        """`Backend.audio_layers` in PyTorch operations."""


class OutputHead(Protocol):
    """A linear layer without a bias, as a backend uses it."""

    @property
    def weight(self) -> Tensor | QuantizedMatrix: ...

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., K] times the weight."""


class Backend(ABC):
    """How one model computes. All implementations have the same shapes and effects, and agree to rounding.

    needs_mask: `audio_layers` takes a view with a mask; otherwise a view with its first and last rows.
    has_copies: products of few rows read copies of some weights.
    """

    needs_mask: ClassVar[bool]
    has_copies: bool = False

    @abstractmethod
    def decoder_layers(
        self, stack: DecoderStack, embeds: Tensor, cache: KVCache, slots: Tensor, n_new: Tensor, kv_len: int
    ) -> Tensor:
        """Run a decoder stack; shapes and effects as `LayerStack.forward`."""

    @abstractmethod
    def vision_layers(self, vpm: VisionStack, x: Tensor, mask: Tensor) -> Tensor:
        """Run the layers and the final norm of `vpm`.

        Args:
            x: [B, L, D] embedded patches.
            mask: [B, L] bool, true for real patches, which come first.
        Returns: [B, L, D]; padding rows are meaningless.
        """

    @abstractmethod
    def audio_layers(self, apm: AudioStack, x: Tensor, view: CacheView, cache: KVCache) -> Tensor:
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
    def linear(self, x: Tensor, head: OutputHead) -> Tensor:
        """x [..., K] times the head's weight [N, K]. Returns: [..., N]."""

    @abstractmethod
    def text_sampler(self, eager: TextSampler) -> TextSampler:
        """The function that chooses text tokens. eager: the PyTorch one, plain or compiled."""

    @abstractmethod
    def speech_sampler(self, eager: SpeechSampler) -> SpeechSampler:
        """The function that draws speech tokens. eager: the PyTorch one, plain or compiled."""

    @abstractmethod
    def speech_inputs(
        self, embedding: nn.Embedding, state: SpeechState, slots: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What a step of the speech model feeds for slots [B].

        Returns: rows [B, 1, D] of the newest tokens; whether each call goes on, [B] as bool and as int64.
        """

    @abstractmethod
    def keep_hidden(self, kept: Tensor, slots: Tensor, places: Tensor, active: Tensor, hidden: Tensor) -> None:
        """Write states hidden [B, D] to `kept` [S + 1, P, D] at `places` [B], -1 for none, of active slots [B].

        The content of the last slot, the scratch slot, is undefined afterwards.
        """

    @abstractmethod
    def evict(
        self, cache: KVCache, slots: Tensor, keep: Tensor, drop: Tensor, frequencies: Tensor, rotates: bool
    ) -> None:
        """Drop rows of slots and close the gaps; as `KVCache.evict`."""

    @abstractmethod
    def restore_keys(self, cache: KVCache, slot: int, keys: Tensor, n: int, by: int, frequencies: Tensor) -> None:
        """Write saved keys to a slot's first rows, rotated; as `KVCache.restore_keys`."""

    @abstractmethod
    def release(self) -> None:
        """Undo what the backend changed in the model's weights. It must not run afterwards."""


class TorchBackend(Backend):
    """PyTorch operations; the layers of each stack may be compiled."""

    needs_mask = True

    def decoder_layers(
        self, stack: DecoderStack, embeds: Tensor, cache: KVCache, slots: Tensor, n_new: Tensor, kv_len: int
    ) -> Tensor:
        return stack.run_layers(embeds, cache, slots, n_new, kv_len)

    def vision_layers(self, vpm: VisionStack, x: Tensor, mask: Tensor) -> Tensor:
        return vpm.run_layers(x, mask)

    def audio_layers(self, apm: AudioStack, x: Tensor, view: CacheView, cache: KVCache) -> Tensor:
        return apm.run_layers(x, view, cache)

    def embed(self, embedding: nn.Embedding, ids: Tensor) -> Tensor:
        return embedding(ids)

    def linear(self, x: Tensor, head: OutputHead) -> Tensor:
        return head(x)

    def text_sampler(self, eager: TextSampler) -> TextSampler:
        return eager

    def speech_sampler(self, eager: SpeechSampler) -> SpeechSampler:
        return eager

    def speech_inputs(
        self, embedding: nn.Embedding, state: SpeechState, slots: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        active = ~state.done[slots]
        return embedding(state.newest[slots][:, None]), active, active.long()

    def keep_hidden(self, kept: Tensor, slots: Tensor, places: Tensor, active: Tensor, hidden: Tensor) -> None:
        has_place = active & (places >= 0)
        kept[torch.where(has_place, slots, len(kept) - 1), places.clamp(min=0)] = hidden

    def evict(
        self, cache: KVCache, slots: Tensor, keep: Tensor, drop: Tensor, frequencies: Tensor, rotates: bool
    ) -> None:
        cache.evict(slots, keep, drop, frequencies, rotates)

    def restore_keys(self, cache: KVCache, slot: int, keys: Tensor, n: int, by: int, frequencies: Tensor) -> None:
        cache.restore_keys(slot, keys, n, by, frequencies)

    def release(self) -> None:
        """There is nothing to undo."""


TORCH = TorchBackend()
