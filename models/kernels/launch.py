"""Launch options of kernels: programmatic dependent launch (PDL), and a counter of the kernels that Triton loads.

Importing this module starts the counter; after warm-up it must not increase. Requires Triton.
"""

from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from models.checkpoint.quantized import QuantizedMatrix
from models.graphs.kernel_support import LoadedKernels

FEW_PROGRAMS = 1024  # kernels of at most this many programs take a few microseconds
LARGE_TILES = 192 << 10  # bytes
SMALL_WEIGHT = 1 << 23  # numbers of a weight whose product takes a few microseconds


class Launch(NamedTuple):
    """A call of a kernel: its grid, arguments, constants and options."""

    grid: tuple[int, ...]
    args: tuple[Any, ...]
    options: dict[str, Any]


def launch_options(device: torch.device, n_programs: int = 0) -> dict[str, bool]:
    """Launch arguments of a kernel with a PDL parameter; enables PDL on devices that support it.

    With PDL a kernel starts while the previous one still runs. Every program must call `tl.extra.cuda.gdc_wait` before
    it accesses anything but data that no kernel in flight writes, such as weights: later kernels rely on all earlier
    ones being finished.

    Args:
        n_programs: above FEW_PROGRAMS, PDL is off: waiting programs would occupy multiprocessors that the previous
            kernel needs.
    """
    if n_programs <= FEW_PROGRAMS and device.type == "cuda" and _has_pdl(device.index):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


def product_options(weight: Tensor | QuantizedMatrix) -> dict[str, bool]:
    """Launch arguments of a product of few rows with `weight` [N, K]: PDL, and EARLY.

    EARLY: the next kernel may start while the product runs. After a product of a large weight it starts when that ends:
    programs of the next product that wait beside it would be spread unevenly over the multiprocessors, since some have
    more room left, and kernels of other streams would find none.
    """
    N, K = weight.shape
    options = launch_options(weight.device)
    return {**options, "EARLY": options["PDL"] and N * K <= SMALL_WEIGHT}


# The kernel that a thread compiled last: whether it came from Triton's cache, and its cache folder. Triton reports both
# during compilation, and `_count` runs after it.
_newest: ContextVar[tuple[bool, str]] = ContextVar("newest", default=(False, ""))


def _remember(*, metadata_group: dict[str, str], cache_hit: bool, **_: Any) -> None:
    _newest.set((cache_hit, next((Path(path).parent.name for path in metadata_group.values()), "")))


def _count(*_: Any, **__: Any) -> None:
    LoadedKernels.record(*_newest.get())


triton.knobs.compilation.listener = _remember
triton.knobs.runtime.jit_post_compile_hook = _count


@cache
def _has_pdl(index: int) -> bool:
    return not triton.knobs.runtime.interpret and torch.cuda.get_device_capability(index) >= (9, 0)


def has_large_tiles(device: torch.device) -> bool:
    """Whether programs may hold LARGE_TILES of shared memory and start before the previous kernel ends.

    Of a CPU, where kernels are interpreted, it is true.
    """
    return device.type != "cuda" or (
        _capability(device.index) >= (9, 0) and _shared_memory(device.index) >= LARGE_TILES
    )


def has_native_fp8(device: torch.device) -> bool:
    """Whether a GPU has instructions for fp8 numbers (float8_e4m3fn)."""
    return device.type == "cuda" and _capability(device.index) >= (8, 9)


def multiplies_pairs(device: torch.device) -> bool:
    """Whether a GPU multiplies rows as pairs of 8-bit numbers, which was measured on capability 9.0 alone."""
    return device.type == "cuda" and _capability(device.index) == (9, 0)


@cache
def _shared_memory(index: int) -> int:
    """Bytes that one program may have."""
    return int(triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"])


@cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)
