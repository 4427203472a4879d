"""Whether the project's own GPU kernels can run in place of layers as they are written, and how many were made."""

from importlib.util import find_spec

import torch


def suits(device: torch.device) -> bool:
    """Whether kernels run on this device: Triton comes with the GPU builds of torch alone."""
    return device.type == "cuda" and find_spec("triton") is not None


class Made:
    """n: kernels that Triton has made or read from its folder in this process, each for one kind of arguments."""

    n = 0

    @classmethod
    def one_more(cls) -> None:
        cls.n += 1
