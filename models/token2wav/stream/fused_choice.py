"""Which way the flow and HiFT run: the modules as they are, or the project's kernels. The flow is one or the other."""

from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

from models.errors import SettingsError
from models.graphs.kernel_support import supports_kernels
from models.token2wav.flow.flow import Flow
from models.token2wav.hift.hift import Hift

if TYPE_CHECKING:
    from models.token2wav.flow.conformer_fused import FusedLayers
    from models.token2wav.flow.dit_fused import FusedSolver
    from models.token2wav.hift.hift_fused import FusedHift

Kernels = Literal["auto", "plain", "fused"]
HEAD_DIMS = (16, 32, 64, 128)  # what the attention kernels' tiles are made for


class FusedFlow(NamedTuple):
    """What takes the place of the encoder's layers and of `flow_state.solve`."""

    layers: "FusedLayers"
    solver: "FusedSolver"


def fused_flow(flow: Flow, kernels: Kernels) -> FusedFlow | None:
    """The flow made of kernels, or None for the plain one. Raises: SettingsError if kernels cannot be had."""
    head_dims = flow.encoder.head_dim, flow.config.estimator.head_dim
    if not _chosen(kernels, flow.device, flow.dtype, torch.backends.cuda.matmul.allow_tf32, head_dims):
        return None
    # Only here: Triton comes with the GPU builds of torch alone.
    from models.token2wav.flow.conformer_fused import FusedLayers
    from models.token2wav.flow.dit_fused import FusedSolver

    with torch.no_grad():
        return FusedFlow(FusedLayers(flow.encoder), FusedSolver(flow))


def fused_hift(hift: Hift, kernels: Kernels) -> "FusedHift | None":
    """HiFT made of kernels, or None for the plain one. Raises: SettingsError if kernels cannot be had."""
    weight = hift.conv_pre.weight
    if not _chosen(kernels, weight.device, weight.dtype, torch.backends.cudnn.allow_tf32):
        return None
    # Only here: Triton comes with the GPU builds of torch alone.
    from models.token2wav.hift.hift_fused import FusedHift

    with torch.no_grad():
        return FusedHift(hift)


def _chosen(
    kernels: Kernels, device: torch.device, dtype: torch.dtype, has_tf32: bool, head_dims: tuple[int, ...] = ()
) -> bool:
    """Whether kernels are to run. has_tf32: float32 products may be rounded. head_dims: of attention that they hold.

    Raises: SettingsError for "fused" where they cannot.
    """
    can_run = supports_kernels(device) and set(head_dims) <= set(HEAD_DIMS)
    if kernels == "fused" and not can_run:
        heads = f" and heads of {HEAD_DIMS}" if head_dims else ""
        got = f"{device.type}, heads of {head_dims}" if head_dims else device.type
        raise SettingsError("fused kernels", expected=f"a CUDA device with Triton{heads}", got=got)
    # Without tensor cores the products inside kernels are slower than separate ones.
    is_exact = dtype == torch.float32 and not has_tf32
    return kernels == "fused" or (kernels == "auto" and can_run and not is_exact)
