"""Vision encoder `vpm` (SigLIP shape): padded batches of patches to hidden rows.

Does not contain the cutting of images into slices and patches.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.checkpoint.config import VisionConfig
from models.layers.backend import Backend
from models.layers.transformer import attend


class VisionAttention(nn.Module):
    """Multi-head self-attention with biases."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, width)
        self.v_proj = nn.Linear(width, width)
        self.out_proj = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        B, L, D = x.shape
        q, k, v = (p(x).view(B, L, self.heads, D // self.heads) for p in (self.q_proj, self.k_proj, self.v_proj))
        return self.out_proj(attend(q, k.transpose(1, 2), v.transpose(1, 2), mask))


class VisionMLP(nn.Module):
    """fc1 -> GELU by its tanh approximation -> fc2."""

    def __init__(self, width: int, inner: int):
        super().__init__()
        self.fc1 = nn.Linear(width, inner)
        self.fc2 = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class VisionLayer(nn.Module):
    """Pre-norm attention and MLP, each added to the residual stream."""

    def __init__(self, config: VisionConfig):
        super().__init__()
        self.self_attn = VisionAttention(config.hidden_size, config.num_attention_heads)
        self.layer_norm1 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = VisionMLP(config.hidden_size, config.intermediate_size)
        self.layer_norm2 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.self_attn(self.layer_norm1(x), mask)
        return x + self.mlp(self.layer_norm2(x))


class VisionEmbeddings(nn.Module):
    """Patch projection plus a learned position row. The projection's weight has the shape of a convolution kernel."""

    def __init__(self, config: VisionConfig):
        super().__init__()
        side = config.patch_size
        self.patch_embedding = nn.Conv2d(config.num_channels, config.hidden_size, kernel_size=side, stride=side)
        self.position_embedding = nn.Embedding(config.table_side**2, config.hidden_size)

    def forward(self, patches: Tensor, position_ids: Tensor) -> Tensor:
        # Kernel size and stride are equal, so the convolution is one matrix product per patch.
        projected = F.linear(patches, self.patch_embedding.weight.flatten(1), self.patch_embedding.bias)
        return projected + self.position_embedding(position_ids)


class VisionEncoder(nn.Module):
    """The list of layers, under the checkpoint's name."""

    def __init__(self, config: VisionConfig, n_layers: int):
        super().__init__()
        self.layers = nn.ModuleList(VisionLayer(config) for _ in range(n_layers))


class Vpm(nn.Module):
    """SigLIP encoder; `drop_last_layer` leaves the last layer out."""

    def __init__(self, config: VisionConfig, drop_last_layer: bool = False):
        super().__init__()
        self.embeddings = VisionEmbeddings(config)
        self.encoder = VisionEncoder(config, config.num_hidden_layers - drop_last_layer)
        self.post_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, patches: Tensor, position_ids: Tensor, mask: Tensor, backend: Backend) -> Tensor:
        """Encode a padded batch of slices.

        Args:
            patches: [B, L, 3 * 14 * 14] normalised pixels, each row ordered (channel, y, x).
            position_ids: [B, L] int64 rows of the position table; 0 for padding.
            mask: [B, L] bool, true for real patches, which come first.
            backend: runs the layers.
        Returns: [B, L, D] after the final norm; padding rows are meaningless.
        """
        return backend.vision_layers(self, self.embeddings(patches, position_ids), mask)

    def run_layers(self, x: Tensor, mask: Tensor) -> Tensor:
        """The layers and the final norm in PyTorch operations; shapes as `Backend.vision_layers`."""
        # A large negative number instead of -inf keeps a row without any patch finite.
        bias = torch.zeros_like(mask, dtype=x.dtype).masked_fill(~mask, torch.finfo(x.dtype).min)[:, None]
        for layer in self.encoder.layers:
            x = layer(x, bias)
        return self.post_layernorm(x)
