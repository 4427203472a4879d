"""S3Gen with random weights, created on the target device: for measurements at the released sizes."""

import torch
from torch import Tensor

from models.layers.weights import assign_weights, on_meta, tensor_shapes
from models.token2wav.load.random_weights import mean_and_std
from models.token2wav.s3gen.load import FLOW, VOCODER, weight_dtype
from models.token2wav.s3gen.model import S3Gen
from models.token2wav.settings import S3FlowConfig, S3GenConfig, UNetConfig


def released_config(*, meanflow: bool = False) -> S3GenConfig:
    """The released sizes, of the variant with ten steps or of the mean flow."""
    return S3GenConfig(flow=S3FlowConfig(estimator=UNetConfig(meanflow=meanflow)))


def random_s3gen(
    config: S3GenConfig, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, seed: int = 0
) -> S3Gen:
    """All networks in eval mode. dtype: of the flow. Equal seed, device and type give equal weights."""
    with on_meta():
        model = S3Gen(config)
    generator = torch.Generator(device).manual_seed(seed)

    def drawn(name: str, shape: tuple[int, ...]) -> Tensor:
        mean, std = mean_and_std(name.removeprefix(VOCODER).removeprefix(FLOW), shape)
        weight = torch.empty(shape, dtype=weight_dtype(name, dtype), device=device)
        return weight.normal_(mean, std, generator=generator)

    tensors = {name: drawn(name, shape) for name, shape in tensor_shapes(model).items()}
    return assign_weights(model, tensors, device, dtype)
