"""Whether the project's own GPU kernels can take the place of the layers as they are written."""

from importlib.util import find_spec

import torch


def suits(device: torch.device) -> bool:
    """Whether kernels run on this device: Triton comes with the GPU builds of torch alone."""
    return device.type == "cuda" and find_spec("triton") is not None
