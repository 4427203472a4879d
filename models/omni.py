"""The whole model: the one module that contains all parts, and selects the backend that runs them.

Contains weights only; the state of sessions is in `models.stages.state`.
"""

import logging
from importlib.util import find_spec

import torch
from torch import Tensor, nn

from models.checkpoint.config import OmniConfig
from models.errors import SettingsError
from models.inputs.image import pixel_values
from models.layers.apm import Apm, project
from models.layers.backend import TORCH, Backend, TorchBackend
from models.layers.kv_cache import KVCache
from models.layers.llm import LLM
from models.layers.resampler import Resampler
from models.layers.transformer import Projector
from models.layers.tts import TTS
from models.layers.vpm import Vpm

LOG = logging.getLogger(__name__)


class OmniModel(nn.Module):
    """Parts under the checkpoint's names; parts that the config switches off are absent.

    Build it under `weights.on_meta`, assign weights, then call `derive` on every `Derived` module;
    `load.load_model` does all three.

    backend: runs layers, text embeddings, output heads and samplers; regions pass it to every call.
    decode_copy: with kernels, products of few rows of the language model read copies of its weights in 12 bits, if
        there is memory for them.
    """

    def __init__(self, config: OmniConfig):
        super().__init__()
        self.config = config
        self.backend: Backend = TORCH
        self.decode_copy = False
        self.llm = LLM(config)
        if config.init_vision:
            self.vpm = Vpm(config.vision_config, config.drop_vision_last_layer)
            self.resampler = Resampler(
                config.vision_config.hidden_size, config.hidden_size, config.query_num, config.resampler_heads
            )
        if config.init_audio:
            self.apm = Apm(config.audio_config)
            # Upstream derives the projector's input width from the feed-forward width.
            self.audio_projection_layer = Projector(config.audio_config.encoder_ffn_dim // 4, config.hidden_size)
        if config.init_tts:
            self.tts = TTS(config.tts_config)

    @property
    def device(self) -> torch.device:
        return self.llm.model.norm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.llm.model.norm.weight.dtype

    @property
    def kernels(self) -> bool:
        """Whether the backend runs the project's own GPU kernels."""
        return not isinstance(self.backend, TorchBackend)

    @property
    def has_decode_copy(self) -> bool:
        """Whether the backend holds copies of weights: it has none of quantised ones."""
        return self.backend.has_copies

    def use_kernels(self, on: bool) -> None:
        """Select the backend: the project's GPU kernels, or PyTorch. Graphs captured before become invalid.

        With kernels, weights of linear layers with one input are packed; each layer keeps a view of its own. Text
        embeddings are in pinned CPU memory: of 1.5 GB, a step reads a few rows.

        Raises: SettingsError without Triton; any error of the device, after which nothing has changed.
        """
        if on == self.kernels:
            return
        if not on:
            self.backend.release()
            self.backend = TORCH
            return
        if find_spec("triton") is None:
            raise SettingsError("kernels", expected="Triton, which comes with the GPU builds of torch", got="none")
        from models.kernels.backend import TritonBackend  # here, because it imports Triton

        backend = None
        if self.decode_copy:
            try:
                backend = TritonBackend(self, self._text_embeddings(), copied=(self.llm.model, self.llm.lm_head))
            except torch.OutOfMemoryError as error:
                LOG.warning("no copy of the language model's weights: %s", error)
        # After the handler, which has freed the copies that were made.
        self.backend = backend or TritonBackend(self, self._text_embeddings())
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # packing and moving free as much memory as the weights take

    def _text_embeddings(self) -> list[nn.Embedding]:
        embeddings = [self.llm.model.embed_tokens]
        if self.config.init_tts:
            embeddings += [self.tts.emb_text, self.tts.model.embed_tokens]
        return embeddings

    def encode_images(self, pixels: Tensor, position_ids: Tensor, coords: Tensor, mask: Tensor) -> Tensor:
        """Image slices to LLM rows.

        Args:
            pixels: [B, L, 588] uint8 patches, rows ordered (channel, y, x).
            position_ids: [B, L] int64.
            coords: [B, L, 2] int64 (row, column).
            mask: [B, L] bool, true for real patches.
        Returns: [B, query_num, D].
        """
        patches = pixel_values(pixels.float()).to(self.dtype)
        return self.resampler(self.vpm(patches, position_ids, mask, self.backend), coords, mask)

    def encode_unit(
        self, mel: Tensor, first: Tensor, end: Tensor, cache: KVCache, slots: Tensor
    ) -> tuple[Tensor, Tensor]:
        """One unit of sound per slot to LLM rows; shapes as `Apm.stream`.

        Returns: rows [B, 10, D], and [B] how many of them are valid.
        """
        hidden, n_rows = self.apm.stream(mel.to(self.dtype), first, end, cache, slots, self.backend)
        pool = self.config.audio_pool_step
        return project(self.audio_projection_layer, hidden, pool), n_rows // pool

    def encode_clips(self, mel: Tensor, n_frames: Tensor, n_keys: Tensor, chunk: int) -> Tensor:
        """Whole clips to LLM rows; shapes as `Apm.encode`. Returns: [B, rows // 5, D]."""
        hidden = self.apm.encode(mel.to(self.dtype), n_frames, n_keys, chunk)
        return project(self.audio_projection_layer, hidden, self.config.audio_pool_step)
