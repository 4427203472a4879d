"""Which way the encoder's layers, the Euler solve and HiFT run: the modules as they are, or the project's kernels."""

from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal

import torch

from models.errors import SettingsError
from models.token2wav.flow import Flow
from models.token2wav.hift import Hift

if TYPE_CHECKING:
    from models.token2wav.conformer_fused import FusedLayers
    from models.token2wav.dit_fused import FusedSolver
    from models.token2wav.hift_fused import FusedHift

Kernels = Literal["auto", "plain", "fused"]
HEAD_DIMS = (16, 32, 64, 128)  # what the attention kernel's tiles are made for


def fused_solver(flow: Flow, kernels: Kernels) -> "FusedSolver | None":
    """The solve made of kernels, or None for the plain one. Raises: SettingsError if kernels cannot be had."""
    head_dim = flow.config.estimator.head_dim
    suits = flow.device.type == "cuda" and head_dim in HEAD_DIMS and find_spec("triton") is not None
    if kernels == "fused" and not suits:
        got = f"{flow.device.type}, heads of {head_dim}"
        raise SettingsError("fused kernels", expected=f"a CUDA device with Triton and heads of {HEAD_DIMS}", got=got)
    # Without tensor cores the products inside the attention kernel are slower than separate ones.
    exact = flow.dtype == torch.float32 and not torch.backends.cuda.matmul.allow_tf32
    if kernels == "plain" or not suits or (kernels == "auto" and exact):
        return None
    # Only here: Triton comes with the GPU builds of torch alone.
    from models.token2wav.dit_fused import FusedSolver

    with torch.no_grad():
        return FusedSolver(flow)


def fused_layers(flow: Flow, kernels: Kernels) -> "FusedLayers | None":
    """The encoder's layers made of kernels, or None for the plain ones; of any other width of heads, plain."""
    suits = flow.device.type == "cuda" and flow.encoder.head_dim in HEAD_DIMS and find_spec("triton") is not None
    exact = flow.dtype == torch.float32 and not torch.backends.cuda.matmul.allow_tf32
    if kernels == "plain" or not suits or (kernels == "auto" and exact):
        return None
    # Only here: Triton comes with the GPU builds of torch alone.
    from models.token2wav.conformer_fused import FusedLayers

    with torch.no_grad():
        return FusedLayers(flow.encoder)


def fused_hift(hift: Hift, kernels: Kernels) -> "Hift | FusedHift":
    """HiFT made of kernels, or as it is. Raises: SettingsError if kernels cannot be had."""
    weight = hift.conv_pre.weight
    suits = weight.device.type == "cuda" and find_spec("triton") is not None
    if kernels == "fused" and not suits:
        raise SettingsError("fused kernels", expected="a CUDA device with Triton", got=weight.device.type)
    exact = weight.dtype == torch.float32 and not torch.backends.cudnn.allow_tf32
    if kernels == "plain" or not suits or (kernels == "auto" and exact):
        return hift
    # Only here: Triton comes with the GPU builds of torch alone.
    from models.token2wav.hift_fused import FusedHift

    with torch.no_grad():
        return FusedHift(hift)
