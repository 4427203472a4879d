"""Times of units as ratios to a frozen small kernel, measured in turn in the same run.

A ratio changes when units become slower, and hardly when the device's clock does. It is compared with that of an
earlier run on the same kind of GPU.
"""

import json
import statistics
import time
from pathlib import Path

import torch

from benchmarks.gate.units import KINDS, UnitDriver

FILE = Path(__file__).with_name("times.json")
SLACK = 0.1
# The frozen kernel: dependent products of these matrices. To change them makes earlier ratios worthless.
SIDE, N_PRODUCTS = 512, 32
SESSION_UNITS = 20  # of each kind, whose rows fit into the context of a session


class FrozenKernel:
    """A chain of small products and their sum, as one CUDA graph on a GPU."""

    def __init__(self, device: torch.device):
        random = torch.Generator().manual_seed(0)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self._matrix = (torch.randn(SIDE, SIDE, generator=random) / SIDE**0.5).to(device, dtype)
        self._vector = torch.randn(4, SIDE, generator=random).to(device, dtype)
        self._device, self._graph = device, None
        self._work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._work()

    def _work(self) -> None:
        with torch.no_grad():
            rows = self._vector
            for _ in range(N_PRODUCTS):
                rows = torch.tanh(rows @ self._matrix) + self._vector

    def ms(self) -> float:
        """Milliseconds of one run."""
        start = time.perf_counter()
        if self._graph is None:
            self._work()
        else:
            self._graph.replay()
            torch.cuda.synchronize(self._device)
        return 1000 * (time.perf_counter() - start)


def ratios(driver: UnitDriver, n: int) -> dict[str, float]:
    """Median time of each kind of unit over the median time of the kernel.

    n: units of each kind; the kernel runs ten times after each.
    """
    kernel: FrozenKernel = driver.engine.submit(FrozenKernel, driver.engine.device).result()
    units: dict[str, list[float]] = {kind: [] for kind in KINDS}
    frozen: list[float] = []
    for i in range(n):
        if i and i % SESSION_UNITS == 0:
            driver.renew()
        for kind in KINDS:
            load = driver.run(kind).times.load
            assert load is not None, "expected a unit in its own second"
            units[kind].append(1000 * load.seconds)
            frozen += [driver.engine.submit(kernel.ms).result() for _ in range(10)]
    base = statistics.median(frozen)
    return {kind: statistics.median(of_kind) / base for kind, of_kind in units.items()}


def read_ratios(where: str, path: Path = FILE) -> dict[str, float] | None:
    """The recorded ratios of a device and model; None if there are none."""
    recorded: dict[str, dict[str, float]] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return recorded.get(where)


def write_ratios(where: str, found: dict[str, float], path: Path = FILE) -> None:
    """Record ratios; those of other devices and models stay."""
    recorded = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    recorded[where] = {kind: round(ratio, 3) for kind, ratio in found.items()}
    path.write_text(json.dumps(recorded, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def slower(found: dict[str, float], recorded: dict[str, float]) -> list[str]:
    """One sentence for each kind of unit that is slower than recorded."""
    return [
        f"{kind} unit: expected at most {recorded[kind] * (1 + SLACK):.2f} times the frozen kernel, got {ratio:.2f}"
        for kind, ratio in found.items()
        if ratio > recorded[kind] * (1 + SLACK)
    ]
