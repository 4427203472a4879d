"""The choice of backends: whether the flow and HiFT run as plain modules or on the project's own kernels.

The flow's encoder and solve always use the same backend.
"""

from typing import Literal

import torch

from models.errors import SettingsError
from models.graphs.kernel_support import supports_kernels
from models.token2wav.flow.flow import Flow
from models.token2wav.flow.flow_backend import FlowBackend, PlainFlow
from models.token2wav.hift.hift import Hift, HiftBackend

Kernels = Literal["auto", "plain", "fused"]
HEAD_DIMS = (16, 32, 64, 128)  # that the tiles of the attention kernels support


def flow_backend(flow: Flow, kernels: Kernels) -> FlowBackend:
    """The backend of the flow. Raises: SettingsError for "fused" where kernels cannot run."""
    head_dims = flow.encoder.head_dim, flow.config.estimator.head_dim
    if not _use_fused(kernels, flow.device, flow.dtype, torch.backends.cuda.matmul.allow_tf32, head_dims):
        return PlainFlow(flow)
    # A local import, because only the GPU builds of torch contain Triton.
    from models.token2wav.flow.flow_fused import FusedFlow

    with torch.no_grad():
        return FusedFlow(flow)


def hift_backend(hift: Hift, kernels: Kernels) -> HiftBackend:
    """The backend of HiFT. Raises: SettingsError for "fused" where kernels cannot run."""
    weight = hift.conv_pre.weight
    if not _use_fused(kernels, weight.device, weight.dtype, torch.backends.cudnn.allow_tf32):
        return hift
    # A local import, because only the GPU builds of torch contain Triton.
    from models.token2wav.hift.hift_fused import FusedHift

    with torch.no_grad():
        return FusedHift(hift)


def _use_fused(
    kernels: Kernels, device: torch.device, dtype: torch.dtype, has_tf32: bool, head_dims: tuple[int, ...] = ()
) -> bool:
    """Whether the backend is the fused one.

    Args:
        kernels: the setting.
        device: of the weights.
        dtype: of the weights.
        has_tf32: float32 products may be rounded to TF32.
        head_dims: of the attention inside; empty if there is none.
    Raises: SettingsError for "fused" where kernels cannot run.
    """
    can_run = supports_kernels(device) and set(head_dims) <= set(HEAD_DIMS)
    if kernels == "fused" and not can_run:
        heads = f" and heads of {HEAD_DIMS}" if head_dims else ""
        got = f"{device.type}, heads of {head_dims}" if head_dims else device.type
        raise SettingsError("fused kernels", expected=f"a CUDA device with Triton{heads}", got=got)
    # Without tensor cores the products inside the kernels are slower than the library's products.
    is_exact = dtype == torch.float32 and not has_tf32
    return kernels == "fused" or (kernels == "auto" and can_run and not is_exact)
