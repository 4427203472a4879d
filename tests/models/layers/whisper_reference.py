"""Reference formula of the audio encoder: float64, one clip, convolutions over its frames with zero padding."""

import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.layers import transformer_reference as slow


def convolve(apm: nn.Module, frames: Tensor) -> Tensor:
    """[bins, n] -> [(n + 1) // 2, D], with zeros around the frames."""
    w, x = slow.weights_of(apm), frames.double()[None]
    for name, stride in (("conv1", 1), ("conv2", 2)):
        x = slow.gelu(F.conv1d(x, w(f"{name}.weight"), w(f"{name}.bias"), stride=stride, padding=1))
    return x[0].T


def encode(apm: nn.Module, rows: Tensor, visible: Tensor, n_heads: int) -> Tensor:
    """Convolved rows [n, D] from position 0 on; row i attends to the rows j with visible[i, j]."""
    w = slow.weights_of(apm)
    x = rows + w("embed_positions.weight")[: len(rows)]
    for i in range(len(apm.layers)):
        name = f"layers.{i}"
        h = slow.layer_norm(x, w, f"{name}.self_attn_layer_norm", 1e-5)
        x = x + slow.self_attention(h, w, f"{name}.self_attn", n_heads, visible)
        h = slow.layer_norm(x, w, f"{name}.final_layer_norm", 1e-5)
        x = x + slow.linear(slow.gelu(slow.linear(h, w, f"{name}.fc1")), w, f"{name}.fc2")
    return slow.layer_norm(x, w, "layer_norm", 1e-5)
