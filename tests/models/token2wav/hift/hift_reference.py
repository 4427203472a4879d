"""HiFT of a single row by its definition: complex spectra, interpolation at sample rate, everything in float64."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from models.token2wav.hift.hift import Hift

WINDOW = torch.hann_window(16, periodic=True, dtype=torch.float64)


def slow_f0(hift: Hift, mel: Tensor) -> Tensor:
    """[n_mels, T] -> [T] Hz."""
    weights = {name: value.double() for name, value in hift.f0_predictor.named_parameters()}
    x = mel.double()[None]
    for layer in range(0, 10, 2):
        x = F.elu(F.conv1d(x, weights[f"condnet.{layer}.weight"], weights[f"condnet.{layer}.bias"], padding=1))
    return F.linear(x.transpose(1, 2), weights["classifier.weight"], weights["classifier.bias"])[0, :, 0].abs()


def slow_phase(f0: Tensor) -> Tensor:
    """[9, 480 T] radians for [T] Hz: rates are downsampled to frames, accumulated, and upsampled to samples."""
    rates = (f0.double().repeat_interleave(480) * torch.arange(1, 10)[:, None] / 24000) % 1
    frames = F.interpolate(rates[None], scale_factor=1 / 480, mode="linear")
    return F.interpolate(frames.cumsum(2) * 2 * math.pi * 480, scale_factor=480.0, mode="linear")[0]


def slow_running_phase(f0: Tensor, start: Tensor) -> Tensor:
    """[9, 480 T] radians for [T] Hz and start phases [9], accumulated at sample rate."""
    steps = f0.double().repeat_interleave(480) * torch.arange(1, 10)[:, None] / 24000
    return 2 * math.pi * steps.cumsum(1) + start.double()[:, None] * (torch.arange(9) > 0)[:, None]


def slow_source(hift: Hift, f0: Tensor, phase: Tensor, noise: Tensor) -> Tensor:
    """[T], [9, 480 T] and noise [480 T, 9] -> [480 T]."""
    voiced = (f0 > 10).double().repeat_interleave(480)[:, None]
    amount = 0.003 * voiced + 0.1 / 3 * (1 - voiced)
    excitation = 0.1 * phase.T.sin() * voiced + amount * noise.double()
    linear = hift.m_source.l_linear
    return torch.tanh(excitation @ linear.weight[0].double() + linear.bias.double())


def slow_stft(wave: Tensor) -> Tensor:
    """[N] -> [18, N / 4 + 1]."""
    spectrum = torch.stft(wave.double(), 16, 4, 16, WINDOW, center=True, pad_mode="reflect", return_complex=True)
    return torch.cat((spectrum.real, spectrum.imag))


def slow_istft(magnitude: Tensor, phase: Tensor) -> Tensor:
    """[9, L] each -> [4 (L - 1)]."""
    return torch.istft(torch.polar(magnitude.double(), phase.double()), 16, 4, 16, WINDOW, center=True)


def slow_decode(hift: Hift, mel: Tensor, source: Tensor) -> Tensor:
    """[n_mels, T] and [480 T] -> [480 T]."""
    weights = {name: value.double() for name, value in hift.named_parameters()}

    def conv(name: str, x: Tensor, **more: int) -> Tensor:
        run = F.conv_transpose1d if name.startswith("ups") else F.conv1d
        return run(x, weights[f"{name}.weight"], weights[f"{name}.bias"], **more)

    def snake(name: str, x: Tensor) -> Tensor:
        alpha = weights[f"{name}.alpha"][:, None]
        return x + torch.sin(alpha * x) ** 2 / (alpha + 1e-9)

    def block(name: str, x: Tensor, kernel: int) -> Tensor:
        for n, dilation in enumerate((1, 3, 5)):
            y = snake(f"{name}.activations1.{n}", x)
            y = conv(f"{name}.convs1.{n}", y, dilation=dilation, padding=dilation * (kernel - 1) // 2)
            y = snake(f"{name}.activations2.{n}", y)
            x = x + conv(f"{name}.convs2.{n}", y, padding=(kernel - 1) // 2)
        return x

    stft = slow_stft(source)[None]
    x = conv("conv_pre", mel.double()[None], padding=3)
    for n, (rate, padding, down) in enumerate(((8, 4, (15, 7)), (5, 3, (3, 1)), (3, 2, (1, 0)))):
        x = conv(f"ups.{n}", F.leaky_relu(x, 0.1), stride=rate, padding=padding)
        if n == 2:
            x = F.pad(x, (1, 0), mode="reflect")
        side = conv(f"source_downs.{n}", stft, stride=down[0], padding=down[1])
        x = x + block(f"source_resblocks.{n}", side, (7, 7, 11)[n])
        x = sum(block(f"resblocks.{3 * n + j}", x, kernel) for j, kernel in enumerate((3, 7, 11))) / 3
    x = conv("conv_post", F.leaky_relu(x), padding=3)[0]
    return slow_istft(x[:9].exp().clamp(max=100), x[9:].sin()).clamp(-0.99, 0.99)
