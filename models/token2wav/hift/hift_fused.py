"""HiFT on a GPU: residual blocks on the project's own kernels, blocks of the same shape in one launch.

Contains weights and the order of the launches; the kernels are in `hift_kernels`. Results equal `Hift` up to rounding,
which tests verify. Requires Triton.
"""

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from models.token2wav.hift.hift import LAST_SLOPE, LIMIT, SLOPE, UPS, Hift, ResBlock, Snake, conv_as_2d, spectrum_of
from models.token2wav.hift.hift_kernels import ConvStep, activate, average, conv
from models.token2wav.settings import SAMPLES_PER_FRAME


class _Blocks(NamedTuple):
    """J residual blocks with the same input and the same number of convolution pairs."""

    pairs: list[tuple[ConvStep, ConvStep]]  # the dilated and the plain convolutions of all blocks
    alphas: list[tuple[Tensor, Tensor]]  # [J, C] float32 of the activations before them


class FusedHift:
    """A `HiftBackend` of kernels. Weights of residual blocks are copied at construction; others belong to the Hift."""

    is_fused: ClassVar[bool] = True

    def __init__(self, hift: Hift):
        self.hift, self.m_source = hift, hift.m_source
        stages = list(hift.stages())
        self.sources = [_blocks([source_block]) for _, _, source_block, _ in stages]
        self.stages = [_blocks(blocks) for _, _, _, blocks in stages]

    def f0(self, mel: Tensor, n_frames: Tensor) -> Tensor:
        """As `Hift.f0`."""
        return self.hift.f0(mel, n_frames)

    def decode(self, mel: Tensor, source: Tensor, n_frames: Tensor) -> Tensor:
        """As `Hift.decode`."""
        n_samples, spectral = SAMPLES_PER_FRAME * n_frames, self.hift.spectral
        magnitude, phase = self.spectrum(mel, spectral.stft(source, n_samples), n_frames)
        return spectral.istft(magnitude, phase, n_samples).clamp(-LIMIT, LIMIT)

    def spectrum(self, mel: Tensor, source_stft: Tensor, n_frames: Tensor) -> tuple[Tensor, Tensor]:
        """As `Hift.spectrum`."""
        hift, dtype = self.hift, self.hift.conv_pre.weight.dtype
        valid = torch.arange(mel.shape[2], device=mel.device) < n_frames[:, None]
        # `where` instead of a product, because padding may be NaN.
        frames = torch.where(valid[..., None], mel.transpose(1, 2), 0.0).to(dtype)
        waves = source_stft.transpose(1, 2).to(dtype, memory_format=torch.contiguous_format)
        bias: Tensor | None
        blocks, bias, length = _apply(hift.conv_pre, frames)[None], _bias(hift.conv_pre), n_frames
        for n, (up, down, _, _) in enumerate(hift.stages()):
            raised = _apply(up, average(blocks, bias, length, SLOPE, dtype))
            length = length * UPS[n][1]
            L = raised.shape[1]
            if n == len(self.stages) - 1:
                L, length = L + 1, length + 1  # the STFT has one window more than hops
            stream, active = activate(_apply(down, waves), _bias(down), self.sources[n].alphas[0][0], L, dtype)
            added = _run(self.sources[n], stream, active, length)
            stream, active = activate(raised, _bias(up), self.stages[n].alphas[0][0], L, dtype, added)
            blocks, bias = _run(self.stages[n], stream, active, length), None
        last = hift.conv_post
        x = _apply(last, average(blocks, None, length, LAST_SLOPE, last.weight.dtype)) + _bias(last)
        return spectrum_of(x.transpose(1, 2))


def _run(blocks: _Blocks, stream: Tensor, active: Tensor, lengths: Tensor) -> Tensor:
    """All convolution pairs of the blocks, [J, B, L, C] float32.

    Args:
        stream: [1, B, L, C] float32 residual stream from `activate`.
        active: [J, B, L, C] activated input from `activate`.
        lengths: [B] int64.
    """
    for n, (dilated, plain) in enumerate(blocks.pairs):
        hidden, _ = conv(active, lengths, dilated, blocks.alphas[n][1])
        alpha = blocks.alphas[n + 1][0] if n + 1 < len(blocks.pairs) else None
        assert hidden is not None, "expected an activated output"
        out, total = conv(hidden, lengths, plain, alpha, stream)
        assert total is not None, "expected a residual stream"
        stream = total
        if out is not None:
            active = out
    return stream


def _blocks(blocks: Sequence[ResBlock]) -> _Blocks:
    pairs, alphas = [], []
    for layers in zip(*(block.pairs() for block in blocks), strict=True):
        snakes1, dilated, snakes2, plain = zip(*layers, strict=True)
        pairs.append((_step(dilated), _step(plain)))
        alphas.append((_alphas(snakes1), _alphas(snakes2)))
    return _Blocks(pairs, alphas)


def _alphas(snakes: Sequence[Snake]) -> Tensor:
    return torch.stack([snake.alpha for snake in snakes]).float()


def _bias(conv: nn.Conv1d | nn.ConvTranspose1d) -> Tensor:
    assert conv.bias is not None, "expected a convolution with a bias"
    return conv.bias


def _step(convs: Sequence[nn.Conv1d]) -> ConvStep:
    taps = [conv.kernel_size[0] for conv in convs]
    device = convs[0].weight.device
    return ConvStep(
        weight=torch.cat([conv.weight.permute(2, 0, 1) for conv in convs]).contiguous(),
        bias=torch.stack([_bias(conv) for conv in convs]),
        taps=torch.tensor(taps, dtype=torch.int32, device=device),
        first=torch.tensor([sum(taps[:n]) for n in range(len(taps))], dtype=torch.int32, device=device),
        dilation=convs[0].dilation[0],
    )


def _apply(conv: nn.Conv1d | nn.ConvTranspose1d, x: Tensor) -> Tensor:
    """A convolution without its bias, [B, L', C'] for x [B, L, C], with channels last in memory throughout."""
    return conv_as_2d(conv, x.transpose(1, 2), None).transpose(1, 2).contiguous()
