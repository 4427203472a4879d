"""Which way the Euler solve runs: the modules as they are, or the project's own GPU kernels."""

from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal

import torch

from models.errors import SettingsError
from models.token2wav.flow import Flow

if TYPE_CHECKING:
    from models.token2wav.dit_fused import FusedSolver

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
