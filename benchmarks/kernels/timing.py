"""Time of short calls, captured as one CUDA graph over more data than fits in the L2 cache.

Does not contain the timed kernels. On a CPU each call runs once in Triton's interpreter and is not timed.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.timing import L2_MULTIPLE

SAMPLES = 5
SAMPLE_MS = 6.0  # duration of the replays in one sample
MAX_COPIES = 256

Figures = dict[str, Any]


class Case(NamedTuple):
    """One row of the table. run: returns the figures of the part's columns."""

    name: str
    sizes: dict[str, int]
    run: Callable[[], Figures]


class Meter:
    """Device, dtype and timer of the kernels."""

    def __init__(self, device: torch.device, *, is_tiny: bool = False):
        """is_tiny: use sizes for Triton's interpreter, and float32, because its bfloat16 products are wrong."""
        self.device, self.is_tiny = device, is_tiny
        self.is_cuda = device.type == "cuda"
        self.dtype = torch.float32 if is_tiny else torch.bfloat16
        self._rotated_bytes = (
            L2_MULTIPLE * torch.cuda.get_device_properties(device).L2_cache_size if self.is_cuda else 0
        )

    def n_copies(self, n_bytes: int) -> int:
        """Number of operands of `n_bytes` to rotate through, so that each is evicted from the L2 cache before reuse."""
        return max(1, min(MAX_COPIES, -(-self._rotated_bytes // n_bytes)))

    def randn(self, *shape: int, dtype: torch.dtype | None = None, scale: float = 1.0) -> Tensor:
        """Normally distributed values. dtype: None = the model's."""
        tensor = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        for part in tensor.view(-1).split(2**30):  # fewer than 2**31 at once
            part.normal_(0.0, scale)
        return tensor

    def time_us(self, call: Callable[[int], Any], n: int, sample_ms: float = SAMPLE_MS) -> float | None:
        """Microseconds per call of call(0) ... call(n - 1), captured in one graph; the median of several samples."""
        call(0)
        if not self.is_cuda:
            return None
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(n):
                call(i)
        graph.replay()
        times = max(1, min(50, int(sample_ms / max(_replays_ms(graph, 1), 1e-3))))
        return 1e3 * float(np.median([_replays_ms(graph, times) for _ in range(SAMPLES)])) / times / n


def _replays_ms(graph: torch.cuda.CUDAGraph, times: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def gb_per_s(n_bytes: int, us: float | None) -> float | None:
    """Gigabytes per second; None if `us` is None."""
    return None if us is None else n_bytes / us / 1e3


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Norm of the difference / norm of `expected`."""
    got, expected = got.double(), expected.double()
    return float((got - expected).norm() / expected.norm())
