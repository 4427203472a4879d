"""The flow's estimator: which way a noisy mel should move, given encoder states, speaker and time.

Knows blocks of attention, convolution and MLP modulated by the time. Attention has neither positions nor a causal
mask, so the order of cached keys does not matter. Does not know the solver, nor where cached rows live.

Rows come in two halves: conditional rows first, then the same with mu, speaker and prompt mel at zero.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.token2wav.flow.conformer import causal_conv, tail_at
from models.token2wav.settings import DiTConfig

CONV_TAIL = 2
N_CONVS = 2  # in a block
N_SHIFTS = 9  # shift, scale and gate of attention, MLP and convolution
TIME_FREQUENCIES = 128


class Modulation(NamedTuple):
    """What the time contributes, for one time or stacked over several."""

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
        """x: [2B, T, D]; see `DiTBlock`. Returns: [2B, T, D] and new keys and values [2B, T, H, hd]."""
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
        # The gaps are what the checkpoint numbers but keeps no weights for.
        self.block = nn.ModuleDict(
            {"1": nn.Conv1d(width, width, 3), "3": nn.LayerNorm(width, eps=1e-5), "6": nn.Conv1d(width, width, 3)}
        )

    def forward(self, x: Tensor, tail: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
        """x: [R, T, D]; tail: [R, 2 convs, 2, D]; n: [R] valid of T. Returns: [R, T, D] and the next tail."""
        first = torch.cat((tail[:, 0], x), dim=1)
        hidden = F.mish(self.block["3"](causal_conv(first, self.block["1"])))
        second = torch.cat((tail[:, 1], hidden), dim=1)
        tails = torch.stack((tail_at(first, n, CONV_TAIL), tail_at(second, n, CONV_TAIL)), dim=1)
        return causal_conv(second, self.block["6"]), tails


class MLP(nn.Module):
    def __init__(self, width: int, inner: int):
        super().__init__()
        self.fc1 = nn.Linear(width, inner)
        self.fc2 = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class DiTBlock(nn.Module):
    """Attention, convolution and MLP in this order, each modulated and gated by the time."""

    def __init__(self, config: DiTConfig):
        super().__init__()
        width = config.width
        self.attn = DiTAttention(width, config.heads, config.head_dim)
        self.conv = ConvBlock(width)
        self.mlp = MLP(width, int(width * config.mlp_ratio))
        self.adaLN_modulation = _modulation(width, N_SHIFTS)

    def forward(
        self, h: Tensor, shifts: Tensor, n: Tensor, rows: Tensor, mask: Tensor, cache: Tensor, tail: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """One block over the new frames.

        Args:
            h: [2B, T, D] float32 residual stream. shifts: [9, D] float32. n: [2B] valid frames.
            rows: [B, width] cached rows. mask: [2B, 1, 1, width + T]. tail: [2B, 2, 2, D].
            cache: [2 (k, v), 2 (conditional, not), n_rows, H, hd] of all slots; only read.
        Returns: the stream, new keys, new values [2B, T, H, hd], and the next tail.
        """
        dtype = self.mlp.fc1.weight.dtype
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m, shift_c, scale_c, gate_c = shifts
        attended, k, v = self.attn(modulate(h, shift_a, scale_a, dtype), rows, mask, cache)
        h = h + gate_a * attended
        convolved, tail = self.conv(modulate(h, shift_c, scale_c, dtype), tail, n)
        h = h + gate_c * convolved
        return h + gate_m * self.mlp(modulate(h, shift_m, scale_m, dtype)), k, v, tail


class TimeEmbedder(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(2 * TIME_FREQUENCIES, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, times: Tensor) -> Tensor:
        """[N] times in 0..1 -> [N, width] float32."""
        step = torch.arange(TIME_FREQUENCIES, device=times.device, dtype=torch.float64) / TIME_FREQUENCIES
        angles = 1000 * times.double()[:, None] * torch.exp(-math.log(10_000) * step)
        waves = torch.cat((angles.cos(), angles.sin()), dim=-1)
        return linear32(self.mlp[2], F.silu(linear32(self.mlp[0], waves.float())))


class FinalLayer(nn.Module):
    def __init__(self, width: int, n_out: int):
        super().__init__()
        self.adaLN_modulation = _modulation(width, 2)
        self.linear = nn.Linear(width, n_out)


class DiT(nn.Module):
    """`decoder.estimator` of the flow."""

    def __init__(self, config: DiTConfig, n_mels: int):
        super().__init__()
        self.config, self.n_mels = config, n_mels
        self.t_embedder = TimeEmbedder(config.width)
        self.in_proj = nn.Linear(4 * n_mels, config.width)
        self.blocks = nn.ModuleList(DiTBlock(config) for _ in range(config.depth))
        self.final_layer = FinalLayer(config.width, n_mels)

    def modulation(self, times: Tensor) -> Modulation:
        """Everything that depends on the time alone, for times [N]; computed once per grid."""
        embedded = F.silu(self.t_embedder(times))
        blocks = [linear32(block.adaLN_modulation[1], embedded).unflatten(1, (N_SHIFTS, -1)) for block in self.blocks]
        final = linear32(self.final_layer.adaLN_modulation[1], embedded).unflatten(1, (2, -1))
        return Modulation(torch.stack(blocks, dim=1), final)

    def condition(self, mu: Tensor, speaker: Tensor, prompt: Tensor) -> Tensor:
        """What the input layer makes of everything but x; the same for all steps.

        Args:
            mu, prompt: [B, T, n_mels]. speaker: [B, n_mels].
        Returns: [2B, T, width] float32, conditional rows first.
        """
        rest = torch.cat((mu, speaker[:, None].expand_as(mu), prompt), dim=-1)
        weight, bias = self.in_proj.weight[:, self.n_mels :], self.in_proj.bias
        conditional = F.linear(rest.to(weight.dtype), weight, bias).float()
        return torch.cat((conditional, bias.float().expand_as(conditional)))

    def forward(
        self,
        x: Tensor,
        condition: Tensor,
        modulation: Modulation,
        n: Tensor,
        rows: Tensor,
        mask: Tensor,
        cache: Tensor,
        tails: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Velocity of x at one time.

        Args:
            x: [2B, T, n_mels] float32, both halves. condition: [2B, T, width]. modulation: of one time.
            n: [2B] valid frames. rows, mask: as `DiTBlock`.
            cache: [depth, 2, 2, n_rows, H, hd]; only read. tails: [depth, 2B, 2, 2, D].
        Returns: [2B, T, n_mels] float32; new keys and values [depth, 2, 2, B, T, H, hd]; next tails
            [depth, 2B, 2, 2, D].
        """
        weight = self.in_proj.weight[:, : self.n_mels]
        h = F.linear(x.to(weight.dtype), weight).float() + condition
        new_rows, new_tails = [], []
        for i, block in enumerate(self.blocks):
            h, k, v, tail = block(h, modulation.blocks[i], n, rows, mask, cache[i], tails[i])
            new_rows.append(torch.stack((k.unflatten(0, (2, -1)), v.unflatten(0, (2, -1)))))
            new_tails.append(tail)
        shift, scale = modulation.final
        out = self.final_layer.linear(modulate(h, shift, scale, weight.dtype)).float()
        return out, torch.stack(new_rows), torch.stack(new_tails)


def linear32(layer: nn.Linear, x: Tensor) -> Tensor:
    """The layer in float32 whatever its type: for what is computed once and used at every step."""
    return F.linear(x, layer.weight.float(), layer.bias.float())


def modulate(h: Tensor, shift: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Norm without weights, scaled and shifted in float32, as `dtype`."""
    return (F.layer_norm(h, h.shape[-1:], eps=1e-6) * (1 + scale) + shift).to(dtype)


def _modulation(width: int, n: int) -> nn.Sequential:
    return nn.Sequential(nn.SiLU(), nn.Linear(width, n * width))


def _cached_and_new(cache: Tensor, rows: Tensor, new: Tensor) -> Tensor:
    """Rows of cache [2, n_rows, H, hd] at rows [B, width] for both halves, then new [2B, T, H, hd]."""
    cached = cache.index_select(1, rows.flatten()).view(2 * rows.shape[0], rows.shape[1], *cache.shape[2:])
    return torch.cat((cached, new), dim=1)
