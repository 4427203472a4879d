"""Gives memory back that an engine had, its compiled code and graphs too. Knows allocators, not what was inside."""

import contextlib
import ctypes
import gc
import resource
import sys
from pathlib import Path

import torch

from models.graphs.compiler import reset_compiler

PAGE = resource.getpagesize()


def memory_bytes(device: torch.device | None) -> int:
    """What this process holds: of the GPU's memory, or resident memory on the CPU."""
    if device is not None and device.type == "cuda":
        return torch.cuda.memory_reserved(device)
    if sys.platform == "linux":
        return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def settle_heap() -> None:
    """What is there stays: a collection does not look at it any more. A compiler leaves a million small things behind,
    and going through them would hold up every thread for half a second, now and then, for as long as the worker lives.
    """
    gc.collect()
    gc.freeze()


def release_memory(device: torch.device | None) -> dict[str, int]:
    """Forget compiled code, collect, and hand free memory back to the system.

    device: where the engine was, None if nobody knows. Returns: `before` and `after` in bytes, as `memory_bytes`.
    """
    before = memory_bytes(device)
    reset_compiler()  # its caches hold the modules, and Inductor's own graphs their pools
    gc.unfreeze()
    gc.collect()
    if torch.cuda.is_initialized():  # an engine that failed to load has left something too
        with contextlib.suppress(RuntimeError):  # a device in trouble; what is ours is let go all the same
            torch.cuda.synchronize(device)
        if hasattr(torch._C, "_cuda_clearCublasWorkspaces"):  # one for each stream that ever multiplied
            torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        if hasattr(torch._C, "_host_emptyCache"):  # pinned memory: embeddings were there
            torch._C._host_emptyCache()
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # another C library keeps what it keeps
            ctypes.CDLL("libc.so.6").malloc_trim(0)
    return {"before": before, "after": memory_bytes(device)}
