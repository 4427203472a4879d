"""Whether the project's own GPU kernels can run on a device, and counters of the kernels that Triton has loaded.

Imports neither Triton nor kernels.
"""

from importlib.util import find_spec
from typing import ClassVar

import torch


def supports_kernels(device: torch.device) -> bool:
    """Whether kernels run on this device: a GPU, with Triton, which comes with the GPU builds of torch alone."""
    return device.type == "cuda" and find_spec("triton") is not None


class LoadedKernels:
    """Counters of this process; each kernel counts once per set of argument types.

    n: kernels that Triton has compiled or read from its cache. n_cached: those read from the cache.
    folders: names of the cache folders that contain them.
    """

    n = 0
    n_cached = 0
    folders: ClassVar[set[str]] = set()

    @classmethod
    def record(cls, was_cached: bool, folder: str) -> None:
        cls.n += 1
        cls.n_cached += was_cached
        cls.folders.add(folder)
