"""Vocoder modules with random weights, created on the target device: for measurements at the released sizes.

Contains the scale of each weight, chosen so that the sound is neither silent nor clipped and has the pitch of a voice.
"""

import math

import torch

from models.checkpoint.precision import UNQUANTIZED, Precision
from models.checkpoint.quantized import quantize
from models.layers.quantized import Weight
from models.layers.weights import Tree, assign_each, on_meta, tensor_shapes
from models.token2wav.flow.flow import Flow
from models.token2wav.hift import hift
from models.token2wav.hift.hift import Hift
from models.token2wav.load.parts import DtypeOf, FlowAndHift, KindOf
from models.token2wav.settings import FlowConfig, HiftConfig

MEAN_F0 = 190.0  # Hz
F0_SPREAD = 30.0


def random_parts(
    flow: FlowConfig | None = None,
    hift_config: HiftConfig | None = None,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    hift_dtype: torch.dtype = torch.float32,
    precision: Precision = UNQUANTIZED,
    seed: int = 0,
) -> FlowAndHift:
    """Flow and HiFT of these sizes; None = the released sizes. Equal seed, device and types give equal weights.

    precision: of the flow's layers, which are quantised after they are drawn.
    """
    flow, hift_config = flow or FlowConfig(), hift_config or HiftConfig()
    with on_meta():
        parts = Flow(flow), Hift(hift_config)
    generator = torch.Generator(device).manual_seed(seed)
    return FlowAndHift(
        filled(parts[0], generator, device, lambda _: dtype, precision.flow_kind_of),
        filled(parts[1], generator, device, lambda name: hift.weight_dtype(name, hift_dtype)),
    )


def mean_and_std(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Mean and standard deviation of a folded weight of any of the vocoder's modules."""
    fan_in = math.prod(shape[1:])
    match name.split("."):
        case ["f0_predictor", "classifier", "weight"]:
            return 0.0, F0_SPREAD / math.sqrt(fan_in)
        case ["f0_predictor", "classifier", "bias"]:
            return MEAN_F0, 0.0
        case ["f0_predictor", "condnet", _, "weight"]:
            return 0.0, 1.5 / math.sqrt(fan_in)  # compensates for the attenuation of ELU
        case ["conv_post", "bias"]:
            return 0.7, 0.1  # log magnitude of the spectrum
        case ["conv_post", "weight"]:
            return 0.0, 0.3 / math.sqrt(fan_in)
        case ["ups", _, "weight"]:
            return 0.0, 1 / math.sqrt(2 * shape[0])  # each output depends on about two taps
        case ["resblocks" | "source_resblocks", _, "convs2", _, "weight"]:
            return 0.0, 0.3 / math.sqrt(fan_in)  # nine of them are added to the residual stream
        case [*_, "alpha"]:
            return 1.0, 0.1
        case ["input_embedding", "weight"]:
            return 0.0, 1.0
    if len(shape) == 1:
        return (0.0, 0.1) if name.endswith("bias") else (1.0, 0.1)
    return 0.0, 1 / math.sqrt(fan_in)


def filled(
    module: Tree,
    generator: torch.Generator,
    device: torch.device | str,
    dtype_of: DtypeOf,
    kind_of: KindOf = UNQUANTIZED.kind_of,
) -> Tree:
    """The module from the meta device, with random weights of `mean_and_std`."""

    def drawn(name: str, shape: tuple[int, ...]) -> Weight:
        mean, std = mean_and_std(name, shape)
        weight = torch.empty(shape, dtype=dtype_of(name), device=device).normal_(mean, std, generator=generator)
        kind = kind_of(name, shape)
        return weight if kind is None else quantize(weight, kind)

    weights = ((name, drawn(name, shape)) for name, shape in tensor_shapes(module).items())
    return assign_each(module, weights, device, dtype_of(""))
