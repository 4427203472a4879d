"""Frees the memory of an engine, its compiled code and its graphs, and reads the memory in use."""

import contextlib
import ctypes
import gc
import resource
from pathlib import Path

import torch

from models.graphs.compiler import reset_compiler
from models.graphs.growing_memory import mapped_bytes

PAGE = resource.getpagesize()
STATM = Path("/proc/self/statm")


def memory_bytes(device: torch.device | None) -> int:
    """Bytes of this process: GPU memory that torch reserves or that growing blocks hold; on a CPU resident memory."""
    if device is not None and device.type == "cuda":
        return torch.cuda.memory_reserved(device) + mapped_bytes(device)
    try:
        return int(STATM.read_text().split()[1]) * PAGE
    except OSError:  # not Linux
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def own_bytes() -> int:
    """Resident bytes of this process without files that it maps, such as weights; 0 where they are not reported."""
    try:
        _, resident, shared, *_ = STATM.read_text().split()
        return (int(resident) - int(shared)) * PAGE
    except OSError:  # not Linux
        return 0


def freeze_heap() -> None:
    """Exclude all existing objects from garbage collection.

    A compiler leaves a million small objects, and each full collection over them stops all threads for half a second.
    """
    gc.collect()
    gc.freeze()


def release_cached(device: torch.device | None) -> dict[str, int]:
    """Collect garbage and return free memory to the system, while another model stays with its compiled code.

    Returns: as `release_memory`.
    """
    before = memory_bytes(device)
    gc.unfreeze()
    gc.collect()
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    gc.freeze()
    with contextlib.suppress(OSError, AttributeError):  # glibc only
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    return {"before": before, "after": memory_bytes(device)}


def release_memory(device: torch.device | None) -> dict[str, int]:
    """Drop compiled code, collect garbage, and return free memory to the system.

    Args:
        device: of the engine; None if it failed to load.

    Returns: `before` and `after`, bytes as in `memory_bytes`.
    """
    before = memory_bytes(device)
    reset_compiler()  # the compiler's caches reference the modules, and Inductor's graphs their memory pools
    gc.unfreeze()
    gc.collect()
    if torch.cuda.is_initialized():  # an engine that failed to load has used memory too
        with contextlib.suppress(RuntimeError):  # a device in an error state; memory is freed all the same
            torch.cuda.synchronize(device)
        if hasattr(torch._C, "_cuda_clearCublasWorkspaces"):  # one for each stream that ran a matrix product
            torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        if hasattr(torch._C, "_host_emptyCache"):  # pinned memory, which holds embeddings
            torch._C._host_emptyCache()
    with contextlib.suppress(OSError, AttributeError):  # glibc only
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    return {"before": before, "after": memory_bytes(device)}
