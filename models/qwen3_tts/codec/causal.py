"""Causal convolutions that continue where the previous chunk of the same slot ended.

Contains the layers and the columns that they keep. Does not contain slots (`state`) or the networks made of them.

A convolution reads the last columns of the previous chunk before those of the new one. `ChunkColumns` hands these out
in the order in which the layers run, and collects the columns that the next chunk needs.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ChunkColumns:
    """Kept columns of all convolutions, for the rows of one call."""

    def __init__(self, before: Tensor, n_frames: Tensor):
        """
        Args:
            before: [B, N] kept columns of every layer, in the order in which the layers run.
            n_frames: [B] int64 valid frames of each row in this call.
        """
        self._before, self._n_frames = before, n_frames
        self._taken = 0
        self._after: list[Tensor] = []

    def join(self, x: Tensor, n_kept: int, per_frame: int) -> Tensor:
        """The next layer's kept columns followed by its new ones.

        Args:
            x: [B, C, L] new columns; undefined beyond `per_frame * n_frames`.
            n_kept: columns that the layer keeps.
            per_frame: columns of one frame.
        Returns: [B, C, n_kept + L].
        """
        B, C, _ = x.shape
        kept = self._before.narrow(1, self._taken, C * n_kept).view(B, C, n_kept)
        self._taken += C * n_kept
        joined = torch.cat((kept, x), dim=2)
        column = per_frame * self._n_frames[:, None] + torch.arange(n_kept, device=x.device)
        self._after.append(joined.gather(2, column[:, None].expand(-1, C, -1)).flatten(1))
        return joined

    def after(self) -> Tensor:
        """[B, N] kept columns after the call."""
        assert self._taken == self._before.shape[1], (
            f"kept columns: expected {self._before.shape[1]} values to be read, got {self._taken}"
        )
        return torch.cat(self._after, dim=1)


class Streamed(nn.Module):
    """A layer that keeps columns. n_values: how many values it keeps for a slot."""

    n_values: int


class StreamedConv(Streamed):
    """Causal convolution: column t reads the columns up to t."""

    def __init__(self, width_in: int, width_out: int, kernel: int, per_frame: int, dilation: int = 1, groups: int = 1):
        super().__init__()
        self.per_frame, self.n_kept = per_frame, dilation * (kernel - 1)
        self.n_values = width_in * self.n_kept
        self.conv = nn.Conv1d(width_in, width_out, kernel, dilation=dilation, groups=groups)

    def forward(self, x: Tensor, columns: ChunkColumns) -> Tensor:
        """[B, C_out, L] of x [B, C_in, L]."""
        out: Tensor = self.conv(columns.join(x, self.n_kept, self.per_frame))
        return out


class StreamedUpsampling(Streamed):
    """Transposed convolution of two strides, cut at its end: each column reads two, the newest and the one before."""

    def __init__(self, width_in: int, width_out: int, stride: int, per_frame: int):
        """per_frame: columns of a frame before the layer."""
        super().__init__()
        self.stride, self.per_frame = stride, per_frame
        self.n_values = width_in
        self.conv = nn.ConvTranspose1d(width_in, width_out, 2 * stride, stride)

    def forward(self, x: Tensor, columns: ChunkColumns) -> Tensor:
        """[B, C_out, stride * L] of x [B, C_in, L]."""
        out: Tensor = self.conv(columns.join(x, 1, self.per_frame))
        return out.narrow(2, self.stride, self.stride * x.shape[2])


class ScaledLayer(nn.Module):
    """Multiplies each channel of the last dimension by a learned factor."""

    def __init__(self, width: int):
        super().__init__()
        self.scale = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x


class ConvNeXt(Streamed):
    """Depthwise causal convolution, norm and MLP over channels, added to the input."""

    KERNEL = 7

    def __init__(self, width: int, per_frame: int):
        super().__init__()
        self.gamma = nn.Parameter(torch.empty(width))
        self.dwconv = StreamedConv(width, width, self.KERNEL, per_frame, groups=width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.pwconv1 = nn.Linear(width, 4 * width)
        self.pwconv2 = nn.Linear(4 * width, width)
        self.n_values = 0  # those of `dwconv` are its own

    def forward(self, x: Tensor, columns: ChunkColumns) -> Tensor:
        rows = self.norm(self.dwconv(x, columns).transpose(1, 2))
        rows = self.gamma * self.pwconv2(F.gelu(self.pwconv1(rows)))
        out: Tensor = x + rows.transpose(1, 2)
        return out
