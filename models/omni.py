"""The whole model: the only file that knows all parts. Weights only; what a session owns is in `state`."""

from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import Tensor, nn

from models.checkpoint.config import OmniConfig
from models.errors import SettingsError
from models.inputs.image import pixel_values
from models.layers.apm import Apm, project
from models.layers.kv_cache import KVCache
from models.layers.llm import LLM
from models.layers.resampler import Resampler
from models.layers.transformer import Backbone, Projector
from models.layers.tts import TTS
from models.layers.vpm import Vpm


class OmniModel(nn.Module):
    """Parts under the checkpoint's names; parts the config switches off are absent.

    Build under `weights.on_meta`, assign weights, then call `derive` on every `Derived` module;
    `load.load_model` does all three.
    """

    def __init__(self, config: OmniConfig):
        super().__init__()
        self.config = config
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
        self.choose: Callable[..., Tensor] | None = None  # what takes the place of `regions.choose`

    @property
    def device(self) -> torch.device:
        return self.llm.lm_head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.llm.lm_head.weight.dtype

    @property
    def kernels(self) -> bool:
        """Whether the parts' layers run by the project's own GPU kernels."""
        return self.llm.model.fused is not None

    def use_kernels(self, on: bool) -> None:
        """Run the layers by the project's own GPU kernels, or as they are written. Graphs captured before are void.

        Weights of parallel products are laid side by side; every layer keeps its own as views of them.
        While kernels run, embeddings of text lie in the host's memory: of one and a half GB a step reads a few rows.
        Raises: SettingsError where there is no Triton. Whatever the device raises: nothing has changed then.
        """
        if on == self.kernels:
            return
        if not on:
            for part in self._stacks():
                part.fused = None
            for part in self._readers():
                if part.table is not None:
                    part.table.give_back()
                part.table = None
            self.choose = None
            if self.config.init_tts:
                self.tts.draw = None
            return
        if find_spec("triton") is None:
            raise SettingsError("kernels", expected="Triton, which comes with the GPU builds of torch", got="none")
        # Only here: they cannot be imported without.
        from models.kernels.fused_decoder import FusedDecoder
        from models.kernels.fused_encoders import FusedAudio, FusedVision
        from models.kernels.pinned_embedding import PinnedEmbedding
        from models.kernels.speech_sampler import draw_speech_tokens
        from models.kernels.text_sampler import choose_tokens

        kinds = {Backbone: FusedDecoder, Vpm: FusedVision, Apm: FusedAudio}
        tables: dict[Backbone | TTS, PinnedEmbedding] = {}
        try:
            with torch.no_grad():
                fused = {part: kinds[type(part)](part) for part in self._stacks()}
                for part, embedding in self._readers().items():
                    tables[part] = PinnedEmbedding(embedding)
        except BaseException:  # all or nothing
            for table in tables.values():
                table.give_back()
            raise
        for part, layers in fused.items():
            part.fused = layers
        for part, table in tables.items():
            part.table = table
        self.choose = choose_tokens
        if self.config.init_tts:
            self.tts.draw = draw_speech_tokens
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # what the weights leave behind is as large as they are

    def _stacks(self) -> list[Backbone | Vpm | Apm]:
        return [part for part in self.modules() if isinstance(part, Backbone | Vpm | Apm)]

    def _readers(self) -> dict[Backbone | TTS, nn.Embedding]:
        """Parts that read text, and their embeddings."""
        readers: dict[Backbone | TTS, nn.Embedding] = {self.llm.model: self.llm.model.embed_tokens}
        if self.config.init_tts:
            readers |= {self.tts: self.tts.emb_text, self.tts.model: self.tts.model.embed_tokens}
        return readers

    def encode_images(self, pixels: Tensor, position_ids: Tensor, coords: Tensor, mask: Tensor) -> Tensor:
        """Image slices to LLM rows.

        Args:
            pixels: [B, L, 588] uint8 patches, rows ordered (channel, y, x).
            position_ids: [B, L]; coords: [B, L, 2] (row, column); mask: [B, L] bool.
        Returns: [B, query_num, D].
        """
        patches = pixel_values(pixels.float()).to(self.dtype)
        return self.resampler(self.vpm(patches, position_ids, mask), coords, mask)

    def encode_unit(
        self, mel: Tensor, first: Tensor, end: Tensor, cache: KVCache, slots: Tensor
    ) -> tuple[Tensor, Tensor]:
        """One unit of sound per slot to LLM rows; shapes as `Apm.stream`.

        Returns: [B, 10, D] and [B] how many rows are valid.
        """
        hidden, n_rows = self.apm.stream(mel.to(self.dtype), first, end, cache, slots)
        pool = self.config.audio_pool_step
        return project(self.audio_projection_layer, hidden, pool), n_rows // pool

    def encode_clips(self, mel: Tensor, n_frames: Tensor, n_keys: Tensor, chunk: int) -> Tensor:
        """Whole clips to LLM rows; shapes as `Apm.encode`. Returns: [B, rows // 5, D]."""
        hidden = self.apm.encode(mel.to(self.dtype), n_frames, n_keys, chunk)
        return project(self.audio_projection_layer, hidden, self.config.audio_pool_step)
