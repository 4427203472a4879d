"""The Triton implementation of a model's backend: packed weights, fused layers, pinned embeddings, sampler kernels.

Contains no kernels itself. Requires Triton.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from models.kernels.fused_decoder import CopiedWeight, FusedDecoder, linear, with_copy
from models.kernels.fused_encoders import FusedAudio, FusedVision
from models.kernels.lookup import PinnedEmbedding, newest_rows, store_rows, table_rows
from models.kernels.moved_rows import close_gaps, restore_keys
from models.kernels.samplers.speech_sampler import draw_speech_tokens
from models.kernels.samplers.text_sampler import choose_tokens
from models.layers.apm import Apm
from models.layers.backend import AudioStack, Backend, DecoderStack, OutputHead, SpeechSampler, TextSampler, VisionStack
from models.layers.kv_cache import CacheView, KVCache
from models.layers.speech_state import SpeechState
from models.layers.transformer import LayerStack
from models.layers.vpm import Vpm


class TritonBackend(Backend):
    """The project's kernels for the decoder stacks and encoders of one model.

    Weights of linear layers with one input are packed into one tensor; the layers keep views of it. Text embeddings
    move to pinned CPU memory: of 1.5 GB, a step reads a few rows.
    """

    needs_mask = False

    def __init__(
        self, parts: nn.Module, embeddings: list[nn.Embedding], *, copied: Sequence[LayerStack | nn.Linear] = ()
    ):
        """
        Args:
            parts: module that contains every `LayerStack`, `Vpm` and `Apm` to run.
            embeddings: text embeddings to move to pinned memory.
            copied: stacks and output heads whose products of few rows read copies of the weights in 12 bits.
        Raises: any error of the device; the embeddings are on their device again then.
        """
        self._decoders: dict[DecoderStack, FusedDecoder] = {}
        self._heads: dict[OutputHead, CopiedWeight] = {}
        self._vision: dict[VisionStack, FusedVision] = {}
        self._audio: dict[AudioStack, FusedAudio] = {}
        with torch.no_grad(), _all_or_none() as pinned:
            for part in parts.modules():
                if isinstance(part, LayerStack):
                    self._decoders[part] = FusedDecoder(part, copied=part in copied)
                elif isinstance(part, Vpm):
                    self._vision[part] = FusedVision(part)
                elif isinstance(part, Apm):
                    self._audio[part] = FusedAudio(part)
            for head in copied:
                if isinstance(head, nn.Linear) and isinstance(weight := with_copy(head.weight), CopiedWeight):
                    self._heads[head] = weight
            for embedding in embeddings:
                pinned.append(PinnedEmbedding(embedding))
        self._pinned = pinned
        self.has_copies = bool(self._heads) or any(decoder.has_copies for decoder in self._decoders.values())

    def decoder_layers(
        self, stack: DecoderStack, embeds: Tensor, cache: KVCache, slots: Tensor, n_new: Tensor, kv_len: int
    ) -> Tensor:
        return self._decoders[stack](embeds, cache, slots, n_new, kv_len)

    def vision_layers(self, vpm: VisionStack, x: Tensor, mask: Tensor) -> Tensor:
        return self._vision[vpm](x, mask)

    def audio_layers(self, apm: AudioStack, x: Tensor, view: CacheView, cache: KVCache) -> Tensor:
        return self._audio[apm](x, view, cache)

    def embed(self, embedding: nn.Embedding, ids: Tensor) -> Tensor:
        return table_rows(embedding.weight, ids)

    def linear(self, x: Tensor, head: OutputHead) -> Tensor:
        return linear(x, self._heads.get(head, head.weight))

    def text_sampler(self, eager: TextSampler) -> TextSampler:
        return choose_tokens

    def speech_sampler(self, eager: SpeechSampler) -> SpeechSampler:
        return draw_speech_tokens

    def speech_inputs(
        self, embedding: nn.Embedding, state: SpeechState, slots: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        return newest_rows(embedding.weight, slots, state.newest, state.done)

    def keep_hidden(self, kept: Tensor, slots: Tensor, places: Tensor, active: Tensor, hidden: Tensor) -> None:
        store_rows(kept, slots, places, active, hidden)

    def evict(
        self, cache: KVCache, slots: Tensor, keep: Tensor, drop: Tensor, frequencies: Tensor, rotates: bool
    ) -> None:
        if rotates:  # slots that are not held, such as those of sessions with `compat: "reference"`
            cache.evict(slots, keep, drop, frequencies)
        else:
            close_gaps(cache, slots, keep, drop)

    def restore_keys(self, cache: KVCache, slot: int, keys: Tensor, n: int, by: int, frequencies: Tensor) -> None:
        restore_keys(cache, slot, keys, n, by, frequencies)

    def release(self) -> None:
        """Move the embeddings back to their device. Packed weights stay: the layers are views of them."""
        for table in self._pinned:
            table.restore()


@contextmanager
def _all_or_none() -> Iterator[list[PinnedEmbedding]]:
    """A list to append to; after an error inside, each of its entries is moved back."""
    pinned: list[PinnedEmbedding] = []
    try:
        yield pinned
    except BaseException:
        for table in pinned:
            table.restore()
        raise
