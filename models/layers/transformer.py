"""Building blocks the parts share: norm, attention over a slot cache, gated MLP, decoder backbone.

Knows shapes and formulas. Does not know which part it serves, nor who decides what is fed.
Parameter names are the checkpoint's.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.layers.kv_cache import CacheView, KVCache
from models.layers.rotary import rotary_angles, rotary_frequencies, rotate


class Derived(nn.Module):
    """A module with constants computed from its hyper-parameters or weights.

    They are non-persistent buffers, absent from the checkpoint and wrong after a build on the meta
    device; whoever assigns weights calls `derive` once afterwards.
    """

    def derive(self, device: torch.device | str, dtype: torch.dtype) -> None:
        """(Re)compute the constants on `device`; those that stand for a weight as `dtype`, the others in float32."""
        raise NotImplementedError(f"{type(self).__name__}.derive")


class RMSNorm(nn.Module):
    """x / rms(x) * weight, the quotient in float32 and rounded before the weight is applied."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class Projector(nn.Module):
    """linear1 -> ReLU -> linear2, row by row."""

    def __init__(self, width_in: int, width_out: int):
        super().__init__()
        self.linear1 = nn.Linear(width_in, width_out)
        self.linear2 = nn.Linear(width_out, width_out)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear2(F.relu(self.linear1(x)))


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), no biases."""

    def __init__(self, width: int, inner: int):
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Scaled dot-product attention with grouped key/value heads.

    Args:
        q: [B, T, H, D]. k, v: [B, KV, L, D] with H a multiple of KV.
        mask: [B, 1 or T, L] bool (true = may look) or additive float; None = look everywhere.
    Returns: [B, T, H * D].

    Query heads of one group become extra query rows, so keys and values are never repeated.
    """
    B, T, H, D = q.shape
    groups = H // k.shape[1]
    rows = q.view(B, T, -1, groups, D).permute(0, 2, 3, 1, 4).reshape(B, -1, groups * T, D)
    if mask is not None:
        mask = mask[:, None]
        if groups > 1 and mask.shape[2] > 1:
            mask = mask.repeat(1, 1, groups, 1)
    out = F.scaled_dot_product_attention(rows, k, v, attn_mask=mask)
    return out.view(B, -1, groups, T, D).permute(0, 3, 1, 2, 4).reshape(B, T, H * D)


class CausalAttention(nn.Module):
    """Rotary self-attention that appends to a slot cache; optional per-head norm of q and k (Qwen3)."""

    def __init__(self, width: int, heads: int, kv_heads: int, head_dim: int, eps: float, qk_norm: bool):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.q_proj = nn.Linear(width, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(width, kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(width, kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, width, bias=False)
        self.q_norm = RMSNorm(head_dim, eps) if qk_norm else nn.Identity()
        self.k_norm = RMSNorm(head_dim, eps) if qk_norm else nn.Identity()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, view: CacheView, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        B, T, _ = x.shape
        q = rotate(self.q_norm(self.q_proj(x).view(B, T, self.heads, self.head_dim)), cos, sin)
        k = rotate(self.k_norm(self.k_proj(x).view(B, T, self.kv_heads, self.head_dim)), cos, sin)
        v = self.v_proj(x).view(B, T, self.kv_heads, self.head_dim)
        view.write(k_cache, k)
        view.write(v_cache, v)
        return self.o_proj(attend(q, view.read(k_cache), view.read(v_cache), view.mask))


class DecoderLayer(nn.Module):
    """Pre-norm attention and gated MLP, each added to the residual stream."""

    def __init__(self, width: int, inner: int, heads: int, kv_heads: int, head_dim: int, eps: float, qk_norm: bool):
        super().__init__()
        self.self_attn = CausalAttention(width, heads, kv_heads, head_dim, eps, qk_norm)
        self.mlp = GatedMLP(width, inner)
        self.input_layernorm = RMSNorm(width, eps)
        self.post_attention_layernorm = RMSNorm(width, eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, view: CacheView, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, view, k_cache, v_cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class Backbone(Derived):
    """Decoder stack over a slot cache: the `model` inside `llm` (Qwen3) and inside `tts` (Llama)."""

    def __init__(
        self,
        *,
        vocab_size: int,
        width: int,
        inner: int,
        n_layers: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        eps: float,
        rope_theta: float,
        qk_norm: bool,
    ):
        super().__init__()
        self.head_dim, self.rope_theta = head_dim, rope_theta
        self.embed_tokens = nn.Embedding(vocab_size, width)
        self.layers = nn.ModuleList(
            DecoderLayer(width, inner, heads, kv_heads, head_dim, eps, qk_norm) for _ in range(n_layers)
        )
        self.norm = RMSNorm(width, eps)
        self.register_buffer("frequencies", torch.empty(head_dim // 2), persistent=False)
        self.fused: Any = None  # what takes the place of the layers: `fused_decoder.FusedDecoder`
        self.table: Any = None  # what takes the place of `embed_tokens`: `host_table.PinnedEmbedding`

    def derive(self, device: torch.device | str, dtype: torch.dtype) -> None:
        self.frequencies = rotary_frequencies(self.head_dim, self.rope_theta, device)

    def forward(self, embeds: Tensor, cache: KVCache, slots: Tensor, n_new: Tensor, kv_len: int) -> Tensor:
        """Append rows to slots and return their hidden states after the final norm.

        Args:
            embeds: [B, T, D]; row b holds n_new[b] valid rows, left-aligned; the rest is padding.
            cache: keys and values of every slot; written and advanced in place.
            slots: [B] int64, distinct except for the scratch slot. n_new: [B] int64, 0..T.
            kv_len: cache rows to look at; at least every slot's length plus n_new. Static per bucket.
        Returns: [B, T, D]; padding rows are meaningless.
        """
        if self.fused is not None:
            return self.fused(embeds, cache, slots, n_new, kv_len)
        view = cache.view(slots, n_new, embeds.shape[1], kv_len)
        cos, sin = (part.unsqueeze(2) for part in rotary_angles(view.positions, self.frequencies))  # for all heads
        x = embeds
        for layer, k_cache, v_cache in zip(self.layers, cache.k, cache.v, strict=True):
            x = layer(x, cos, sin, view, k_cache, v_cache)
        cache.advance(slots, n_new)
        return self.norm(x)

    def embed(self, ids: Tensor) -> Tensor:
        """Rows [..., D] of tokens ids [...]."""
        return self.embed_tokens(ids) if self.table is None else self.table(ids)

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [..., K] times weight [N, K], in the way the stack's own products are made. Returns: [..., N]."""
        return F.linear(x, weight) if self.fused is None else self.fused.product(x, weight)
