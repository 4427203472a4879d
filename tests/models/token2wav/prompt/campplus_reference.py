"""CAMPPlus by its formulas: float64, one sound, batch norms not folded, loops over segments.

Also random tensors under the names in training.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from models.token2wav.settings import CampPlusConfig

LAYERS = {1: (12, 1), 2: (24, 2), 3: (16, 2)}


def random_tensors(config: CampPlusConfig, seed: int) -> dict[str, Tensor]:
    """Every tensor before folding, at any size."""
    generator, tensors = torch.Generator().manual_seed(seed), {}

    def norm(name: str, channels: int, affine: bool = True) -> None:
        if affine:
            tensors[f"{name}.weight"] = 0.5 + torch.rand(channels, generator=generator)
            tensors[f"{name}.bias"] = torch.randn(channels, generator=generator) * 0.3
        tensors[f"{name}.running_mean"] = torch.randn(channels, generator=generator) * 0.3
        tensors[f"{name}.running_var"] = 0.5 + torch.rand(channels, generator=generator)
        tensors[f"{name}.num_batches_tracked"] = torch.tensor(7)

    def conv(name: str, *shape: int, bias: bool = False) -> None:
        fan_in = math.prod(shape[1:])
        tensors[f"{name}.weight"] = torch.randn(shape, generator=generator) / fan_in**0.5
        if bias:
            tensors[f"{name}.bias"] = torch.randn(shape[0], generator=generator) * 0.3

    front, width, channels = config.front_channels, config.growth * config.bottleneck, config.channels
    conv("head.conv1", front, 1, 3, 3)
    norm("head.bn1", front)
    for block in ("layer1.0", "layer1.1", "layer2.0", "layer2.1"):
        for number in (1, 2):
            conv(f"head.{block}.conv{number}", front, front, 3, 3)
            norm(f"head.{block}.bn{number}", front)
        if block.endswith("0"):
            conv(f"head.{block}.shortcut.0", front, front, 1, 1)
            norm(f"head.{block}.shortcut.1", front)
    conv("head.conv2", front, front, 3, 3)
    norm("head.bn2", front)
    conv("xvector.tdnn.linear", channels, front * config.n_mels // 8, 5)
    norm("xvector.tdnn.nonlinear.batchnorm", channels)
    for block, (n_layers, _) in LAYERS.items():
        for layer in range(1, n_layers + 1):
            name = f"xvector.block{block}.tdnnd{layer}"
            norm(f"{name}.nonlinear1.batchnorm", channels)
            conv(f"{name}.linear1", width, channels, 1)
            norm(f"{name}.nonlinear2.batchnorm", width)
            conv(f"{name}.cam_layer.linear_local", config.growth, width, 3)
            conv(f"{name}.cam_layer.linear1", width // 2, width, 1, bias=True)
            conv(f"{name}.cam_layer.linear2", config.growth, width // 2, 1, bias=True)
            channels += config.growth
        norm(f"xvector.transit{block}.nonlinear.batchnorm", channels)
        conv(f"xvector.transit{block}.linear", channels // 2, channels, 1)
        channels //= 2
    norm("xvector.out_nonlinear.batchnorm", channels)
    conv("xvector.dense.linear", config.embedding, 2 * channels, 1)
    norm("xvector.dense.nonlinear.batchnorm", config.embedding, affine=False)
    return tensors


def vector(tensors: dict[str, Tensor], fbank: Tensor) -> Tensor:
    """[embedding] float64 for fbank [T, n_mels]."""
    w = {name: tensor.double() for name, tensor in tensors.items()}

    def norm(x: Tensor, name: str) -> Tensor:
        shape = (-1, *[1] * (x.ndim - 1))
        x = (x - w[f"{name}.running_mean"].view(shape)) / (w[f"{name}.running_var"].view(shape) + 1e-5).sqrt()
        if f"{name}.weight" in w:
            x = x * w[f"{name}.weight"].view(shape) + w[f"{name}.bias"].view(shape)
        return x

    def conv(x: Tensor, name: str, **how: object) -> Tensor:
        call: Callable[..., Tensor] = F.conv2d if w[f"{name}.weight"].ndim == 4 else F.conv1d
        return call(x[None], w[f"{name}.weight"], w.get(f"{name}.bias"), **how)[0]

    def residual(x: Tensor, name: str, stride: int) -> Tensor:
        y = norm(conv(x, f"{name}.conv1", stride=(stride, 1), padding=1), f"{name}.bn1").relu()
        y = norm(conv(y, f"{name}.conv2", padding=1), f"{name}.bn2")
        if stride > 1:
            x = norm(conv(x, f"{name}.shortcut.0", stride=(stride, 1)), f"{name}.shortcut.1")
        return (x + y).relu()

    def gated(x: Tensor, name: str, dilation: int) -> Tensor:
        local = conv(x, f"{name}.linear_local", padding=dilation, dilation=dilation)
        whole, parts = x.mean(1, keepdim=True), []
        for start in range(0, x.shape[1], 100):
            context = whole + x[:, start : start + 100].mean(1, keepdim=True)
            gate = conv(conv(context, f"{name}.linear1").relu(), f"{name}.linear2").sigmoid()
            parts.append(local[:, start : start + 100] * gate)
        return torch.cat(parts, dim=1)

    x = norm(conv(fbank.double().T[None], "head.conv1", padding=1), "head.bn1").relu()
    for block in ("layer1", "layer2"):
        x = residual(residual(x, f"head.{block}.0", 2), f"head.{block}.1", 1)
    x = norm(conv(x, "head.conv2", stride=(2, 1), padding=1), "head.bn2").relu().flatten(0, 1)
    x = norm(conv(x, "xvector.tdnn.linear", stride=2, padding=2), "xvector.tdnn.nonlinear.batchnorm").relu()
    for block, (n_layers, dilation) in LAYERS.items():
        for layer in range(1, n_layers + 1):
            name = f"xvector.block{block}.tdnnd{layer}"
            y = conv(norm(x, f"{name}.nonlinear1.batchnorm").relu(), f"{name}.linear1")
            y = norm(y, f"{name}.nonlinear2.batchnorm").relu()
            x = torch.cat((x, gated(y, f"{name}.cam_layer", dilation)))
        name = f"xvector.transit{block}"
        x = conv(norm(x, f"{name}.nonlinear.batchnorm").relu(), f"{name}.linear")
    x = norm(x, "xvector.out_nonlinear.batchnorm").relu()
    x = torch.cat((x.mean(1), x.std(1)))[:, None]
    return norm(conv(x, "xvector.dense.linear"), "xvector.dense.nonlinear.batchnorm")[:, 0]
