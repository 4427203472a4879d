"""A model with random weights, drawn on its device, for measurements at real dimensions.

The scale of the weights keeps activations finite; the output has no meaning.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from models.checkpoint.config import OmniConfig
from models.checkpoint.precision import UNQUANTIZED, Precision
from models.checkpoint.quantized import QuantizedMatrix, quantize
from models.layers.weights import assign_each
from models.load import build_on_meta, weight_dtype
from models.omni import OmniModel


def random_model(
    config: OmniConfig,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    precision: Precision = UNQUANTIZED,
    seed: int = 0,
) -> OmniModel:
    """A model in eval mode with every weight drawn on `device` as `dtype`, then rounded as `precision` says.

    The same seed, device and dtype give the same weights.
    """
    model = build_on_meta(config)
    generator = torch.Generator(device).manual_seed(seed)

    def weights() -> Iterator[tuple[str, Tensor | QuantizedMatrix]]:
        for name, meta in model.state_dict().items():
            drawn = _draw(name, torch.empty(meta.shape, dtype=weight_dtype(name, dtype), device=device), generator)
            kind = precision.kind_of(name, tuple(meta.shape))
            yield name, drawn if kind is None else quantize(drawn, kind)

    return assign_each(model, weights(), device, dtype)


def _draw(name: str, tensor: Tensor, generator: torch.Generator) -> Tensor:
    if name.endswith("original0"):
        return tensor.fill_(1.0)  # row norms of the weight-normed head
    if tensor.ndim == 1:
        # Norm weights near one, biases near zero.
        return tensor.normal_(0.0 if name.endswith("bias") else 1.0, 0.02, generator=generator)
    # Preserves the variance of activations. Rows of embeddings are shorter than one, as trained ones are.
    return tensor.normal_(0.0, 1 / math.sqrt(math.prod(tensor.shape[1:])), generator=generator)
