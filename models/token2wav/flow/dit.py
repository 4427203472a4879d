"""The flow's estimator: the velocity of a noisy mel, given encoder states, speaker and time.

Contains blocks of attention, convolution and MLP that are modulated by the time. Does not contain the Euler solve or
row addresses. Attention has neither positions nor a causal mask, so the order of cached keys does not matter.

A batch has two halves for classifier-free guidance: the conditional rows, then the unconditional rows, whose mu,
speaker and prompt mel are zero.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.token2wav.flow.conformer import causal_conv, tail_at
from models.token2wav.settings import DiTConfig

CONV_TAIL = 2
N_CONVS = 2  # per block
N_SHIFTS = 9  # shift, scale and gate of attention, MLP and convolution
TIME_FREQUENCIES = 128


@dataclass(frozen=True)
class DiTContext:
    """Inputs of the estimator that are the same at all Euler steps of one call."""

    condition: Tensor  # [2B, T, width] float32, from `DiT.condition`
    n: Tensor  # [2B] valid frames of T
    rows: Tensor  # [B, width] cached rows
    mask: Tensor  # [2B, 1, 1, width + T] bool


class Modulation(NamedTuple):
    """Shifts, scales and gates computed from one time, or stacked over several times."""

    blocks: Tensor  # [..., depth, 9, width] float32
    final: Tensor  # [..., 2, width] float32


class DiTAttention(nn.Module):
    def __init__(self, width: int, heads: int, head_dim: int):
        super().__init__()
        self.heads, self.head_dim = heads, head_dim
        inner = heads * head_dim
        self.to_q = nn.Linear(width, inner)
        self.to_k = nn.Linear(width, inner)
        self.to_v = nn.Linear(width, inner)
        self.q_norm = nn.LayerNorm(head_dim, eps=1e-5)
        self.k_norm = nn.LayerNorm(head_dim, eps=1e-5)
        self.proj = nn.Linear(inner, width)

    def forward(self, x: Tensor, rows: Tensor, mask: Tensor, cache: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[2B, T, D], and the new keys and values [2B, T, H, hd]. Arguments as `DiTBlock.forward`."""
        shape = (*x.shape[:2], self.heads, self.head_dim)
        q, k = self.q_norm(self.to_q(x).view(shape)), self.k_norm(self.to_k(x).view(shape))
        v = self.to_v(x).view(shape)
        keys, values = (_cached_and_new(cache[i], rows, new) for i, new in enumerate((k, v)))
        attended = F.scaled_dot_product_attention(
            q.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), attn_mask=mask
        )
        return self.proj(attended.transpose(1, 2).flatten(2)), k, v


class ConvBlock(nn.Module):
    """Two causal convolutions with norm and mish between them."""

    def __init__(self, width: int):
        super().__init__()
        # The checkpoint numbers layers without weights too, hence the gaps.
        self.block = nn.ModuleDict(
            {"1": nn.Conv1d(width, width, 3), "3": nn.LayerNorm(width, eps=1e-5), "6": nn.Conv1d(width, width, 3)}
        )

    def forward(self, x: Tensor, tail: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
        """[R, T, D] and the next tail [R, 2 convs, 2, D].

        Args:
            x: [R, T, D].
            tail: [R, 2 convs, 2, D] inputs of both convolutions from the previous chunk.
            n: [R] valid frames of T.
        """
        conv1, norm, conv2 = self.layers()
        first = torch.cat((tail[:, 0], x), dim=1)
        hidden = F.mish(norm(causal_conv(first, conv1)))
        second = torch.cat((tail[:, 1], hidden), dim=1)
        tails = torch.stack((tail_at(first, n, CONV_TAIL), tail_at(second, n, CONV_TAIL)), dim=1)
        return causal_conv(second, conv2), tails

    @property
    def dtype(self) -> torch.dtype:
        return self.layers()[0].weight.dtype

    def layers(self) -> tuple[nn.Conv1d, nn.LayerNorm, nn.Conv1d]:
        """First convolution, norm, second convolution."""
        return cast(tuple[nn.Conv1d, nn.LayerNorm, nn.Conv1d], tuple(self.block[name] for name in ("1", "3", "6")))


class MLP(nn.Module):
    def __init__(self, width: int, inner: int):
        super().__init__()
        self.fc1 = nn.Linear(width, inner)
        self.fc2 = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(F.gelu(self.fc1(x), approximate="tanh"))
        return out


class DiTBlock(nn.Module):
    """Attention, convolution and MLP in this order, each with shift, scale and gate computed from the time."""

    def __init__(self, config: DiTConfig):
        super().__init__()
        width = config.width
        self.attn = DiTAttention(width, config.heads, config.head_dim)
        self.conv = ConvBlock(width)
        self.mlp = MLP(width, int(width * config.mlp_ratio))
        self.adaLN_modulation = AdaLN(width, N_SHIFTS)

    def forward(
        self, h: Tensor, shifts: Tensor, context: DiTContext, cache: Tensor, tail: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """One block over the new frames.

        Args:
            h: [2B, T, D] float32 residual stream.
            shifts: [9, D] float32.
            context: row addresses and lengths.
            cache: [2 (k, v), 2 (conditional, unconditional), n_rows, H, hd] of all slots; only read.
            tail: [2B, 2, 2, D].
        Returns: the residual stream, the new keys and the new values [2B, T, H, hd], and the next tail.
        """
        dtype = self.conv.dtype
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m, shift_c, scale_c, gate_c = shifts
        attended, k, v = self.attn(modulate(h, shift_a, scale_a, dtype), context.rows, context.mask, cache)
        h = h + gate_a * attended
        convolved, tail = self.conv(modulate(h, shift_c, scale_c, dtype), tail, context.n)
        h = h + gate_c * convolved
        return h + gate_m * self.mlp(modulate(h, shift_m, scale_m, dtype)), k, v, tail


class TimeEmbedder(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(2 * TIME_FREQUENCIES, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, times: Tensor) -> Tensor:
        """[N, width] float32 for times [N] in 0..1."""
        step = torch.arange(TIME_FREQUENCIES, device=times.device, dtype=torch.float64) / TIME_FREQUENCIES
        angles = 1000 * times.double()[:, None] * torch.exp(-math.log(10_000) * step)
        waves = torch.cat((angles.cos(), angles.sin()), dim=-1)
        first, second = cast(nn.Linear, self.mlp[0]), cast(nn.Linear, self.mlp[2])
        return linear32(second, F.silu(linear32(first, waves.float())))


class AdaLN(nn.Sequential):
    """SiLU and a linear layer from the time embedding [N, width] to `n` vectors of `width`."""

    def __init__(self, width: int, n: int):
        super().__init__(nn.SiLU(), nn.Linear(width, n * width))
        self.n = n

    def project(self, embedded: Tensor) -> Tensor:
        """[N, n, width] float32 for [N, width] after the SiLU."""
        linear = cast(nn.Linear, self[1])
        vectors: Tensor = linear32(linear, embedded).unflatten(1, (self.n, -1))
        return vectors


class FinalLayer(nn.Module):
    def __init__(self, width: int, n_out: int):
        super().__init__()
        self.adaLN_modulation = AdaLN(width, 2)
        self.linear = nn.Linear(width, n_out)


class DiT(nn.Module):
    """Module `decoder.estimator` of the flow."""

    def __init__(self, config: DiTConfig, n_mels: int):
        super().__init__()
        self.config, self.n_mels = config, n_mels
        self.t_embedder = TimeEmbedder(config.width)
        self.in_proj = nn.Linear(4 * n_mels, config.width)
        self.blocks = nn.ModuleList(DiTBlock(config) for _ in range(config.depth))
        self.final_layer = FinalLayer(config.width, n_mels)

    def typed_blocks(self) -> Iterator[DiTBlock]:
        """`blocks` with their type."""
        for block in self.blocks:
            assert isinstance(block, DiTBlock)
            yield block

    def modulation(self, times: Tensor) -> Modulation:
        """All values that depend on the times [N] alone; computed once per time grid."""
        embedded = F.silu(self.t_embedder(times))
        blocks = [block.adaLN_modulation.project(embedded) for block in self.typed_blocks()]
        return Modulation(torch.stack(blocks, dim=1), self.final_layer.adaLN_modulation.project(embedded))

    def condition(self, mu: Tensor, speaker: Tensor, prompt: Tensor) -> Tensor:
        """Contribution of mu, speaker and prompt to the input layer; the same at all steps.

        Args:
            mu: [B, T, n_mels].
            speaker: [B, n_mels].
            prompt: [B, T, n_mels].
        Returns: [2B, T, width] float32, conditional rows first.
        """
        rest = torch.cat((mu, speaker[:, None].expand_as(mu), prompt), dim=-1)
        weight, bias = self.in_proj.weight[:, self.n_mels :], self.in_proj.bias
        conditional = F.linear(rest.to(weight.dtype), weight, bias).float()
        return torch.cat((conditional, bias.float().expand_as(conditional)))

    def forward(
        self, x: Tensor, modulation: Modulation, context: DiTContext, cache: Tensor, tails: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Velocity of x at one time.

        Args:
            x: [2B, T, n_mels] float32, both halves.
            modulation: of one time.
            context: condition, row addresses and lengths.
            cache: [depth, 2, 2, n_rows, H, hd]; only read.
            tails: [depth, 2B, 2, 2, D].
        Returns: [2B, T, n_mels] float32; the new keys and values [depth, 2, 2, B, T, H, hd]; the next tails
            [depth, 2B, 2, 2, D].
        """
        weight = self.in_proj.weight[:, : self.n_mels]
        h = F.linear(x.to(weight.dtype), weight).float() + context.condition
        new_rows, new_tails = [], []
        for i, block in enumerate(self.blocks):
            h, k, v, tail = block(h, modulation.blocks[i], context, cache[i], tails[i])
            new_rows.append(torch.stack((k.unflatten(0, (2, -1)), v.unflatten(0, (2, -1)))))
            new_tails.append(tail)
        shift, scale = modulation.final
        out = self.final_layer.linear(modulate(h, shift, scale, weight.dtype)).float()
        return out, torch.stack(new_rows), torch.stack(new_tails)


def linear32(layer: nn.Linear, x: Tensor) -> Tensor:
    """The output of a layer of any type, computed in float32: for values that every step uses."""
    return F.linear(x, layer.weight.float(), layer.bias.float())


def modulate(h: Tensor, shift: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Layer norm without weights, scaled and shifted in float32 and converted to `dtype`."""
    return (F.layer_norm(h, h.shape[-1:], eps=1e-6) * (1 + scale) + shift).to(dtype)


def _cached_and_new(cache: Tensor, rows: Tensor, new: Tensor) -> Tensor:
    """Rows of cache [2, n_rows, H, hd] at [B, width] for both halves, then `new` [2B, T, H, hd]."""
    cached = cache.index_select(1, rows.flatten()).view(2 * rows.shape[0], rows.shape[1], *cache.shape[2:])
    return torch.cat((cached, new), dim=1)
