"""Chatterbox's estimator of the flow's velocity, a one-level U-Net, and the flow solved with it.

Convolutions are causal and attention sees valid frames only. So frames of padding on the right, as long as they are
finite, change nothing, and lengths can be rounded up to a bucket. Knows shapes; no codes, no time grids.
Parameter names are the checkpoint's.
"""

import math
from collections.abc import Iterable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.errors import CheckpointError
from models.layers.transformer import Derived, attend
from models.token2wav.settings import UNetConfig

RELEASED_HEAD_DIM = 64
_WIDEN = 4  # how much wider than the channels the time embedding and the feed-forward layers are
_FINAL, _FIRST, _QUERY = "final_proj.weight", "time_mlp.linear_1.weight", "down_blocks.0.1.0.attn1.to_q.weight"
_MIXER = "time_embed_mixer.weight"


def config_of(tensors: Mapping[str, Tensor], head_dim: int = RELEASED_HEAD_DIM) -> UNetConfig:
    """Sizes, read off the shapes of a checkpoint's tensors; how wide a head is, they do not say.

    Raises: CheckpointError if a tensor that tells one is missing, or if they tell no network of this kind.
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
    """How many different members of a module list there are."""
    return len({name[len(prefix) :].partition(".")[0] for name in names if name.startswith(prefix)})


class CausalConv(nn.Conv1d):
    """Convolution over time of rows [B, T, C_in] -> [B, T, C_out] that sees no later frame."""

    def forward(self, x: Tensor) -> Tensor:
        padded = F.pad(x.transpose(1, 2), (self.kernel_size[0] - 1, 0))
        return F.conv1d(padded, self.weight, self.bias).transpose(1, 2)


class ConvNorm(nn.Module):
    """Causal convolution -> norm over channels -> mish."""

    def __init__(self, channels_in: int, channels: int):
        super().__init__()
        # The names leave room for the layers without weights that other writers put between and after.
        self.block = nn.ModuleDict({"0": CausalConv(channels_in, channels, 3), "2": nn.LayerNorm(channels)})

    def forward(self, x: Tensor) -> Tensor:
        return F.mish(self.block["2"](self.block["0"](x)))


class ResnetBlock(nn.Module):
    """Two convolutions with the time added between them, beside a 1x1 convolution."""

    def __init__(self, channels_in: int, channels: int):
        super().__init__()
        self.mlp = nn.ModuleDict({"1": nn.Linear(_WIDEN * channels, channels)})
        self.block1 = ConvNorm(channels_in, channels)
        self.block2 = ConvNorm(channels, channels)
        self.res_conv = CausalConv(channels_in, channels, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """x [B, T, C_in], time [B, 4 C] after its mish -> [B, T, C]."""
        inner = self.block1(x) + self.mlp["1"](time)[:, None]
        return self.block2(inner) + self.res_conv(x)


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
        return self.to_out["0"](attend(q, k.transpose(1, 2), v.transpose(1, 2), keys))


class GELUProjection(nn.Module):
    """Linear -> GELU (exact)."""

    def __init__(self, width: int, inner: int):
        super().__init__()
        self.proj = nn.Linear(width, inner)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.proj(x))


class UNetFeedForward(nn.Module):
    """Widen, GELU, narrow."""

    def __init__(self, width: int, inner: int):
        super().__init__()
        self.net = nn.ModuleDict({"0": GELUProjection(width, inner), "2": nn.Linear(inner, width)})

    def forward(self, x: Tensor) -> Tensor:
        return self.net["2"](self.net["0"](x))


class TransformerBlock(nn.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream."""

    def __init__(self, config: UNetConfig):
        super().__init__()
        self.norm1 = nn.LayerNorm(config.channels)
        self.attn1 = UNetAttention(config.channels, config.heads, config.head_dim)
        self.norm3 = nn.LayerNorm(config.channels)
        self.ff = UNetFeedForward(config.channels, _WIDEN * config.channels)

    def forward(self, x: Tensor, keys: Tensor) -> Tensor:
        x = x + self.attn1(self.norm1(x), keys)
        return x + self.ff(self.norm3(x))


class Stage(nn.ModuleList):
    """A resnet block, then transformer blocks; the outer two stages end with a causal convolution."""

    def __init__(self, config: UNetConfig, channels_in: int, *, has_conv: bool):
        parts = [
            ResnetBlock(channels_in, config.channels),
            nn.ModuleList(TransformerBlock(config) for _ in range(config.blocks)),
        ]
        if has_conv:
            parts.append(CausalConv(config.channels, config.channels, 3))
        super().__init__(parts)

    def forward(self, x: Tensor, keys: Tensor, time: Tensor) -> Tensor:
        """Everything but the last convolution: x [B, T, C_in], keys [B, 1, T] to look at -> [B, T, C]."""
        x = self[0](x, time)
        for block in self[1]:
            x = block(x, keys)
        return x


class TimeMLP(nn.Module):
    """linear_1 -> SiLU -> linear_2."""

    def __init__(self, width_in: int, width: int):
        super().__init__()
        self.linear_1 = nn.Linear(width_in, width)
        self.linear_2 = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_2(F.silu(self.linear_1(x)))


class UNetEstimator(Derived):
    """Velocity of the flow at a noisy mel and a time; the mean-flow variant also takes the time to go to."""

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
        # 1000 is the scale of the times, [0, 1], before their sines.
        self.frequencies = (1000 * torch.exp(-math.log(10_000) * exponents)).float().to(device)

    def embed_times(self, t: Tensor, r: Tensor | None = None) -> Tensor:
        """The embedding of times [B] float32 -> [B, 4 C]; with the mean flow also of the next times `r` [B]."""
        assert (r is not None) == self.config.meanflow, "expected the next time with the mean flow and only there"
        if r is None:
            return self._embed_time(t)
        return self.time_embed_mixer(torch.cat((self._embed_time(t), self._embed_time(r)), dim=-1))

    def _embed_time(self, t: Tensor) -> Tensor:
        angles = t.float()[:, None] * self.frequencies
        waves = torch.cat((angles.sin(), angles.cos()), dim=-1)
        return self.time_mlp(waves.to(self.time_mlp.linear_1.weight.dtype))

    def forward(
        self, x: Tensor, mask: Tensor, mu: Tensor, t: Tensor, spks: Tensor, cond: Tensor, r: Tensor | None = None
    ) -> Tensor:
        """The velocity at every valid frame.

        Args:
            x, mu, cond: [B, n_mels, T]: noisy mel, the encoder's mel, the prompt's mel (zero after it).
            mask: [B, T] bool, true for valid frames, which are the first ones of a row; the others are finite.
            t: [B] in [0, 1]. r: [B], the time the step ends at; with the mean flow only.
            spks: [B, C_speaker], the projected speaker vector.
        Returns: [B, n_mels, T], zero at frames of padding.
        """
        return self.velocity(x, mask, mu, self.embed_times(t, r), spks, cond)

    def velocity(self, x: Tensor, mask: Tensor, mu: Tensor, time: Tensor, spks: Tensor, cond: Tensor) -> Tensor:
        """`forward` with times that are embedded already, `time` [B, 4 C]."""
        rows = torch.cat((x, mu, spks[..., None].expand(-1, -1, x.shape[-1]), cond), dim=1).transpose(1, 2)
        keys, time = _visible_keys(mask)[:, None], F.mish(time)
        skip = self.down_blocks[0](rows, keys, time)
        rows = self.down_blocks[0][2](skip)
        for stage in self.mid_blocks:
            rows = stage(rows, keys, time)
        rows = self.up_blocks[0][2](self.up_blocks[0](torch.cat((rows, skip), dim=-1), keys, time))
        rows = torch.where(mask[..., None], self.final_proj(self.final_block(rows)), 0)
        return rows.transpose(1, 2)


def _visible_keys(mask: Tensor) -> Tensor:
    """[B, T] bool: valid frames, and the first one always, so that a row without any stays finite."""
    return mask | (torch.arange(mask.shape[1], device=mask.device) == 0)


def solve(
    estimator: UNetEstimator,
    noise: Tensor,
    mask: Tensor,
    mu: Tensor,
    spks: Tensor,
    cond: Tensor,
    grid: Tensor,
    cfg_rate: float,
) -> Tensor:
    """Follow the flow from noise to mel by Euler steps over a grid of times.

    Args:
        noise, mu, cond: [B, n_mels, T]; mask: [B, T]; spks: [B, C]; as `UNetEstimator.forward` takes them.
        grid: [N + 1] times from 0 to 1, on the device of the others; N is static.
        cfg_rate: weight of classifier-free guidance, by which each step takes a second row without conditions.
            The mean flow has learned what guidance does and takes none.
    Returns: [B, n_mels, T] float32, zero at frames of padding.
    """
    # A frame of padding keeps what it starts with: its velocity is zero.
    x = torch.where(mask[:, None], noise, 0.0).float()
    steps = grid.diff().float()
    if estimator.config.meanflow:
        times = estimator.embed_times(grid[:-1], grid[1:])
        for i in range(len(steps)):
            time = times[i].expand(len(x), -1)
            x = x + steps[i] * estimator.velocity(x.to(mu.dtype), mask, mu, time, spks, cond).float()
        return x

    times = estimator.embed_times(grid[:-1])
    mu, spks, cond = (torch.cat((part, torch.zeros_like(part))) for part in (mu, spks, cond))
    mask = torch.cat((mask, mask))
    for i in range(len(steps)):
        time = times[i].expand(2 * len(x), -1)
        velocity = estimator.velocity(torch.cat((x, x)).to(mu.dtype), mask, mu, time, spks, cond).float()
        conditional, unconditional = velocity.chunk(2)
        x = x + steps[i] * ((1 + cfg_rate) * conditional - cfg_rate * unconditional)
    return x
