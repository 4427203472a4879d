"""Building blocks that several parts share: norm, attention over a slot cache, gated MLP, decoder stack.

Parameter names are the checkpoint's. Does not contain anything specific to one part.
"""

from dataclasses import dataclass
from typing import Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.layers.backend import Backend
from models.layers.kv_cache import CacheView, KVCache
from models.layers.rotary import rotary_angles, rotary_frequencies, rotate


class Derived(nn.Module):
    """A module with constants computed from its hyper-parameters or weights.

    They are non-persistent buffers: absent from the checkpoint, and without data after a build on the meta device.
    `assign_weights` calls `derive` after it has assigned the weights; of a quantised layer, as soon as it has its own.
    """

    def derive(self, device: torch.device | str, dtype: torch.dtype) -> None:
        """Compute the constants on `device`: in `dtype` those that replace a weight, in float32 all others."""
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
    """linear1 -> ReLU -> linear2 on the last dimension."""

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
        mask: [B, 1 or T, L] bool, true = the key is visible, or an additive float; None = all keys are visible. Also
            [B, H / KV * T, L], from `shared_mask`.
    Returns: [B, T, H * D].
    """
    # Query heads of one group become extra query rows, so keys and values are never repeated.
    B, T, H, D = q.shape
    groups = H // k.shape[1]
    rows = q.view(B, T, -1, groups, D).permute(0, 2, 3, 1, 4).reshape(B, -1, groups * T, D)
    if mask is not None:
        mask = mask[:, None]
        if mask.shape[2] not in (1, groups * T):
            mask = mask.repeat(1, 1, groups, 1)
    out = F.scaled_dot_product_attention(rows, k, v, attn_mask=mask)
    return out.view(B, -1, groups, T, D).permute(0, 3, 1, 2, 4).reshape(B, T, H * D)


def shared_mask(view: CacheView, groups: int, dtype: torch.dtype) -> CacheView:
    """A view whose mask is made once for all layers: additive, with the rows of all query heads of a group.

    groups: query heads for each key/value head. Returns: the view with a mask [B, 1 or groups * T, L] of `dtype`.
    """
    mask = view.mask
    assert mask is not None, "expected a view with a mask"
    bias = torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -torch.inf)
    return view._replace(mask=bias.repeat(1, groups, 1) if groups > 1 and mask.shape[1] > 1 else bias)


class DecoderHyperparameters(Protocol):
    """The part of a `config.json` that has a decoder stack's dimensions, under the names of transformers."""

    @property
    def hidden_size(self) -> int: ...

    @property
    def intermediate_size(self) -> int: ...

    @property
    def num_hidden_layers(self) -> int: ...

    @property
    def num_attention_heads(self) -> int: ...

    @property
    def num_key_value_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def rms_norm_eps(self) -> float: ...

    @property
    def rope_theta(self) -> float: ...


@dataclass(frozen=True)
class DecoderConfig:
    """Dimensions of one decoder stack.

    width: D of the residual stream. inner: hidden width of the MLP. eps: of every norm. qk_norm: queries and keys have
    a norm per head (Qwen3).
    """

    vocab_size: int
    width: int
    inner: int
    n_layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    rope_theta: float
    qk_norm: bool

    @classmethod
    def of(cls, sizes: DecoderHyperparameters, *, vocab_size: int, qk_norm: bool) -> Self:
        """The dimensions that a checkpoint's `config.json` names."""
        return cls(
            vocab_size=vocab_size,
            width=sizes.hidden_size,
            inner=sizes.intermediate_size,
            n_layers=sizes.num_hidden_layers,
            heads=sizes.num_attention_heads,
            kv_heads=sizes.num_key_value_heads,
            head_dim=sizes.head_dim,
            eps=sizes.rms_norm_eps,
            rope_theta=sizes.rope_theta,
            qk_norm=qk_norm,
        )


class CausalAttention(nn.Module):
    """Rotary self-attention that appends to a slot cache; optional per-head norm of q and k (Qwen3)."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        self.q_proj = nn.Linear(config.width, config.heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(config.width, config.kv_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(config.width, config.kv_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.heads * config.head_dim, config.width, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(config.head_dim, config.eps) if config.qk_norm else nn.Identity()

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

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.self_attn = CausalAttention(config)
        self.mlp = GatedMLP(config.width, config.inner)
        self.input_layernorm = RMSNorm(config.width, config.eps)
        self.post_attention_layernorm = RMSNorm(config.width, config.eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, view: CacheView, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, view, k_cache, v_cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class LayerStack(Derived):
    """Decoder layers and final norm over a slot cache, after the embedding tables that the checkpoint keeps beside."""

    frequencies: Tensor

    def __init__(self, config: DecoderConfig, tables: dict[str, nn.Module]):
        """tables: modules by name, registered before the layers."""
        super().__init__()
        self.head_dim, self.rope_theta = config.head_dim, config.rope_theta
        self.groups = config.heads // config.kv_heads
        for name, table in tables.items():
            self.add_module(name, table)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.n_layers))
        self.norm = RMSNorm(config.width, config.eps)
        self.register_buffer("frequencies", torch.empty(config.head_dim // 2), persistent=False)

    def derive(self, device: torch.device | str, dtype: torch.dtype) -> None:
        self.frequencies = rotary_frequencies(self.head_dim, self.rope_theta, device)

    def forward(
        self, embeds: Tensor, cache: KVCache, slots: Tensor, n_new: Tensor, kv_len: int, backend: Backend
    ) -> Tensor:
        """Append rows to slots and return their hidden states after the final norm.

        Args:
            embeds: [B, T, D]; row b holds n_new[b] valid rows, left-aligned; the rest is padding.
            cache: keys and values of every slot; written and advanced in place.
            slots: [B] int64, distinct except for the scratch slot.
            n_new: [B] int64, 0..T.
            kv_len: cache rows to attend to; at least every slot's length plus n_new. Static per bucket.
            backend: runs the layers.
        Returns: [B, T, D]; padding rows are meaningless.
        """
        return backend.decoder_layers(self, embeds, cache, slots, n_new, kv_len)

    def run_layers(self, embeds: Tensor, cache: KVCache, slots: Tensor, n_new: Tensor, kv_len: int) -> Tensor:
        """`forward` in PyTorch operations; each layer may be compiled."""
        hidden = self.run_view(embeds, cache, cache.view(slots, n_new, embeds.shape[1], kv_len))
        cache.advance(slots, n_new)
        return hidden

    def run_view(self, embeds: Tensor, cache: KVCache, view: CacheView) -> Tensor:
        """Run rows [B, T, D] at the addresses of a view with a mask; does not advance the cache. Returns: [B, T, D]."""
        cos, sin = (part.unsqueeze(2) for part in rotary_angles(view.positions, self.frequencies))  # for all heads
        x = embeds
        if cache.runs_eager:
            view = shared_mask(view, self.groups, x.dtype)
        for layer, k_cache, v_cache in zip(self.layers, cache.k, cache.v, strict=True):
            x = layer(x, cos, sin, view, k_cache, v_cache)
        return self.norm(x)


class Backbone(LayerStack):
    """Decoder stack with one embedding: the `model` inside `llm` (Qwen3) and inside `tts` (Llama)."""

    embed_tokens: nn.Embedding

    def __init__(self, config: DecoderConfig):
        super().__init__(config, {"embed_tokens": nn.Embedding(config.vocab_size, config.width)})
