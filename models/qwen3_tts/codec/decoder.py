"""Speech decoder: frames of 16 codes to 24 kHz sound, one chunk of many slots at a time.

Every layer is causal. With the state of a slot, any division of a stream into chunks gives the same samples.
Contains the networks. Does not contain slots (`state`), buckets (`region_table`) or files (`load`).
"""

from typing import cast

import torch
from torch import Tensor, nn

from models.layers.kv_cache import CacheView
from models.layers.rotary import rotary_angles, rotary_frequencies
from models.layers.transformer import CausalAttention, DecoderConfig, Derived, GatedMLP, RMSNorm
from models.qwen3_tts.codec.causal import (
    ChunkColumns,
    ConvNeXt,
    ScaledLayer,
    Streamed,
    StreamedConv,
    StreamedUpsampling,
)
from models.qwen3_tts.codec.codebooks import ResidualCodebooks
from models.qwen3_tts.codec.config import SpeechDecoderConfig
from models.qwen3_tts.codec.state import CodecState

KERNEL = 7
DILATIONS = (1, 3, 9)


class SnakeBeta(Derived):
    """x + sin(e^alpha x)^2 / e^beta per channel, in float32."""

    rate: Tensor
    inverse: Tensor

    def __init__(self, channels: int):
        super().__init__()
        self.alpha = nn.Parameter(torch.empty(channels))
        self.beta = nn.Parameter(torch.empty(channels))
        self.register_buffer("rate", torch.empty(channels, 1), persistent=False)
        self.register_buffer("inverse", torch.empty(channels, 1), persistent=False)

    def derive(self, device: torch.device | str, dtype: torch.dtype) -> None:
        self.rate = self.alpha.to(device, torch.float32).exp()[:, None]
        self.inverse = (self.beta.to(device, torch.float32).exp() + 1e-9).reciprocal()[:, None]

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return torch.addcmul(wide, (wide * self.rate).sin().square(), self.inverse).to(x.dtype)


class FrameTransformerLayer(nn.Module):
    """Pre-norm attention and gated MLP, each scaled per channel and added to the residual stream."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.self_attn = CausalAttention(config)
        self.mlp = GatedMLP(config.width, config.inner)
        self.input_layernorm = RMSNorm(config.width, config.eps)
        self.post_attention_layernorm = RMSNorm(config.width, config.eps)
        self.self_attn_layer_scale = ScaledLayer(config.width)
        self.mlp_layer_scale = ScaledLayer(config.width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, view: CacheView, k_ring: Tensor, v_ring: Tensor) -> Tensor:
        attended = self.self_attn(self.input_layernorm(x), cos, sin, view, k_ring, v_ring)
        x = x + self.self_attn_layer_scale(attended)
        added: Tensor = self.mlp_layer_scale(self.mlp(self.post_attention_layernorm(x)))
        return x + added


class FrameTransformer(Derived):
    """Windowed self-attention over frames."""

    frequencies: Tensor

    def __init__(self, config: SpeechDecoderConfig):
        super().__init__()
        self.head_dim, self.rope_theta = config.head_dim, config.rope_theta
        layer = DecoderConfig.of(config, vocab_size=0, qk_norm=False)
        self.input_proj = nn.Linear(config.latent_dim, config.hidden_size)
        self.layers = nn.ModuleList(FrameTransformerLayer(layer) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.output_proj = nn.Linear(config.hidden_size, config.latent_dim)
        self.register_buffer("frequencies", torch.empty(config.head_dim // 2), persistent=False)

    def derive(self, device: torch.device | str, dtype: torch.dtype) -> None:
        self.frequencies = rotary_frequencies(self.head_dim, self.rope_theta, device)

    def forward(self, x: Tensor, view: CacheView, state: CodecState) -> Tensor:
        """[B, T, latent] of x [B, T, latent]; writes the keys and values of its rows."""
        cos, sin = (part.unsqueeze(2) for part in rotary_angles(view.positions, self.frequencies))  # for all heads
        x = self.input_proj(x)
        for layer, k_ring, v_ring in zip(self.layers, state.k, state.v, strict=True):
            x = layer(x, cos, sin, view, k_ring, v_ring)
        out: Tensor = self.output_proj(self.norm(x))
        return out


class PairUpsampling(nn.Module):
    """Transposed convolution whose kernel is as long as its stride: a column reads one column, so nothing is kept."""

    def __init__(self, width: int, stride: int):
        super().__init__()
        self.conv = nn.ConvTranspose1d(width, width, stride, stride)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(x)
        return out


class ResidualUnit(nn.Module):
    """A dilated and a pointwise convolution, each after its activation, added to the input."""

    def __init__(self, width: int, dilation: int, per_frame: int):
        super().__init__()
        self.act1, self.act2 = SnakeBeta(width), SnakeBeta(width)
        self.conv1 = StreamedConv(width, width, KERNEL, per_frame, dilation)
        self.conv2 = StreamedConv(width, width, 1, per_frame)

    def forward(self, x: Tensor, columns: ChunkColumns) -> Tensor:
        inner = self.conv1(self.act1(x), columns)
        added: Tensor = self.conv2.conv(self.act2(inner))
        return x + added


class WaveBlock(nn.Module):
    """Upsampling by one rate and three residual units."""

    def __init__(self, width_in: int, width_out: int, rate: int, per_frame: int):
        """per_frame: columns of a frame before the block."""
        super().__init__()
        self.block = nn.ModuleList((SnakeBeta(width_in), StreamedUpsampling(width_in, width_out, rate, per_frame)))
        self.block.extend(ResidualUnit(width_out, dilation, rate * per_frame) for dilation in DILATIONS)

    def forward(self, x: Tensor, columns: ChunkColumns) -> Tensor:
        activation, upsampling, *units = self.block
        x = upsampling(activation(x), columns)
        for unit in units:
            x = unit(x, columns)
        return x


class SpeechDecoder(nn.Module):
    """The whole decoder. n_columns: values that its convolutions keep for a slot."""

    def __init__(self, config: SpeechDecoderConfig):
        super().__init__()
        self.config = config
        latent, width = config.latent_dim, config.decoder_dim
        self.quantizer = ResidualCodebooks(config.num_quantizers, config.codebook_size, config.codebook_dim)
        self.pre_conv = StreamedConv(config.codebook_dim, latent, 3, per_frame=1)
        self.pre_transformer = FrameTransformer(config)
        self.upsample = nn.ModuleList()
        per_frame = 1
        for ratio in config.upsampling_ratios:
            per_frame *= ratio
            self.upsample.append(nn.ModuleList((PairUpsampling(latent, ratio), ConvNeXt(latent, per_frame))))
        self.decoder = nn.ModuleList([StreamedConv(latent, width, KERNEL, per_frame)])
        for rate in config.upsample_rates:
            self.decoder.append(WaveBlock(width, width // 2, rate, per_frame))
            width, per_frame = width // 2, per_frame * rate
        self.decoder.extend([SnakeBeta(width), StreamedConv(width, 1, KERNEL, per_frame)])
        self.n_columns = sum(module.n_values for module in self.modules() if isinstance(module, Streamed))

    @property
    def device(self) -> torch.device:
        return self.pre_conv.conv.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.pre_conv.conv.weight.dtype

    def new_state(self, n_slots: int, max_frames: int) -> CodecState:
        """Empty slots for this decoder. max_frames: frames of the largest chunk."""
        sizes = {"n_slots": n_slots, "max_frames": max_frames}
        return CodecState(self.config, self.n_columns, **sizes, device=self.device, dtype=self.dtype)

    def forward(self, state: CodecState, slots: Tensor, codes: Tensor, n_frames: Tensor) -> Tensor:
        """Sound of the next frames of each slot, which advance its state.

        Args:
            state: updated in place.
            slots: [B] int64, distinct except for rows of padding, which name the scratch slot.
            codes: [B, T, 16] int64, each 0 to `codebook_size` - 1 also in padding.
            n_frames: [B] int64 valid frames, 0 to T.
        Returns: [B, 1920 * T] float32 in +-1; undefined beyond 1920 * n_frames.
        Source: golden `speech_decoder`.
        """
        columns = ChunkColumns(state.columns.index_select(0, slots), n_frames)
        x = self.pre_conv(self.quantizer(codes).transpose(1, 2), columns)
        view = state.view(slots, n_frames, codes.shape[1])
        # Contiguous, as a single frame is: only then a linear layer adds its bias before rounding to bfloat16.
        x = self.pre_transformer(x.transpose(1, 2).contiguous(), view, state).transpose(1, 2)
        for stage in self.upsample:
            upsampling, block = cast(nn.ModuleList, stage)
            x = block(upsampling(x), columns)
        first, *blocks, activation, last = self.decoder
        x = first(x, columns)
        for block in blocks:
            x = block(x, columns)
        wave: Tensor = last(activation(x), columns)
        state.advance(slots, n_frames, columns.after())
        return wave[:, 0].float().clamp(-1, 1)
