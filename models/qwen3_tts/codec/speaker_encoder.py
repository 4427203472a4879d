"""Speaker encoder: 24 kHz sound to one vector of the speaker (ECAPA-TDNN).

Sounds of different length share a batch: reflection, averages and weights over time use each row's own length. So a
vector does not depend on the bucket.
"""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.inputs.audio import mel_filters, mirror
from models.layers.transformer import Derived
from models.qwen3_tts.codec.config import SAMPLE_RATE, SpeakerEncoderConfig

N_FFT = 1024
HOP = 256
OUTSIDE = (N_FFT - HOP) // 2  # reflected samples at each end
MIN_SAMPLES = 8 * HOP  # the widest convolution reflects four frames
MEL_FLOOR = 1e-5
VARIANCE_FLOOR = 1e-12


class ReflectedConv(nn.Module):
    """Convolution that keeps the number of frames by reflection at both ends of a row, with ReLU."""

    def __init__(self, width_in: int, width_out: int, kernel: int, dilation: int = 1):
        super().__init__()
        self.n_outside = dilation * (kernel - 1) // 2
        self.conv = nn.Conv1d(width_in, width_out, kernel, dilation=dilation)

    def forward(self, x: Tensor, n_frames: Tensor) -> Tensor:
        """[B, C_out, T] of x [B, C_in, T]; undefined beyond n_frames [B]."""
        if self.n_outside:
            frame = torch.arange(-self.n_outside, x.shape[2] + self.n_outside, device=x.device)
            index = mirror(frame, 0, n_frames[:, None]).clamp(0, x.shape[2] - 1)
            x = x.gather(2, index[:, None].expand(-1, x.shape[1], -1))
        return F.relu(self.conv(x))


class Res2Block(nn.Module):
    """Groups of channels, each convolved after the result of the group before is added; the first stays as it is."""

    def __init__(self, width: int, kernel: int, dilation: int, scale: int):
        super().__init__()
        group = width // scale
        self.scale = scale
        self.blocks = nn.ModuleList(ReflectedConv(group, group, kernel, dilation) for _ in range(scale - 1))

    def forward(self, x: Tensor, n_frames: Tensor) -> Tensor:
        first, second, *others = x.chunk(self.scale, dim=1)
        done = [first, self.blocks[0](second, n_frames)]
        for block, group in zip(list(self.blocks)[1:], others, strict=True):
            done.append(block(group + done[-1], n_frames))
        return torch.cat(done, dim=1)


class ChannelGate(nn.Module):
    """Scales each channel by a factor computed from the averages over time."""

    def __init__(self, width: int, inner: int):
        super().__init__()
        self.conv1 = nn.Conv1d(width, inner, 1)
        self.conv2 = nn.Conv1d(inner, width, 1)

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        """weights: [B, 1, T] float32 that average a row over its frames."""
        mean = (x * weights).sum(2, keepdim=True, dtype=torch.float32).to(x.dtype)
        gate: Tensor = self.conv2(F.relu(self.conv1(mean))).sigmoid()
        return x * gate


class SpeakerBlock(nn.Module):
    """Pointwise convolution, groups of channels, pointwise convolution and gate, added to the input."""

    def __init__(self, config: SpeakerEncoderConfig, number: int):
        super().__init__()
        width = config.enc_channels[number]
        kernel, dilation = config.enc_kernel_sizes[number], config.enc_dilations[number]
        self.tdnn1 = ReflectedConv(width, width, 1)
        self.res2net_block = Res2Block(width, kernel, dilation, config.enc_res2net_scale)
        self.tdnn2 = ReflectedConv(width, width, 1)
        self.se_block = ChannelGate(width, config.enc_se_channels)

    def forward(self, x: Tensor, n_frames: Tensor, weights: Tensor) -> Tensor:
        inner = self.res2net_block(self.tdnn1(x, n_frames), n_frames)
        added: Tensor = self.se_block(self.tdnn2(inner, n_frames), weights)
        return x + added


class AttentiveStatistics(nn.Module):
    """Mean and deviation over time, each channel with its own weights of the frames."""

    def __init__(self, width: int, inner: int):
        super().__init__()
        self.tdnn = ReflectedConv(3 * width, inner, 1)
        self.conv = nn.Conv1d(inner, width, 1)

    def forward(self, x: Tensor, n_frames: Tensor, weights: Tensor) -> Tensor:
        """[B, 2 * width, 1] of x [B, width, T]. weights: [B, 1, T] float32 that average a row over its frames."""
        mean, deviation = (part.expand_as(x) for part in _statistics(x, weights))
        scores = self.conv(self.tdnn(torch.cat((x, mean, deviation), dim=1), n_frames).tanh())
        own = scores.float().masked_fill(weights == 0, -torch.inf).softmax(dim=2)
        return torch.cat(_statistics(x, own), dim=1)


def _statistics(x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """[B, C, 1] mean and deviation of x [B, C, T] under weights [B, 1 or C, T] that add up to one."""
    wide = torch.where(weights > 0, x.float(), 0)
    mean = (wide * weights).sum(2, keepdim=True)
    variance = ((wide - mean).square() * weights).sum(2, keepdim=True)
    return mean.to(x.dtype), variance.clamp_min(VARIANCE_FLOOR).sqrt().to(x.dtype)


class SpeakerEncoder(Derived):
    """The whole network, log-mel included."""

    filters: Tensor
    window: Tensor

    def __init__(self, config: SpeakerEncoderConfig):
        super().__init__()
        self.config = config
        first, *_, last = config.enc_channels
        kernel, dilation = config.enc_kernel_sizes, config.enc_dilations
        self.blocks = nn.ModuleList([ReflectedConv(config.mel_dim, first, kernel[0], dilation[0])])
        self.blocks.extend(SpeakerBlock(config, number) for number in range(1, len(kernel) - 1))
        self.mfa = ReflectedConv(last, last, kernel[-1], dilation[-1])
        self.asp = AttentiveStatistics(last, config.enc_attention_channels)
        self.fc = nn.Conv1d(2 * last, config.enc_dim, 1)
        self.register_buffer("filters", torch.empty(N_FFT // 2 + 1, config.mel_dim), persistent=False)
        self.register_buffer("window", torch.empty(N_FFT), persistent=False)

    def derive(self, device: torch.device | str, dtype: torch.dtype) -> None:
        filters = mel_filters(self.config.mel_dim, N_FFT, SAMPLE_RATE, top_hz=SAMPLE_RATE / 2)
        self.filters = filters.to(device, torch.float32)
        self.window = torch.hann_window(N_FFT, device=device)

    @property
    def device(self) -> torch.device:
        return self.fc.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.fc.weight.dtype

    def log_mel(self, waves: Tensor, n_samples: Tensor) -> tuple[Tensor, Tensor]:
        """Log-mel of whole sounds, reflected at both ends.

        Args:
            waves: [B, L] float32 at 24 kHz.
            n_samples: [B] int64, at least 2048.
        Returns: [B, L // 256, mel_dim] float32, undefined beyond n_samples // 256; [B] int64, that number of frames.
        """
        length = waves.shape[1] // HOP * HOP
        sample = torch.arange(-OUTSIDE, length + OUTSIDE, device=waves.device)
        index = mirror(sample, 0, n_samples[:, None]).clamp(0, waves.shape[1] - 1)
        frames = waves.float().gather(1, index).unfold(1, N_FFT, HOP)
        spectrum = torch.view_as_real(torch.fft.rfft(frames * self.window))
        magnitude = (spectrum.square().sum(-1) + 1e-9).sqrt()
        return (magnitude @ self.filters).clamp_min(MEL_FLOOR).log(), n_samples // HOP

    def forward(self, waves: Tensor, n_samples: Tensor) -> Tensor:
        """Speaker vectors [B, enc_dim] float32 of sounds; arguments as for `log_mel`. Source: golden
        `speaker_encoder`.
        """
        mel, n_frames = self.log_mel(waves, n_samples)
        inside = torch.arange(mel.shape[1], device=mel.device) < n_frames[:, None]
        weights = (inside / n_frames[:, None])[:, None]
        x = self.blocks[0](mel.transpose(1, 2).to(self.dtype), n_frames)
        outputs = []
        for block in list(self.blocks)[1:]:
            x = block(x, n_frames, weights)
            outputs.append(x)
        pooled = self.asp(self.mfa(torch.cat(outputs, dim=1), n_frames), n_frames, weights)
        return cast(Tensor, self.fc(pooled))[:, :, 0].float()
