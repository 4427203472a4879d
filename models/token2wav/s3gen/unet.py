"""Chatterbox's velocity estimator, a one-level U-Net, and the Euler solve with it.

Convolutions are causal and attention is masked to valid frames. Therefore finite padding on the right does not change
the result, and lengths can be rounded up to a bucket. Does not contain speech tokens or time grids. Parameter names are
the checkpoint's.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.errors import CheckpointError
from models.layers.transformer import Derived, attend
from models.token2wav.settings import UNetConfig

RELEASED_HEAD_DIM = 64
_WIDEN = 4  # width of the time embedding and of the feed-forward layers, in multiples of the channels
_FINAL, _FIRST, _QUERY = "final_proj.weight", "time_mlp.linear_1.weight", "down_blocks.0.1.0.attn1.to_q.weight"
_MIXER = "time_embed_mixer.weight"


def config_of(tensors: Mapping[str, Tensor], head_dim: int = RELEASED_HEAD_DIM) -> UNetConfig:
    """The sizes that the shapes of a checkpoint's tensors determine, given the width of a head.

    Raises: CheckpointError if one of these tensors is missing, or if the shapes do not belong to a network of this
        kind.
    """
    names = (_FINAL, _FIRST, _QUERY)
    shapes = {name: list(tensors[name].shape) for name in names if name in tensors}
    try:
        (out_channels, *_), (_, in_channels), (inner, channels) = shapes.values()
        if inner % head_dim:
            raise ValueError(f"{inner} rows of queries for heads of {head_dim}")
        return UNetConfig(
            in_channels=in_channels,
            out_channels=out_channels,
            channels=channels,
            heads=inner // head_dim,
            head_dim=head_dim,
            blocks=_count(tensors, "down_blocks.0.1."),
            mid_blocks=_count(tensors, "mid_blocks."),
            meanflow=_MIXER in tensors,
        )
    except ValueError as error:
        expected = f"{', '.join(names)} that fit each other and heads of {head_dim}"
        raise CheckpointError("U-Net estimator", expected=expected, got=shapes or "none of them") from error


def _count(names: Iterable[str], prefix: str) -> int:
    """The number of members of a module list."""
    return len({name[len(prefix) :].partition(".")[0] for name in names if name.startswith(prefix)})


@dataclass(frozen=True)
class UNetConditions:
    """Inputs of the estimator that are the same at all Euler steps."""

    mask: Tensor  # [B, T] bool: valid frames, the first ones of a row; the others are finite
    mu: Tensor  # [B, n_mels, T] the encoder's mel
    speaker: Tensor  # [B, C_speaker] projected speaker vector
    prompt: Tensor  # [B, n_mels, T] the prompt's mel, zero after it


class CausalConv(nn.Conv1d):
    """Causal convolution over time of rows [B, T, C_in] -> [B, T, C_out]."""

    def forward(self, x: Tensor) -> Tensor:
        padded = F.pad(x.transpose(1, 2), (self.kernel_size[0] - 1, 0))
        return F.conv1d(padded, self.weight, self.bias).transpose(1, 2)


class ConvNorm(nn.Module):
    """Causal convolution -> norm over channels -> mish."""

    def __init__(self, channels_in: int, channels: int):
        super().__init__()
        # The checkpoint numbers layers without weights too, hence the gaps.
        self.block = nn.ModuleDict({"0": CausalConv(channels_in, channels, 3), "2": nn.LayerNorm(channels)})

    def forward(self, x: Tensor) -> Tensor:
        return F.mish(self.block["2"](self.block["0"](x)))


class ResnetBlock(nn.Module):
    """Two convolutions, with the time embedding added between them, and a 1x1 convolution as the shortcut."""

    def __init__(self, channels_in: int, channels: int):
        super().__init__()
        self.mlp = nn.ModuleDict({"1": nn.Linear(_WIDEN * channels, channels)})
        self.block1 = ConvNorm(channels_in, channels)
        self.block2 = ConvNorm(channels, channels)
        self.res_conv = CausalConv(channels_in, channels, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """[B, T, C] for x [B, T, C_in] and the time embedding [B, 4 C] after its mish."""
        inner = self.block1(x) + self.mlp["1"](time)[:, None]
        out: Tensor = self.block2(inner) + self.res_conv(x)
        return out


class UNetAttention(nn.Module):
    """Self-attention without positions; queries, keys and values have no bias."""

    def __init__(self, width: int, heads: int, head_dim: int):
        super().__init__()
        self.heads, self.head_dim = heads, head_dim
        self.to_q = nn.Linear(width, heads * head_dim, bias=False)
        self.to_k = nn.Linear(width, heads * head_dim, bias=False)
        self.to_v = nn.Linear(width, heads * head_dim, bias=False)
        self.to_out = nn.ModuleDict({"0": nn.Linear(heads * head_dim, width)})

    def forward(self, x: Tensor, keys: Tensor) -> Tensor:
        q, k, v = (to(x).view(*x.shape[:2], self.heads, self.head_dim) for to in (self.to_q, self.to_k, self.to_v))
        out: Tensor = self.to_out["0"](attend(q, k.transpose(1, 2), v.transpose(1, 2), keys))
        return out


class GELUProjection(nn.Module):
    """A linear layer and the exact GELU."""

    def __init__(self, width: int, inner: int):
        super().__init__()
        self.proj = nn.Linear(width, inner)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.proj(x))


class UNetFeedForward(nn.Module):
    """Two linear layers with a GELU between them."""

    def __init__(self, width: int, inner: int):
        super().__init__()
        self.net = nn.ModuleDict({"0": GELUProjection(width, inner), "2": nn.Linear(inner, width)})

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net["2"](self.net["0"](x))
        return out


class TransformerBlock(nn.Module):
    """Pre-norm attention and feed-forward with residual connections."""

    def __init__(self, config: UNetConfig):
        super().__init__()
        self.norm1 = nn.LayerNorm(config.channels)
        self.attn1 = UNetAttention(config.channels, config.heads, config.head_dim)
        self.norm3 = nn.LayerNorm(config.channels)
        self.ff = UNetFeedForward(config.channels, _WIDEN * config.channels)

    def forward(self, x: Tensor, keys: Tensor) -> Tensor:
        x = x + self.attn1(self.norm1(x), keys)
        added: Tensor = self.ff(self.norm3(x))
        return x + added


class Stage(nn.ModuleList):
    """A resnet block, then transformer blocks; the first and the last stage end with a causal convolution."""

    def __init__(self, config: UNetConfig, channels_in: int, *, has_conv: bool):
        parts: list[nn.Module] = [
            ResnetBlock(channels_in, config.channels),
            nn.ModuleList(TransformerBlock(config) for _ in range(config.blocks)),
        ]
        if has_conv:
            parts.append(CausalConv(config.channels, config.channels, 3))
        super().__init__(parts)

    def forward(self, x: Tensor, keys: Tensor, time: Tensor) -> Tensor:
        """[B, T, C], the output before the last convolution.

        Args:
            x: [B, T, C_in].
            keys: [B, 1, T] bool frames to attend to.
            time: [B, 4 C] time embedding after its mish.
        """
        x = self[0](x, time)
        for block in self[1].children():
            x = block(x, keys)
        return x

    def conv(self, x: Tensor) -> Tensor:
        """The last convolution, of stages that have one."""
        out: Tensor = self[2](x)
        return out


class TimeMLP(nn.Module):
    """Two linear layers with a SiLU between them."""

    def __init__(self, width_in: int, width: int):
        super().__init__()
        self.linear_1 = nn.Linear(width_in, width)
        self.linear_2 = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear_2(F.silu(self.linear_1(x)))
        return out


class UNetEstimator(Derived):
    """Velocity of a noisy mel at a time; the mean-flow variant also takes the time at the end of the step."""

    frequencies: Tensor  # [in_channels / 2] float32

    def __init__(self, config: UNetConfig):
        super().__init__()
        self.config = config
        channels, width = config.channels, _WIDEN * config.channels
        self.time_mlp = TimeMLP(config.in_channels, width)
        if config.meanflow:
            self.time_embed_mixer = nn.Linear(2 * width, width, bias=False)
        self.down_blocks = nn.ModuleList([Stage(config, config.in_channels, has_conv=True)])
        self.mid_blocks = nn.ModuleList(Stage(config, channels, has_conv=False) for _ in range(config.mid_blocks))
        self.up_blocks = nn.ModuleList([Stage(config, 2 * channels, has_conv=True)])
        self.final_block = ConvNorm(channels, channels)
        self.final_proj = CausalConv(channels, config.out_channels, 1)
        self.register_buffer("frequencies", torch.empty(config.in_channels // 2), persistent=False)

    def derive(self, device: torch.device | str, dtype: torch.dtype) -> None:
        n = self.config.in_channels // 2
        exponents = torch.arange(n, dtype=torch.float64) / (n - 1)
        # Times in [0, 1] are scaled by 1000 before their sines.
        self.frequencies = (1000 * torch.exp(-math.log(10_000) * exponents)).float().to(device)

    def embed_times(self, t: Tensor, r: Tensor | None = None) -> Tensor:
        """The embedding [B, 4 C] of times [B] float32; with the mean flow also of the next times `r` [B]."""
        assert (r is not None) == self.config.meanflow, "expected the next time with the mean flow and only there"
        if r is None:
            return self._embed_time(t)
        mixed: Tensor = self.time_embed_mixer(torch.cat((self._embed_time(t), self._embed_time(r)), dim=-1))
        return mixed

    def _embed_time(self, t: Tensor) -> Tensor:
        angles = t.float()[:, None] * self.frequencies
        waves = torch.cat((angles.sin(), angles.cos()), dim=-1)
        embedded: Tensor = self.time_mlp(waves.to(self.time_mlp.linear_1.weight.dtype))
        return embedded

    def forward(self, x: Tensor, conditions: UNetConditions, t: Tensor, r: Tensor | None = None) -> Tensor:
        """The velocity at every valid frame, [B, n_mels, T]; zero at frames of padding.

        Args:
            x: [B, n_mels, T] noisy mel.
            conditions: mask, encoder's mel, speaker and prompt.
            t: [B] in [0, 1].
            r: [B] time at the end of the step; with the mean flow only.
        """
        return self.velocity(x, conditions, self.embed_times(t, r))

    def velocity(self, x: Tensor, conditions: UNetConditions, time: Tensor) -> Tensor:
        """`forward` with embedded times `time` [B, 4 C]."""
        speaker = conditions.speaker[..., None].expand(-1, -1, x.shape[-1])
        rows = torch.cat((x, conditions.mu, speaker, conditions.prompt), dim=1).transpose(1, 2)
        keys, time = _visible_keys(conditions.mask)[:, None], F.mish(time)
        first, last = cast(Stage, self.down_blocks[0]), cast(Stage, self.up_blocks[0])
        skip = first(rows, keys, time)
        rows = first.conv(skip)
        for stage in self.mid_blocks:
            rows = stage(rows, keys, time)
        rows = last.conv(last(torch.cat((rows, skip), dim=-1), keys, time))
        rows = torch.where(conditions.mask[..., None], self.final_proj(self.final_block(rows)), 0)
        return rows.transpose(1, 2)


def _visible_keys(mask: Tensor) -> Tensor:
    """[B, T] bool: the valid frames, and always the first frame, so that a row without valid frames stays finite."""
    return mask | (torch.arange(mask.shape[1], device=mask.device) == 0)


def solve(estimator: UNetEstimator, noise: Tensor, conditions: UNetConditions, grid: Tensor, cfg_rate: float) -> Tensor:
    """Mel [B, n_mels, T] float32 after Euler steps over a grid of times; zero at frames of padding.

    Args:
        estimator: the networks.
        noise: [B, n_mels, T].
        conditions: as `UNetEstimator.forward`.
        grid: [N + 1] times from 0 to 1, on the device of the others; N is static.
        cfg_rate: weight of classifier-free guidance, for which each step has a second half without conditions. The mean
            flow includes the guidance, so it has no second half.
    """
    # The velocity of padding is zero, so a frame of padding keeps its initial value.
    x = torch.where(conditions.mask[:, None], noise, 0.0).float()
    steps, dtype = grid.diff().float(), conditions.mu.dtype
    if estimator.config.meanflow:
        times = estimator.embed_times(grid[:-1], grid[1:])
        for i in range(len(steps)):
            time = times[i].expand(len(x), -1)
            x = x + steps[i] * estimator.velocity(x.to(dtype), conditions, time).float()
        return x

    times = estimator.embed_times(grid[:-1])
    given = conditions.mu, conditions.speaker, conditions.prompt
    mask = torch.cat((conditions.mask, conditions.mask))
    halves = UNetConditions(mask, *(torch.cat((part, torch.zeros_like(part))) for part in given))
    for i in range(len(steps)):
        time = times[i].expand(2 * len(x), -1)
        velocity = estimator.velocity(torch.cat((x, x)).to(dtype), halves, time).float()
        conditional, unconditional = velocity.chunk(2)
        x = x + steps[i] * ((1 + cfg_rate) * conditional - cfg_rate * unconditional)
    return x
