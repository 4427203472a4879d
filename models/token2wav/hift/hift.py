"""HiFT: mel frames and an excitation to 24 kHz sound. Batches of rows of different length.

Knows frames and samples. Does not know chunks, tails or slots (`vocode`).

Before every convolution a row is zero beyond its own end, which is what the convolution would pad with. So a row
comes out as it would alone.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.layers.transformer import Derived
from models.token2wav.hift.f0 import F0Predictor
from models.token2wav.hift.source import HarmonicSource
from models.token2wav.hift.spectral import N_BINS, Spectral
from models.token2wav.settings import SAMPLES_PER_FRAME, HiftConfig

LIMIT = 0.99  # of the sound's amplitude

KERNELS = (3, 7, 11)  # of the residual blocks of a stage
UPS = ((16, 8, 4), (11, 5, 3), (7, 3, 2))  # kernel, stride, padding
SLOPE, LAST_SLOPE = 0.1, 0.01

_DILATIONS = (1, 3, 5)
_DOWNS = ((30, 15, 7), (6, 3, 1), (1, 1, 0))
_SOURCE_KERNELS = (7, 7, 11)
_LOUDEST = 100.0

# Small, and the sound's precision hangs on them: float32 in every model.
_FLOAT32_WEIGHTS = ("f0_predictor.", "m_source.", "conv_post.")


def weight_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """The type HiFT keeps a weight of this name in, for a model that is mostly `dtype`."""
    return torch.float32 if name.startswith(_FLOAT32_WEIGHTS) or name.endswith(".alpha") else dtype


class Snake(Derived):
    """x + sin(alpha x)^2 / alpha, by channel, in float32."""

    def __init__(self, channels: int):
        super().__init__()
        self.alpha = nn.Parameter(torch.empty(channels))
        self.register_buffer("inverse", torch.empty(channels, 1), persistent=False)

    def derive(self, device: torch.device | str, dtype: torch.dtype) -> None:
        self.inverse = (self.alpha.to(device, torch.float32) + 1e-9).reciprocal()[:, None]

    def forward(self, x: Tensor) -> Tensor:
        return torch.addcmul(x, (x * self.alpha.float()[:, None]).sin().square(), self.inverse)


class ResBlock(nn.Module):
    """Three pairs of a dilated and a plain convolution, each pair added to what it read."""

    def __init__(self, channels: int, kernel: int):
        super().__init__()
        self.convs1 = nn.ModuleList(
            nn.Conv1d(channels, channels, kernel, dilation=d, padding=d * (kernel // 2)) for d in _DILATIONS
        )
        self.convs2 = nn.ModuleList(nn.Conv1d(channels, channels, kernel, padding=kernel // 2) for _ in _DILATIONS)
        self.activations1 = nn.ModuleList(Snake(channels) for _ in _DILATIONS)
        self.activations2 = nn.ModuleList(Snake(channels) for _ in _DILATIONS)

    def forward(self, x: Tensor, inside: Tensor) -> Tensor:
        """x: [B, C, L] float32. inside: [B, 1, L] float32, 1 up to the row's end and 0 beyond."""
        for snake1, conv1, snake2, conv2 in zip(
            self.activations1, self.convs1, self.activations2, self.convs2, strict=True
        ):
            x = x + _run(conv2, snake2(_run(conv1, snake1(x) * inside)) * inside)
        return x


class Hift(Derived):
    """The whole vocoder. Convolutions run in their weights' type; what lies between them is float32."""

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
        """On a GPU, put channels last in memory: its convolutions run that way, and would turn every input around."""
        if torch.device(device).type != "cuda":
            return
        for module in self.modules():
            if isinstance(module, nn.Conv1d | nn.ConvTranspose1d):
                module.weight.data = module.weight.data.transpose(1, 2).contiguous().transpose(1, 2)

    def f0(self, mel: Tensor, n_frames: Tensor) -> Tensor:
        """[B, n_mels, T] -> [B, T] float64 Hz; see `F0Predictor`."""
        return self.f0_predictor(mel, n_frames)

    def decode(self, mel: Tensor, source: Tensor, n_frames: Tensor) -> Tensor:
        """Sound of mel frames, given their excitation.

        Args:
            mel: [B, n_mels, T]; beyond n_frames [B] int64 it may hold anything.
            source: [B, 480 T] float32.
        Returns: [B, 480 T] float32 within +-0.99; 0 beyond 480 n_frames.
        Source: golden `hift_*`.
        """
        n_samples = SAMPLES_PER_FRAME * n_frames
        magnitude, phase = self.spectrum(mel, self.spectral.stft(source, n_samples), n_frames)
        return self.spectral.istft(magnitude, phase, n_samples).clamp(-LIMIT, LIMIT)

    def spectrum(self, mel: Tensor, source_stft: Tensor, n_frames: Tensor) -> tuple[Tensor, Tensor]:
        """Magnitude and phase, [B, 9, 120 T + 1] float32 each; meaningless beyond 120 n_frames.

        Args: source_stft: [B, 18, 120 T + 1], 0 beyond 120 n_frames.
        """
        inside = _inside(mel.shape[2], n_frames)
        # Not a product: what lies beyond the end may be NaN.
        x = _run(self.conv_pre, torch.where(inside.bool(), mel.float(), 0.0))
        length = n_frames
        for n, (up, down, source_block) in enumerate(
            zip(self.ups, self.source_downs, self.source_resblocks, strict=True)
        ):
            x = _run(up, F.leaky_relu(x, SLOPE) * inside)
            length = length * UPS[n][1]
            if n == len(self.ups) - 1:
                x = F.pad(x, (1, 0), mode="reflect")  # one more than hops, as many as windows
                length = length + 1
            inside = _inside(x.shape[2], length)
            x = x + source_block(_run(down, source_stft), inside)
            blocks = self.resblocks[n * len(KERNELS) : (n + 1) * len(KERNELS)]
            x = sum(block(x, inside) for block in blocks) / len(KERNELS)
        x = _run(self.conv_post, F.leaky_relu(x, LAST_SLOPE) * inside)
        return spectrum_of(x)


def spectrum_of(x: Tensor) -> tuple[Tensor, Tensor]:
    """What the last convolution says, [B, 18, L], as magnitude and phase."""
    return x[:, :N_BINS].exp().clamp(max=_LOUDEST), x[:, N_BINS:].sin()


def _inside(n_columns: int, length: Tensor) -> Tensor:
    """[B, 1, n_columns] float32: 1 below each row's length [B], 0 from there on."""
    return (torch.arange(n_columns, device=length.device) < length[:, None, None]).float()


def _run(conv: nn.Conv1d | nn.ConvTranspose1d, x: Tensor) -> Tensor:
    """A convolution in its weight's type, float32 on either side.

    As one over pictures of height one, since only those know the memory order that `derive` asks for.
    """
    picture, kernel = x.to(conv.weight.dtype)[:, :, None], conv.weight[:, :, None]
    stride, padding, dilation = (
        (one, *along) for one, along in ((1, conv.stride), (0, conv.padding), (1, conv.dilation))
    )
    if isinstance(conv, nn.ConvTranspose1d):
        out = F.conv_transpose2d(picture, kernel, conv.bias, stride, padding, dilation=dilation)
    else:
        out = F.conv2d(picture, kernel, conv.bias, stride, padding, dilation)
    return out[:, :, 0].float()
