"""HiFT: mel frames and an excitation to 24 kHz sound, for batches of rows of different length.

Contains the networks. Does not contain chunks, tails or slots (`stream.vocode`).

Before every convolution each row is zeroed beyond its end, which equals the convolution's padding. So the sound of a
row does not depend on the other rows or on the bucket.
"""

from typing import ClassVar, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.layers.transformer import Derived
from models.token2wav.hift.f0 import F0Predictor
from models.token2wav.hift.source import HarmonicSource
from models.token2wav.hift.spectral import N_BINS, Spectral
from models.token2wav.settings import SAMPLES_PER_FRAME, HiftConfig

LIMIT = 0.99  # largest amplitude of the sound

KERNELS = (3, 7, 11)  # kernel sizes of the residual blocks of a stage
UPS = ((16, 8, 4), (11, 5, 3), (7, 3, 2))  # kernel, stride, padding
SLOPE, LAST_SLOPE = 0.1, 0.01
# Base channels from which channels-last is not slower on a CPU. A second of sound takes 386 instead of 487 ms with 512
# base channels, 67 instead of 87 with 160, 25 both ways with 64, 22 instead of 19 with 32.
MIN_CHANNELS_LAST = 64

_DILATIONS = (1, 3, 5)
_DOWNS = ((30, 15, 7), (6, 3, 1), (1, 1, 0))
_SOURCE_KERNELS = (7, 7, 11)
_MAX_MAGNITUDE = 100.0

# Small modules that determine the precision of the sound: float32 in every model.
_FLOAT32_WEIGHTS = ("f0_predictor.", "m_source.", "conv_post.")


def weight_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """The type of the HiFT weight `name` in a model whose other weights are `dtype`."""
    return torch.float32 if name.startswith(_FLOAT32_WEIGHTS) or name.endswith(".alpha") else dtype


class HiftBackend(Protocol):
    """Mel frames to sound: `Hift`, or `hift_fused.FusedHift` on the project's own kernels."""

    is_fused: ClassVar[bool]
    m_source: HarmonicSource

    def f0(self, mel: Tensor, n_frames: Tensor) -> Tensor:
        """As `Hift.f0`."""

    def decode(self, mel: Tensor, source: Tensor, n_frames: Tensor) -> Tensor:
        """As `Hift.decode`."""


class Snake(Derived):
    """x + sin(alpha x)^2 / alpha per channel, in float32."""

    def __init__(self, channels: int):
        super().__init__()
        self.alpha = nn.Parameter(torch.empty(channels))
        self.register_buffer("inverse", torch.empty(channels, 1), persistent=False)

    def derive(self, device: torch.device | str, dtype: torch.dtype) -> None:
        self.inverse = (self.alpha.to(device, torch.float32) + 1e-9).reciprocal()[:, None]

    def forward(self, x: Tensor) -> Tensor:
        return torch.addcmul(x, (x * self.alpha.float()[:, None]).sin().square(), self.inverse)


class ResBlock(nn.Module):
    """Three pairs of a dilated and a plain convolution, each with a residual connection."""

    def __init__(self, channels: int, kernel: int):
        super().__init__()
        self.convs1 = nn.ModuleList(
            nn.Conv1d(channels, channels, kernel, dilation=d, padding=d * (kernel // 2)) for d in _DILATIONS
        )
        self.convs2 = nn.ModuleList(nn.Conv1d(channels, channels, kernel, padding=kernel // 2) for _ in _DILATIONS)
        self.activations1 = nn.ModuleList(Snake(channels) for _ in _DILATIONS)
        self.activations2 = nn.ModuleList(Snake(channels) for _ in _DILATIONS)

    def forward(self, x: Tensor, inside: Tensor) -> Tensor:
        """[B, C, L] float32.

        Args:
            x: [B, C, L] float32.
            inside: [B, 1, L] float32: 1 before the end of the row, 0 beyond.
        """
        for snake1, conv1, snake2, conv2 in self.pairs():
            x = x + _run(conv2, snake2(_run(conv1, snake1(x) * inside)) * inside)
        return x

    def pairs(self) -> list[tuple[Snake, nn.Conv1d, Snake, nn.Conv1d]]:
        """Activation, dilated convolution, activation and plain convolution of each pair."""
        modules = zip(self.activations1, self.convs1, self.activations2, self.convs2, strict=True)
        return cast(list[tuple[Snake, nn.Conv1d, Snake, nn.Conv1d]], list(modules))


class Hift(Derived):
    """The whole vocoder. Convolutions run in their weights' type; everything between them is float32."""

    is_fused: ClassVar[bool] = False

    def __init__(self, config: HiftConfig):
        super().__init__()
        self.config = config
        base = config.base_channels
        widths = [base // 2 ** (n + 1) for n in range(len(UPS))]
        self.f0_predictor = F0Predictor(config.n_mels, config.f0_channels)
        self.m_source = HarmonicSource()
        self.conv_pre = nn.Conv1d(config.n_mels, base, 7, padding=3)
        self.ups = nn.ModuleList(
            nn.ConvTranspose1d(2 * width, width, *shape) for width, shape in zip(widths, UPS, strict=True)
        )
        self.source_downs = nn.ModuleList(
            nn.Conv1d(2 * N_BINS, width, *shape) for width, shape in zip(widths, _DOWNS, strict=True)
        )
        self.source_resblocks = nn.ModuleList(map(ResBlock, widths, _SOURCE_KERNELS))
        self.resblocks = nn.ModuleList(ResBlock(width, kernel) for width in widths for kernel in KERNELS)
        self.conv_post = nn.Conv1d(widths[-1], 2 * N_BINS, 7, padding=3)
        self.spectral = Spectral()

    def derive(self, device: torch.device | str, dtype: torch.dtype) -> None:
        """Store kernels channels-last where convolutions are fastest so: on a GPU, and on a CPU with many channels."""
        if torch.device(device).type != "cuda" and self.config.base_channels < MIN_CHANNELS_LAST:
            return
        for module in self.modules():
            if isinstance(module, nn.Conv1d | nn.ConvTranspose1d):
                module.weight.data = module.weight.data.transpose(1, 2).contiguous().transpose(1, 2)

    def f0(self, mel: Tensor, n_frames: Tensor) -> Tensor:
        """[B, T] float64 in Hz for mel [B, n_mels, T]; see `F0Predictor`."""
        f0: Tensor = self.f0_predictor(mel, n_frames)
        return f0

    def decode(self, mel: Tensor, source: Tensor, n_frames: Tensor) -> Tensor:
        """Sound of mel frames, given their excitation.

        Args:
            mel: [B, n_mels, T]; undefined beyond n_frames.
            source: [B, 480 T] float32 excitation.
            n_frames: [B] int64 valid frames.
        Returns: [B, 480 T] float32 within +-0.99; 0 beyond 480 n_frames.
        Source: golden `hift_*`.
        """
        n_samples = SAMPLES_PER_FRAME * n_frames
        magnitude, phase = self.spectrum(mel, self.spectral.stft(source, n_samples), n_frames)
        return self.spectral.istft(magnitude, phase, n_samples).clamp(-LIMIT, LIMIT)

    def spectrum(self, mel: Tensor, source_stft: Tensor, n_frames: Tensor) -> tuple[Tensor, Tensor]:
        """Magnitude and phase, [B, 9, 120 T + 1] float32 each; undefined beyond 120 n_frames.

        Args:
            mel: as `decode`.
            source_stft: [B, 18, 120 T + 1], 0 beyond 120 n_frames.
            n_frames: as `decode`.
        """
        inside = _inside(mel.shape[2], n_frames)
        # `where` instead of a product, because padding may be NaN.
        x = _run(self.conv_pre, torch.where(inside.bool(), mel.float(), 0.0))
        length = n_frames
        for n, (up, down, source_block, blocks) in enumerate(self.stages()):
            x = _run(up, F.leaky_relu(x, SLOPE) * inside)
            length = length * UPS[n][1]
            if n == len(self.ups) - 1:
                x = F.pad(x, (1, 0), mode="reflect")  # the STFT has one window more than hops
                length = length + 1
            inside = _inside(x.shape[2], length)
            x = x + source_block(_run(down, source_stft), inside)
            x = sum(block(x, inside) for block in blocks) / len(KERNELS)
        x = _run(self.conv_post, F.leaky_relu(x, LAST_SLOPE) * inside)
        return spectrum_of(x)

    def stages(self) -> list[tuple[nn.ConvTranspose1d, nn.Conv1d, ResBlock, list[ResBlock]]]:
        """Per stage: upsampling, downsampling of the excitation, its residual block, the stage's residual blocks."""
        n = len(KERNELS)
        blocks = [list(self.resblocks[i * n : (i + 1) * n]) for i in range(len(self.ups))]
        modules = zip(self.ups, self.source_downs, self.source_resblocks, blocks, strict=True)
        return cast(list[tuple[nn.ConvTranspose1d, nn.Conv1d, ResBlock, list[ResBlock]]], list(modules))


def spectrum_of(x: Tensor) -> tuple[Tensor, Tensor]:
    """Magnitude and phase [B, 9, L] from the output of the last convolution [B, 18, L]."""
    return x[:, :N_BINS].exp().clamp(max=_MAX_MAGNITUDE), x[:, N_BINS:].sin()


def _inside(n_columns: int, length: Tensor) -> Tensor:
    """[B, 1, n_columns] float32: 1 before each row's length [B], 0 from there on."""
    return (torch.arange(n_columns, device=length.device) < length[:, None, None]).float()


def _run(conv: nn.Conv1d | nn.ConvTranspose1d, x: Tensor) -> Tensor:
    """A convolution in its weight's type, with float32 input and output."""
    return conv_as_2d(conv, x.to(conv.weight.dtype), conv.bias).float()


def conv_as_2d(conv: nn.Conv1d | nn.ConvTranspose1d, x: Tensor, bias: Tensor | None) -> Tensor:
    """[B, C', L'] for x [B, C, L]: the convolution over images of height one.

    Only two-dimensional convolutions support the memory order that `Hift.derive` chooses.
    """
    image, kernel = x[:, :, None], conv.weight[:, :, None]
    stride, padding, dilation = (1, *conv.stride), (0, *_ints(conv.padding)), (1, *conv.dilation)
    if isinstance(conv, nn.ConvTranspose1d):
        out = F.conv_transpose2d(image, kernel, bias, stride, padding, dilation=dilation)
    else:
        out = F.conv2d(image, kernel, bias, stride, padding, dilation)
    return out[:, :, 0]


def _ints(padding: str | tuple[int, ...]) -> tuple[int, ...]:
    assert not isinstance(padding, str), f"expected a padding in numbers, got {padding}"
    return padding
