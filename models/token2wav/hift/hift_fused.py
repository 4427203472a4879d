"""HiFT as it runs on a GPU: its residual blocks made of kernels, those that are alike in one launch.

Knows weights and order. Computes what `Hift` computes, to rounding: tests hold the two against each other.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.token2wav.hift.hift import KERNELS, LAST_SLOPE, LIMIT, SLOPE, UPS, Hift, ResBlock, spectrum_of
from models.token2wav.hift.hift_kernels import ConvStep, conv, enter, leave
from models.token2wav.settings import SAMPLES_PER_FRAME


class _Blocks(NamedTuple):
    """Residual blocks that read the same rows, all with as many steps."""

    steps: list[tuple[ConvStep, ConvStep]]  # the dilated and the plain convolutions, one of each block
    alphas: list[tuple[Tensor, Tensor]]  # [J, C] float32 of the activations before them


class FusedHift:
    """Stands for one `Hift`. Weights of the residual blocks are copied once; all others are its own."""

    def __init__(self, hift: Hift):
        self.hift, self.f0, self.m_source = hift, hift.f0, hift.m_source
        n = len(KERNELS)
        self.sources = [_blocks([block]) for block in hift.source_resblocks]
        self.stages = [_blocks(hift.resblocks[i * n : (i + 1) * n]) for i in range(len(self.sources))]

    def decode(self, mel: Tensor, source: Tensor, n_frames: Tensor) -> Tensor:
        """As `Hift.decode`."""
        n_samples, spectral = SAMPLES_PER_FRAME * n_frames, self.hift.spectral
        magnitude, phase = self.spectrum(mel, spectral.stft(source, n_samples), n_frames)
        return spectral.istft(magnitude, phase, n_samples).clamp(-LIMIT, LIMIT)

    def spectrum(self, mel: Tensor, source_stft: Tensor, n_frames: Tensor) -> tuple[Tensor, Tensor]:
        """As `Hift.spectrum`."""
        hift, dtype = self.hift, self.hift.conv_pre.weight.dtype
        valid = torch.arange(mel.shape[2], device=mel.device) < n_frames[:, None]
        # Not a product: what lies beyond the end may be NaN.
        frames = torch.where(valid[..., None], mel.transpose(1, 2), 0.0).to(dtype)
        waves = source_stft.transpose(1, 2).to(dtype, memory_format=torch.contiguous_format)
        blocks, bias, length = _apply(hift.conv_pre, frames)[None], hift.conv_pre.bias, n_frames
        for n, (up, down) in enumerate(zip(hift.ups, hift.source_downs, strict=True)):
            raised = _apply(up, leave(blocks, bias, length, SLOPE, dtype))
            length = length * UPS[n][1]
            L = raised.shape[1]
            if n == len(self.stages) - 1:
                L, length = L + 1, length + 1  # one more than hops, as many as windows
            stream, active = enter(_apply(down, waves), down.bias, self.sources[n].alphas[0][0], L, dtype)
            added = _run(self.sources[n], stream, active, length)
            stream, active = enter(raised, up.bias, self.stages[n].alphas[0][0], L, dtype, added)
            blocks, bias = _run(self.stages[n], stream, active, length), None
        last = hift.conv_post
        x = _apply(last, leave(blocks, None, length, LAST_SLOPE, last.weight.dtype)) + last.bias
        return spectrum_of(x.transpose(1, 2))


def _run(blocks: _Blocks, stream: Tensor, active: Tensor | None, lengths: Tensor) -> Tensor:
    """All steps of the blocks, from what `enter` made. Returns: [J, B, L, C] float32."""
    for n, (dilated, plain) in enumerate(blocks.steps):
        active, _ = conv(active, lengths, dilated, blocks.alphas[n][1])
        alpha = blocks.alphas[n + 1][0] if n + 1 < len(blocks.steps) else None
        active, stream = conv(active, lengths, plain, alpha, stream)
    return stream


def _blocks(blocks: Sequence[ResBlock]) -> _Blocks:
    first = blocks[0]
    steps, alphas = [], []
    for n in range(len(first.convs1)):
        steps.append((_step([b.convs1[n] for b in blocks]), _step([b.convs2[n] for b in blocks])))
        pair = [b.activations1[n].alpha for b in blocks], [b.activations2[n].alpha for b in blocks]
        alphas.append(tuple(torch.stack(of).float() for of in pair))
    return _Blocks(steps, alphas)


def _step(convs: Sequence[nn.Conv1d]) -> ConvStep:
    taps = [conv.kernel_size[0] for conv in convs]
    device = convs[0].weight.device
    return ConvStep(
        weight=torch.cat([conv.weight.permute(2, 0, 1) for conv in convs]).contiguous(),
        bias=torch.stack([conv.bias for conv in convs]),
        taps=torch.tensor(taps, dtype=torch.int32, device=device),
        first=torch.tensor([sum(taps[:n]) for n in range(len(taps))], dtype=torch.int32, device=device),
        dilation=convs[0].dilation[0],
    )


def _apply(conv: nn.Conv1d | nn.ConvTranspose1d, x: Tensor) -> Tensor:
    """A convolution without its bias, [B, L, C] to [B, L', C'], channels last in memory all the way."""
    picture, kernel = x.transpose(1, 2)[:, :, None], conv.weight[:, :, None]
    stride, padding, dilation = (
        (one, *along) for one, along in ((1, conv.stride), (0, conv.padding), (1, conv.dilation))
    )
    if isinstance(conv, nn.ConvTranspose1d):
        out = F.conv_transpose2d(picture, kernel, None, stride, padding, dilation=dilation)
    else:
        out = F.conv2d(picture, kernel, None, stride, padding, dilation)
    return out[:, :, 0].transpose(1, 2).contiguous()
