"""Times calls on one device, measures its copy and matrix product rates, and sets the precision of float32 products."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

L2_MULTIPLE = 4  # bytes written between two samples, as a multiple of the L2 cache
HEAD_START_CYCLES = 20_000_000  # about 10 ms of an idle kernel, longer than any graph launch
CEILING_REPEATS = 10


@dataclass(frozen=True)
class Timing:
    """Milliseconds over n samples."""

    p50_ms: float
    p95_ms: float
    n: int

    @classmethod
    def of(cls, samples: list[float]) -> "Timing":
        p50, p95 = np.percentile(samples, (50, 95))
        return cls(float(p50), float(p95), len(samples))


@dataclass(frozen=True)
class Ceilings:
    """Measured rates. copy: bytes read plus bytes written per second. matmul: FLOP per second by type name."""

    copy: float
    matmul: dict[str, float]


class DeviceClock:
    """Times calls on an idle device with a flushed L2 cache."""

    def __init__(self, device: torch.device):
        self.device = device
        self.is_cuda = device.type == "cuda"
        if self.is_cuda:
            size = L2_MULTIPLE * torch.cuda.get_device_properties(device).L2_cache_size
            self._flush = torch.empty(size, dtype=torch.uint8, device=device)

    def wait(self) -> None:
        """Synchronise with the device."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def seconds(self, call: Callable[[], Any]) -> tuple[float, Any]:
        """Wall-clock seconds of one call, and its result; for a first call that compiles."""
        self.wait()
        start = time.perf_counter()
        value = call()
        self.wait()
        return time.perf_counter() - start, value

    def sample(self, call: Callable[[], Any], before: Callable[[], None], *, head_start: bool = False) -> float:
        """Milliseconds of one call; `before` runs untimed.

        head_start: let the host run ahead, so that only the device's work is timed and not its launch.
        """
        before()
        if not self.is_cuda:
            return self.seconds(call)[0] * 1e3
        self._flush.zero_()
        self.wait()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if head_start:
            torch.cuda._sleep(HEAD_START_CYCLES)
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    def measure(
        self, call: Callable[[], Any], before: Callable[[], None], repeats: int, *, head_start: bool = False
    ) -> Timing:
        """Timing of `repeats` samples. The caller warms up."""
        return Timing.of([self.sample(call, before, head_start=head_start) for _ in range(repeats)])

    def ceilings(self, dtype: torch.dtype) -> Ceilings:
        """Rates of a copy larger than any cache and of square products of random matrices.

        float64 is measured too: the log-mel is computed in it.
        """
        sides = {dtype: 8192 if self.is_cuda else 768, torch.float64: 4096 if self.is_cuda else 512}
        rates = {str(kind).removeprefix("torch."): self._matmul_rate(kind, side) for kind, side in sides.items()}
        return Ceilings(self._copy_rate(4 << 30 if self.is_cuda else 64 << 20), rates)

    def _copy_rate(self, n_bytes: int) -> float:
        source = torch.randint(-(2**62), 2**62, (n_bytes // 8,), device=self.device)
        target = torch.empty_like(source)
        return 2 * n_bytes / self._fastest_s(lambda: target.copy_(source))

    def _matmul_rate(self, dtype: torch.dtype, side: int) -> float:
        left, right = (torch.randn(side, side, device=self.device).to(dtype) for _ in range(2))
        return 2 * side**3 / self._fastest_s(lambda: left @ right)

    def _fastest_s(self, call: Callable[[], Any]) -> float:
        """The fastest sample, since a ceiling excludes disturbances."""
        for _ in range(3):
            call()
        return min(self.sample(call, lambda: None) for _ in range(CEILING_REPEATS)) / 1e3


@contextmanager
def float32_precision(name: str) -> Iterator[None]:
    """Whether float32 products and convolutions may run in TF32."""
    allowed = name != "float32"
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    torch.backends.cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]
