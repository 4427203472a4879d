"""Networks that tell recorded from generated sound, for the adversarial part of the vocoder's training.

One looks at samples at a period, one at spectrograms of a resolution; both return scores and the layers' outputs.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PERIODS = (2, 3, 5, 7, 11)
RESOLUTIONS = ((2048, 512), (1024, 256), (512, 128), (128, 32))  # window and hop
SLOPE = 0.1


class PeriodDiscriminator(nn.Module):
    def __init__(self, period: int, widths: tuple[int, ...] = (16, 64, 128, 256, 256)):
        super().__init__()
        self.period = period
        pairs = zip((1, *widths), widths, strict=False)
        self.convs = nn.ModuleList(
            nn.Conv2d(n_in, n_out, (5, 1), (3 if i < len(widths) - 1 else 1, 1), padding=(2, 0))
            for i, (n_in, n_out) in enumerate(pairs)
        )
        self.last = nn.Conv2d(widths[-1], 1, (3, 1), padding=(1, 0))

    def forward(self, wave: Tensor) -> list[Tensor]:
        """Outputs of all layers for wave [B, n]; the last one is the score."""
        wave = F.pad(wave, (0, -wave.shape[1] % self.period))
        return _outputs(wave.unflatten(1, (-1, self.period))[:, None], self.convs, self.last)


class SpectrumDiscriminator(nn.Module):
    window: Tensor

    def __init__(self, n_fft: int, hop: int, width: int = 32):
        super().__init__()
        self.n_fft, self.hop = n_fft, hop
        self.register_buffer("window", torch.hann_window(n_fft), persistent=False)
        self.convs = nn.ModuleList(
            nn.Conv2d(1 if i == 0 else width, width, (3, 9), (1, 1 if i in (0, 4) else 2), padding=(1, 4))
            for i in range(5)
        )
        self.last = nn.Conv2d(width, 1, (3, 3), padding=(1, 1))

    def forward(self, wave: Tensor) -> list[Tensor]:
        """As `PeriodDiscriminator.forward`."""
        with torch.autocast(wave.device.type, enabled=False):
            spectrum = torch.stft(wave.float(), self.n_fft, self.hop, window=self.window, return_complex=True)
            power = spectrum.real.square() + spectrum.imag.square()
            image = (power + 1e-7).log().mul(0.2).transpose(1, 2)[:, None]
        return _outputs(image, self.convs, self.last)


class Discriminators(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            [*map(PeriodDiscriminator, PERIODS), *(SpectrumDiscriminator(*sizes) for sizes in RESOLUTIONS)]
        )

    def forward(self, wave: Tensor) -> list[list[Tensor]]:
        """Outputs of all parts for wave [B, n]."""
        with torch.autocast(wave.device.type, torch.bfloat16, enabled=wave.is_cuda):
            return [part(wave) for part in self.parts]


def discriminator_loss(real: list[list[Tensor]], generated: list[list[Tensor]]) -> Tensor:
    """Mean squared distance of the scores from one and from zero."""
    pairs = zip(real, generated, strict=True)
    return torch.stack([(1 - a[-1].float()).square().mean() + b[-1].float().square().mean() for a, b in pairs]).mean()


def generator_loss(generated: list[list[Tensor]]) -> Tensor:
    """Mean squared distance of the scores of generated sound from one."""
    return torch.stack([(1 - outputs[-1].float()).square().mean() for outputs in generated]).mean()


def feature_loss(real: list[list[Tensor]], generated: list[list[Tensor]]) -> Tensor:
    """Mean distance of all layers' outputs, relative to their size for real sound."""
    distances = []
    for a, b in zip(real, generated, strict=True):
        for left, right in zip(a[:-1], b[:-1], strict=True):
            left = left.detach().float()
            distances.append((left - right.float()).abs().mean() / left.abs().mean().clamp_min(1e-4))
    return torch.stack(distances).mean()


def _outputs(x: Tensor, convs: nn.ModuleList, last: nn.Module) -> list[Tensor]:
    outputs = []
    for conv in convs:
        x = F.leaky_relu(conv(x), SLOPE)
        outputs.append(x)
    return [*outputs, last(x)]
