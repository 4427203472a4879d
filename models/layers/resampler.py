"""`resampler`: any number of patch rows to a fixed number of LLM rows, by cross-attention from learned queries.

Does not contain the vision encoder, whose rows are its input.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.layers.transformer import Derived, attend

MAX_SIDE = 4096  # longest side in patches that the coordinate table covers (a 57 344-pixel side)


class ResamplerAttention(nn.Module):
    """Multi-head cross-attention with one packed input projection, rows ordered q, k, v."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.in_proj_weight = nn.Parameter(torch.empty(3 * width, width))
        self.in_proj_bias = nn.Parameter(torch.empty(3 * width))
        self.out_proj = nn.Linear(width, width)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        weights, biases = self.in_proj_weight.chunk(3), self.in_proj_bias.chunk(3)
        q, k, v = (
            F.linear(x, w, b).unflatten(-1, (self.heads, -1))
            for x, w, b in zip((q, k, v), weights, biases, strict=True)
        )
        return self.out_proj(attend(q, k.transpose(1, 2), v.transpose(1, 2), mask))


class Resampler(Derived):
    """Cross-attention from learned queries to patch rows, with sine-cosine positions in two dimensions."""

    waves: Tensor

    def __init__(self, width_in: int, width: int, n_queries: int, heads: int, eps: float = 1e-6):
        super().__init__()
        self.width = width
        self.query = nn.Parameter(torch.empty(n_queries, width))
        self.kv_proj = nn.Linear(width_in, width, bias=False)
        self.attn = ResamplerAttention(width, heads)
        self.ln_q = nn.LayerNorm(width, eps=eps)
        self.ln_kv = nn.LayerNorm(width, eps=eps)
        self.ln_post = nn.LayerNorm(width, eps=eps)
        self.proj = nn.Parameter(torch.empty(width, width))
        self.register_buffer("waves", torch.empty(MAX_SIDE, width // 2), persistent=False)

    def derive(self, device: torch.device | str, dtype: torch.dtype) -> None:
        # Row p is [sin(p w) | cos(p w)] with w_i = 10000 ** (-i / (width / 4)), in float32.
        quarter = self.width // 4
        omega = 1.0 / 10000 ** (torch.arange(quarter, dtype=torch.float32, device=device) / quarter)
        angles = torch.arange(MAX_SIDE, dtype=torch.float32, device=device)[:, None] * omega
        self.waves = torch.cat((angles.sin(), angles.cos()), dim=-1)

    def positions(self, coords: Tensor) -> Tensor:
        """Position rows [B, L, D] float32 of coords [B, L, 2] (row, column); the half of the column comes first."""
        return torch.cat((self.waves[coords[..., 1]], self.waves[coords[..., 0]]), dim=-1)

    def forward(self, hidden: Tensor, coords: Tensor, mask: Tensor) -> Tensor:
        """Resample patch rows.

        Args:
            hidden: [B, L, width_in] from `vpm`; padding rows are ignored.
            coords: [B, L, 2] int64 (row, column) of each patch on its grid, below MAX_SIDE.
            mask: [B, L] bool, true for real patches.
        Returns: [B, n_queries, width].
        """
        values = self.ln_kv(self.kv_proj(hidden))
        keys = values + self.positions(coords).to(values.dtype)
        queries = self.ln_q(self.query).expand(hidden.shape[0], -1, -1)
        bias = torch.zeros_like(mask, dtype=values.dtype).masked_fill(~mask, torch.finfo(values.dtype).min)[:, None]
        return self.ln_post(self.attn(queries, keys, values, bias)) @ self.proj
