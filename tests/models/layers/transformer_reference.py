"""Reference formulas of transformer layers: float64, one sequence, no cache, no batch, loops over heads."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Weights = Callable[[str], Tensor]


def weights_of(module: torch.nn.Module) -> Weights:
    """Float64 weight by its name in the checkpoint."""
    state = {name: tensor.double() for name, tensor in module.state_dict().items()}
    return state.__getitem__


def linear(x: Tensor, w: Weights, name: str) -> Tensor:
    """x [T, in] times the weight `name`, plus its bias where the checkpoint has one."""
    y = x @ w(f"{name}.weight").T
    try:
        return y + w(f"{name}.bias")
    except KeyError:
        return y


def layer_norm(x: Tensor, w: Weights, name: str, eps: float) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * w(f"{name}.weight") + w(f"{name}.bias")


def rms_norm(x: Tensor, w: Weights, name: str, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * w(f"{name}.weight")


def gelu(x: Tensor) -> Tensor:
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


def gelu_tanh(x: Tensor) -> Tensor:
    return x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2


def rope(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """x [T, D] with pair (i, i + D/2) as one complex number, rotated by position * theta^(-2i/D)."""
    half = x.shape[1] // 2
    speed = torch.tensor([theta ** (-i / half) for i in range(half)], dtype=torch.float64)
    turned = torch.complex(x[:, :half], x[:, half:]) * torch.exp(1j * positions.double()[:, None] * speed)
    return torch.cat((turned.real, turned.imag), dim=1)


def attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None = None) -> Tensor:
    """q [T, D], k and v [L, D], visible [T, L] bool. Returns: [T, D]."""
    scores = q @ k.T / math.sqrt(q.shape[1])
    if visible is not None:
        scores = scores.masked_fill(~visible, -math.inf)
    return scores.softmax(-1) @ v


def heads_of(x: Tensor, head_dim: int) -> Sequence[Tensor]:
    return x.split(head_dim, dim=1)


def decoder(
    backbone: torch.nn.Module,
    embeds: Tensor,
    *,
    head_dim: int,
    theta: float,
    eps: float,
    qk_norm: bool,
    positions: Tensor | None = None,
    visible: Tensor | None = None,
) -> Tensor:
    """Rows [T, D] through a causal rotary decoder stack and its final norm. Returns: [T, D] float64."""
    w, x = weights_of(backbone), embeds.double()
    n = len(x)
    positions = torch.arange(n) if positions is None else positions
    visible = torch.ones(n, n, dtype=torch.bool).tril() if visible is None else visible
    for i in range(len(backbone.layers)):
        name = f"layers.{i}"
        h = rms_norm(x, w, f"{name}.input_layernorm", eps)
        q, k, v = (heads_of(linear(h, w, f"{name}.self_attn.{p}_proj"), head_dim) for p in "qkv")
        if qk_norm:
            q = [rms_norm(part, w, f"{name}.self_attn.q_norm", eps) for part in q]
            k = [rms_norm(part, w, f"{name}.self_attn.k_norm", eps) for part in k]
        q, k = ([rope(part, positions, theta) for part in parts] for parts in (q, k))
        shared = len(q) // len(k)
        out = [attention(part, k[j // shared], v[j // shared], visible) for j, part in enumerate(q)]
        x = x + linear(torch.cat(out, dim=1), w, f"{name}.self_attn.o_proj")
        h = rms_norm(x, w, f"{name}.post_attention_layernorm", eps)
        gate = linear(h, w, f"{name}.mlp.gate_proj")
        x = x + linear(gate * gate.sigmoid() * linear(h, w, f"{name}.mlp.up_proj"), w, f"{name}.mlp.down_proj")
    return rms_norm(x, w, "norm", eps)


def self_attention(x: Tensor, w: Weights, name: str, n_heads: int, visible: Tensor | None = None) -> Tensor:
    """Self-attention of rows [T, D] with projections q, k, v and out. Returns: [T, D]."""
    q, k, v = (heads_of(linear(x, w, f"{name}.{p}_proj"), x.shape[1] // n_heads) for p in "qkv")
    out = [attention(*parts, visible) for parts in zip(q, k, v, strict=True)]
    return linear(torch.cat(out, dim=1), w, f"{name}.out_proj")
