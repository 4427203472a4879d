"""Speech encoder: 24 kHz sound to frames of 16 codes (Mimi's encoder).

Sounds of different length share a batch: before each strided convolution a row is zeroed beyond its own end, and the
last column is repeated before the last one, as for a sound alone. So the codes do not depend on the bucket.
"""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.layers.rotary import rotary_angles, rotary_frequencies, rotate
from models.layers.transformer import Derived, attend
from models.qwen3_tts.codec.causal import ScaledLayer
from models.qwen3_tts.codec.codebooks import SplitCodebooks
from models.qwen3_tts.codec.config import CODE_GROUPS, ENCODER_STRIDE, FRAME_SAMPLES, SpeechEncoderConfig


def frame_count(n_samples: int) -> int:
    """Frames of a sound."""
    return -(-n_samples // FRAME_SAMPLES)


def _before(n: Tensor, length: int) -> Tensor:
    """[B, 1, length] bool: true before n [B]."""
    return (torch.arange(length, device=n.device) < n[:, None])[:, None]


class PaddedConv(nn.Module):
    """Causal convolution of whole sounds: zeros before the start, and after the end up to a whole stride."""

    def __init__(self, width_in: int, width_out: int, kernel: int, stride: int = 1):
        super().__init__()
        self.stride = stride
        self.conv = nn.Conv1d(width_in, width_out, kernel, stride)

    def forward(self, x: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
        """[B, C_out, ceil(L / stride)] of x [B, C_in, L] with n [B] valid columns, and its valid columns."""
        length, before = x.shape[2], self.conv.kernel_size[0] - self.stride
        if self.stride > 1:
            x = torch.where(_before(n, length), x, 0)
        out: Tensor = self.conv(F.pad(x, (before, -length % self.stride)))
        return out, (n + self.stride - 1) // self.stride


class ConvPair(nn.Module):
    """Two convolutions with fewer channels between them, added to the input."""

    def __init__(self, width: int, inner: int, kernel: int):
        super().__init__()
        self.block = nn.ModuleList((nn.ELU(), PaddedConv(width, inner, kernel), nn.ELU(), PaddedConv(inner, width, 1)))

    def forward(self, x: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
        first, conv1, second, conv2 = self.block
        inner, _ = conv1(first(x), n)
        added, _ = conv2(second(inner), n)
        return x + added, n


class WaveEncoder(nn.Module):
    """Samples to vectors, one for each product of the strides."""

    def __init__(self, config: SpeechEncoderConfig):
        super().__init__()
        width = config.num_filters
        self.layers = nn.ModuleList([PaddedConv(1, width, config.kernel_size)])
        for stride in reversed(config.upsampling_ratios):
            self.layers.append(ConvPair(width, width // config.compress, config.residual_kernel_size))
            self.layers.extend([nn.ELU(), PaddedConv(width, 2 * width, 2 * stride, stride)])
            width *= 2
        self.layers.extend([nn.ELU(), PaddedConv(width, config.hidden_size, config.last_kernel_size)])

    def forward(self, x: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
        """[B, width, L / strides] of samples [B, 1, L], n [B] of them valid, and its valid columns."""
        for layer in self.layers:
            if isinstance(layer, nn.ELU):
                x = layer(x)
            else:
                x, n = layer(x, n)
        return x, n


class SoundAttention(nn.Module):
    """Rotary self-attention over a sound; no biases."""

    def __init__(self, config: SpeechEncoderConfig):
        super().__init__()
        width, self.head_dim = config.hidden_size, config.head_dim
        inner, kv_inner = (n * self.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
        self.q_proj = nn.Linear(width, inner, bias=False)
        self.k_proj = nn.Linear(width, kv_inner, bias=False)
        self.v_proj = nn.Linear(width, kv_inner, bias=False)
        self.o_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor, mask: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, self.head_dim)) for part in (self.q_proj, self.k_proj, self.v_proj))
        keys = rotate(k, cos, sin).transpose(1, 2)
        out: Tensor = self.o_proj(attend(rotate(q, cos, sin), keys, v.transpose(1, 2), mask))
        return out


class PlainMLP(nn.Module):
    """fc2(gelu(fc1(x))), no biases."""

    def __init__(self, width: int, inner: int):
        super().__init__()
        self.fc1 = nn.Linear(width, inner, bias=False)
        self.fc2 = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(F.gelu(self.fc1(x)))
        return out


class SoundLayer(nn.Module):
    """Pre-norm attention and MLP, each scaled per channel and added to the residual stream."""

    def __init__(self, config: SpeechEncoderConfig):
        super().__init__()
        width, eps = config.hidden_size, config.norm_eps
        self.self_attn = SoundAttention(config)
        self.mlp = PlainMLP(width, config.intermediate_size)
        self.input_layernorm = nn.LayerNorm(width, eps=eps)
        self.post_attention_layernorm = nn.LayerNorm(width, eps=eps)
        self.self_attn_layer_scale = ScaledLayer(width)
        self.mlp_layer_scale = ScaledLayer(width)

    def forward(self, x: Tensor, mask: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn_layer_scale(self.self_attn(self.input_layernorm(x), mask, cos, sin))
        added: Tensor = self.mlp_layer_scale(self.mlp(self.post_attention_layernorm(x)))
        return x + added


class SoundTransformer(Derived):
    """Causal self-attention over a whole sound."""

    frequencies: Tensor

    def __init__(self, config: SpeechEncoderConfig):
        super().__init__()
        self.rope_theta, self.head_dim = config.rope_theta, config.head_dim
        self.layers = nn.ModuleList(SoundLayer(config) for _ in range(config.num_hidden_layers))
        self.register_buffer("frequencies", torch.empty(self.head_dim // 2), persistent=False)

    def derive(self, device: torch.device | str, dtype: torch.dtype) -> None:
        self.frequencies = rotary_frequencies(self.head_dim, self.rope_theta, device)

    def forward(self, x: Tensor) -> Tensor:
        """[B, width, T] of x [B, width, T]. A column does not depend on later ones."""
        column = torch.arange(x.shape[2], device=x.device)
        mask = (column <= column[:, None])[None]
        cos, sin = (part[:, None] for part in rotary_angles(column, self.frequencies))  # one axis for the heads
        rows = x.transpose(1, 2)
        for layer in self.layers:
            rows = layer(rows, mask, cos, sin)
        return rows.transpose(1, 2)


class RateConv(nn.Module):
    """Strided causal convolution that repeats the first and the last column beyond the ends."""

    def __init__(self, width: int, stride: int):
        super().__init__()
        self.conv = nn.Conv1d(width, width, 2 * stride, stride, bias=False)

    def forward(self, x: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
        """[B, width, ceil(L / stride)] of x [B, width, L] with n [B] valid columns, and its valid columns."""
        [stride], length = self.conv.stride, x.shape[2]
        column = torch.arange(-stride, length + -length % stride, device=x.device)
        index = torch.minimum(column.clamp_min(0), (n[:, None] - 1).clamp_min(0))
        out: Tensor = self.conv(x.gather(2, index[:, None].expand(-1, x.shape[1], -1)))
        return out, (n + stride - 1) // stride


class SpeechEncoder(nn.Module):
    """The whole encoder; of the codebooks, those whose codes are kept."""

    def __init__(self, config: SpeechEncoderConfig):
        super().__init__()
        self.config = config
        self.encoder = WaveEncoder(config)
        self.encoder_transformer = SoundTransformer(config)
        self.downsample = RateConv(config.hidden_size, ENCODER_STRIDE)
        self.quantizer = SplitCodebooks(CODE_GROUPS, config.codebook_size, config.hidden_size, config.codebook_dim)

    @property
    def device(self) -> torch.device:
        return self.downsample.conv.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.downsample.conv.weight.dtype

    def forward(self, waves: Tensor, n_samples: Tensor) -> Tensor:
        """Codes of whole sounds.

        Args:
            waves: [B, L] float32 at 24 kHz; ignored beyond n_samples.
            n_samples: [B] int64.
        Returns: [B, ceil(L / 1920), 16] int64; a row has ceil(n_samples / 1920) frames, the rest is undefined.
        Source: golden `speech_encoder`.
        """
        samples = torch.where(_before(n_samples, waves.shape[1]), waves[:, None], 0).to(self.dtype)
        x, n = self.encoder(samples, n_samples)
        x, _ = self.downsample(self.encoder_transformer(x), n)
        return cast(Tensor, self.quantizer(x))
