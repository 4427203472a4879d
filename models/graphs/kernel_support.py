"""Whether the project's own GPU kernels can run in place of layers as they are written, and how many were made."""

from importlib.util import find_spec
from typing import ClassVar

import torch


def suits(device: torch.device) -> bool:
    """Whether kernels run on this device: Triton comes with the GPU builds of torch alone."""
    return device.type == "cuda" and find_spec("triton") is not None


class Made:
    """n: kernels that Triton has made in this process or read from its folder, each for one kind of arguments.
    n_kept: those that were read. folders: names of the folders that Triton keeps them in.
    """

    n = 0
    n_kept = 0
    folders: ClassVar[set[str]] = set()

    @classmethod
    def one_more(cls, was_kept: bool, folder: str) -> None:
        cls.n += 1
        cls.n_kept += was_kept
        cls.folders.add(folder)
