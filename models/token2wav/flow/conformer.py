"""The upsampling conformer: embedded speech tokens at 25 Hz to hidden states at 50 Hz, whole or chunk by chunk.

Contains relative-position attention, the lookahead and the upsampling. Does not contain token ids, mel frames or
sessions. Attention is bidirectional inside a chunk and covers all cached keys. A whole sequence is one last chunk
without cached keys.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.layers.transformer import Derived
from models.token2wav.flow.block_table import SlotMapping
from models.token2wav.settings import EncoderConfig

UP_KERNEL = 5
UP_TAIL = UP_KERNEL - 1
LOOKAHEAD_TAIL = 2
# Distances projected in advance: enough for the largest chunk after the longest prompt. The distances inside a prompt
# are projected on each call.
TABLE_FIRST, TABLE_END = -64, 1728

# Key/value pool of one stack of layers: [n_layers, 2, n_rows, H, hd], or one [2, n_rows, H, hd] per layer.
LayerCaches = Tensor | Sequence[Tensor]
# Signature of `run_layers`. An implementation that writes the new keys and values itself returns None for them.
RunLayers = Callable[[nn.ModuleList, Tensor, SlotMapping, LayerCaches], tuple[Tensor, Tensor | None]]


class Tails(NamedTuple):
    """Inputs of the causal convolutions that the next chunk needs."""

    lookahead: Tensor  # [B, 2, D]
    up: Tensor  # [B, 4, D]


def causal_conv(x: Tensor, conv: nn.Conv1d) -> Tensor:
    """[B, T + k - 1, C] -> [B, T, C'] as one matrix product over windows of k frames, without padding."""
    windows = x.unfold(1, conv.kernel_size[0], 1).flatten(2)
    return F.linear(windows, conv.weight.flatten(1), conv.bias)


def tail_at(x: Tensor, end: Tensor, n: int) -> Tensor:
    """The `n` frames of x [B, T + n, C] that precede position end[b] + n of each row, [B, n, C]."""
    index = end[:, None] + torch.arange(n, device=x.device)
    return x.gather(1, index[..., None].expand(-1, -1, x.shape[2]))


class Embed(nn.Module):
    """sqrt(width) * LayerNorm(linear(x))."""

    def __init__(self, width: int):
        super().__init__()
        self.out = nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width, eps=1e-5))
        self.scale = math.sqrt(width)

    def forward(self, x: Tensor) -> Tensor:
        normalized: Tensor = self.out(x)
        return self.scale * normalized


class Lookahead(nn.Module):
    """A convolution over each token and the next `lookahead` tokens, then a causal one."""

    def __init__(self, width: int, lookahead: int):
        super().__init__()
        self.conv1 = nn.Conv1d(width, width, lookahead + 1)
        self.conv2 = nn.Conv1d(width, width, LOOKAHEAD_TAIL + 1)

    def forward(self, x: Tensor, tail: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
        """[B, T, D] and the next tail [B, 2, D].

        Args:
            x: [B, T + lookahead, D].
            tail: [B, 2, D] from the previous chunk.
            n: [B] valid tokens of T.
        """
        seen = torch.cat((tail, F.leaky_relu(causal_conv(x, self.conv1), 0.01)), dim=1)
        smooth = causal_conv(seen, self.conv2)
        return x[:, : smooth.shape[1]] + smooth, tail_at(seen, n, LOOKAHEAD_TAIL)


class Upsample(nn.Module):
    """Each frame repeated twice, then a causal convolution."""

    def __init__(self, width: int):
        super().__init__()
        self.conv = nn.Conv1d(width, width, UP_KERNEL)

    def forward(self, x: Tensor, tail: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
        """[B, 2T, D] and the next tail [B, 4, D].

        Args:
            x: [B, T, D].
            tail: [B, 4, D] from the previous chunk.
            n: [B] valid frames of T.
        """
        seen = torch.cat((tail, x.repeat_interleave(2, dim=1)), dim=1)
        return causal_conv(seen, self.conv), tail_at(seen, 2 * n, UP_TAIL)


class RelativeAttention(Derived):
    """Self-attention with a score term for the distance between query and key."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads, self.head_dim = heads, width // heads
        self.linear_q = nn.Linear(width, width)
        self.linear_k = nn.Linear(width, width)
        self.linear_v = nn.Linear(width, width)
        self.linear_out = nn.Linear(width, width)
        self.linear_pos = nn.Linear(width, width, bias=False)
        self.pos_bias_u = nn.Parameter(torch.empty(heads, self.head_dim))
        self.pos_bias_v = nn.Parameter(torch.empty(heads, self.head_dim))
        self.register_buffer("table", torch.empty(TABLE_END - TABLE_FIRST, width), persistent=False)

    def derive(self, device: torch.device | str, dtype: torch.dtype) -> None:
        self.table = self._project(TABLE_FIRST, TABLE_END, device).to(dtype)

    def _project(self, first: int, end: int, device: torch.device | str) -> Tensor:
        weight = self.linear_pos.weight
        waves = distance_waves(torch.arange(first, end, device=device), weight.shape[1])
        return F.linear(waves, weight.float())

    def distances(self, first: int, end: int) -> Tensor:
        """Projections of the distances first .. end - 1, [heads, end - first, head_dim]."""
        if first >= TABLE_FIRST and end <= TABLE_END:
            rows = self.table[first - TABLE_FIRST : end - TABLE_FIRST]
        else:
            weight = self.linear_pos.weight
            rows = self._project(first, end, weight.device).to(weight.dtype)
        return rows.view(-1, self.heads, self.head_dim).transpose(0, 1)

    def forward(
        self, x: Tensor, mapping: SlotMapping, mask: Tensor, column_at: Tensor, cache: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Attention from the new frames to the cached and the new frames.

        Args:
            x: [B, T, D].
            mapping: rows of the cached keys.
            mask: [B, width + T] bool.
            column_at: [B, T, width + T] index into the projected distances 1-T .. T-1+width for each score.
            cache: [2, n_rows, heads, head_dim] keys and values of all slots; only read.
        Returns: [B, T, D], and the new keys and values [B, T, heads, head_dim].
        """
        B, T, _ = x.shape
        width = mapping.cached.shape[1]
        q, k, v = (part(x).view(B, T, self.heads, self.head_dim) for part in self._projections())
        keys, values = (cached_and_new(cache[i], mapping.cached, new) for i, new in enumerate((k, v)))
        by_distance = torch.einsum("bthd,hrd->bhtr", q + self.pos_bias_v, self.distances(1 - T, T + width))
        bias = by_distance.gather(3, column_at[:, None].expand(-1, self.heads, -1, -1)) * self.head_dim**-0.5
        bias = bias.masked_fill(~mask[:, None, None], float("-inf"))
        query = (q + self.pos_bias_u).transpose(1, 2)
        out = F.scaled_dot_product_attention(query, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=bias)
        return self.linear_out(out.transpose(1, 2).flatten(2)), k, v

    def _projections(self) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
        return self.linear_q, self.linear_k, self.linear_v


class ConformerFeedForward(nn.Module):
    def __init__(self, width: int, inner: int):
        super().__init__()
        self.w_1 = nn.Linear(width, inner)
        self.w_2 = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w_2(F.silu(self.w_1(x)))
        return out


class ConformerLayer(nn.Module):
    """Pre-norm attention and feed-forward, without the convolution module of other conformers."""

    def __init__(self, width: int, heads: int, inner: int):
        super().__init__()
        self.self_attn = RelativeAttention(width, heads)
        self.feed_forward = ConformerFeedForward(width, inner)
        self.norm_ff = nn.LayerNorm(width, eps=1e-12)
        self.norm_mha = nn.LayerNorm(width, eps=1e-12)

    def forward(
        self, x: Tensor, mapping: SlotMapping, mask: Tensor, column_at: Tensor, cache: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Arguments and results as `RelativeAttention.forward`."""
        attended, k, v = self.self_attn(self.norm_mha(x), mapping, mask, column_at, cache)
        x = x + attended
        return x + self.feed_forward(self.norm_ff(x)), k, v


class UpsampleConformer(nn.Module):
    """Module `encoder` of the flow."""

    def __init__(self, config: EncoderConfig):
        super().__init__()
        width = config.width
        self.width, self.lookahead = width, config.lookahead
        self.heads, self.head_dim = config.heads, width // config.heads
        self.embed = Embed(width)
        self.after_norm = nn.LayerNorm(width, eps=1e-5)
        self.pre_lookahead_layer = Lookahead(width, config.lookahead)
        self.encoders = _stack(config.n_layers, config)
        self.up_layer = Upsample(width)
        self.up_embed = Embed(width)
        self.up_encoders = _stack(config.n_up_layers, config)

    def forward(
        self,
        x: Tensor,
        n_seen: Tensor,
        n_new: Tensor,
        tails: Tails,
        mappings: tuple[SlotMapping, SlotMapping],
        caches: tuple[LayerCaches, LayerCaches],
        run: RunLayers | None = None,
    ) -> tuple[Tensor, Tails, tuple[Tensor | None, Tensor | None]]:
        """Hidden states of one chunk of tokens, or of a whole sequence.

        Args:
            x: [B, T + lookahead, D] embedded tokens.
            n_seen: [B] valid tokens of x; the others are zeroed after `embed`.
            n_new: [B] tokens to encode: n_seen minus the lookahead, or n_seen at the end of a turn.
            tails: from the previous chunk; zeros at the beginning.
            mappings: addresses at token rate (T rows) and at mel rate (2T rows).
            caches: keys and values at token rate [n_layers, 2, n_rows, H, hd] and at mel rate; only read.
            run: replaces `run_layers`.
        Returns: [B, 2T, D] with 2 n_new valid frames; the next tails; the new keys and values of both stacks
            [n_layers, 2, B, T or 2T, H, hd], or None where `run` wrote them to the caches.
        """
        run = run or run_layers
        x = self.embed(x)
        seen = torch.arange(x.shape[1], device=x.device) < n_seen[:, None]
        x = torch.where(seen[..., None], x, 0.0)
        x, lookahead_tail = self.pre_lookahead_layer(x, tails.lookahead, n_new)
        x, token_rows = run(self.encoders, x, mappings[0], caches[0])
        x, up_tail = self.up_layer(x, tails.up, n_new)
        x, mel_rows = run(self.up_encoders, self.up_embed(x), mappings[1], caches[1])
        return self.after_norm(x), Tails(lookahead_tail, up_tail), (token_rows, mel_rows)

    def offline(self, x: Tensor, n: Tensor) -> Tensor:
        """Hidden states of whole sequences, [B, 2T, D] with 2 n[b] valid frames per row.

        Args:
            x: [B, T, D] embedded tokens.
            n: [B] valid tokens of each row.
        """
        B, T, _ = x.shape
        empty = x.new_zeros(2, 0, self.heads, self.head_dim)
        tails = Tails(x.new_zeros(B, LOOKAHEAD_TAIL, self.width), x.new_zeros(B, UP_TAIL, self.width))
        caches = [empty] * len(self.encoders), [empty] * len(self.up_encoders)
        mappings = (without_cache(n, T), without_cache(2 * n, 2 * T))
        hidden: Tensor = self(F.pad(x, (0, 0, 0, self.lookahead)), n, n, tails, mappings, caches)[0]
        return hidden


def without_cache(n_new: Tensor, n_rows: int) -> SlotMapping:
    """A mapping of `n_rows` new rows, n_new [B] of them valid, with no cached rows and no row to write."""
    nothing = n_new.new_zeros(len(n_new), 0)
    return SlotMapping(
        torch.zeros_like(n_new), nothing, torch.zeros_like(n_new), n_new.new_zeros(len(n_new), n_rows), n_new
    )


def cached_and_new(rows: Tensor, index: Tensor, new: Tensor) -> Tensor:
    """Rows [n_rows, H, hd] at index [B, width] followed by `new` [B, T, H, hd]: [B, width + T, H, hd]."""
    cached = rows.index_select(0, index.flatten()).view(*index.shape, *rows.shape[1:])
    return torch.cat((cached, new), dim=1)


def distance_waves(distances: Tensor, width: int) -> Tensor:
    """Sine and cosine of each distance at `width` / 2 frequencies, interleaved: [n, width] float32."""
    exponents = torch.arange(0, width, 2, device=distances.device, dtype=torch.float64) / width
    angles = distances.double()[:, None] * torch.exp(-math.log(10_000) * exponents)
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1).float()


def distance_columns(mapping: SlotMapping, n_rows: int) -> Tensor:
    """[B, T, width + T] index of each query-key distance in the list 1-T .. T-1+width, for T = n_rows.

    Cached key j has position j and new row i has position n_cached + i.
    """
    device, width = mapping.slots.device, mapping.cached.shape[1]
    query = torch.arange(n_rows, device=device)
    cached = mapping.n_cached[:, None, None] + query[:, None] - torch.arange(width, device=device)
    fresh = (query[:, None] - query).expand(len(mapping.slots), -1, -1)
    return (torch.cat((cached, fresh), dim=2) + n_rows - 1).clamp(min=0)


def _stack(n: int, config: EncoderConfig) -> nn.ModuleList:
    return nn.ModuleList(ConformerLayer(config.width, config.heads, config.inner) for _ in range(n))


def run_layers(
    stack: nn.ModuleList, x: Tensor, mapping: SlotMapping, caches: LayerCaches
) -> tuple[Tensor, Tensor | None]:
    """The output [B, T, D] of all layers for x [B, T, D], and the new keys and values [n_layers, 2, B, T, H, hd]."""
    mask, column_at = mapping.mask, distance_columns(mapping, x.shape[1])
    rows = []
    for layer, cache in zip(stack, caches, strict=True):
        x, k, v = layer(x, mapping, mask, column_at, cache)
        rows.append(torch.stack((k, v)))
    return x, torch.stack(rows)
