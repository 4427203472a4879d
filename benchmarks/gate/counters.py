"""What a unit does on the engine's thread, counted without a clock, each count with its culprit.

regions           calls of a region, or replays of its CUDA graph                    by region
bytes_in          bytes of host arrays that are copied to the device                 by region
host_waits        reads of a tensor's values by the host                             by caller
bytes_out         bytes of these tensors                                             by caller
tensors           tensors that are allocated between the calls of regions            by caller
region_tensors    tensors that an eager region allocates                             by region
messages          events that a session receives                                     by type
python_calls      calls of this repository's functions                               by file
python_kib        peak of the memory of Python objects                               in one number
"""

import gc
import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gate.units import UnitDriver
from models.graphs.region_graphs import RegionTable
from models.graphs.streams import AsyncHostCopy

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = tuple(f"{ROOT}/{folder}/" for folder in ("worker", "models"))
READS = {"tolist", "item", "cpu", "nonzero", "__bool__", "__int__", "__float__", "__index__"}
Counts = dict[str, Counter[str]]


class CountedRegions:
    """The region that runs now, and the counts of all calls."""

    def __init__(self, counts: Counts):
        self.now: str | None = None
        self._counts = counts

    def call(self, inner: Callable[..., Any], table: RegionTable, name: str, *given: Any, **static: Any) -> Any:
        """In place of `RegionTable.__call__`."""
        self._counts["regions"][name] += 1
        self._counts["bytes_in"][name] += sum(one.nbytes for one in given if isinstance(one, np.ndarray))
        before, self.now = self.now, name
        try:
            return inner(table, name, *given, **static)
        finally:
            self.now = before


class CountedReads(TorchFunctionMode):
    """Counts reads of tensors by the host."""

    def __init__(self, counts: Counts):
        super().__init__()
        self._counts = counts

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") in READS and args and isinstance(args[0], Tensor):
            count_read(self._counts, args[0])
        return func(*args, **(kwargs or {}))


def count_read(counts: Counts, tensor: Tensor) -> None:
    """Count a read by the function of the program that makes it."""
    where = caller()
    counts["host_waits"][where] += 1
    counts["bytes_out"][where] += tensor.nbytes


class CountedTensors(TorchDispatchMode):
    """Counts results of operations that have memory of their own."""

    def __init__(self, counts: Counts, regions: CountedRegions):
        super().__init__()  # type: ignore[no-untyped-call]
        self._counts, self._regions = counts, regions

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        held = {one.untyped_storage().data_ptr() for one in _tensors((args, kwargs))}
        for result in _tensors(results):
            if result.untyped_storage().data_ptr() in held or not result.numel():
                continue
            if self._regions.now is None:
                self._counts["tensors"][f"{caller()} {func.name()}"] += 1
            else:
                self._counts["region_tensors"][self._regions.now] += 1
        return results


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, dict):
        yield from _tensors(list(values.values()))
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value)


def caller() -> str:
    """`file:function` of the nearest function of the program on the stack."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.startswith(PROGRAM):
        frame = frame.f_back
    return "outside" if frame is None else f"{_relative(frame.f_code)}:{frame.f_code.co_name}"


def _relative(code: CodeType) -> str:
    return str(Path(code.co_filename).relative_to(ROOT))


def counted(driver: UnitDriver, kind: str) -> Counts:
    """The counts of one unit of this kind."""
    names = ("regions", "bytes_in", "host_waits", "bytes_out", "tensors", "region_tensors", "messages")
    counts: Counts = {name: Counter() for name in names}
    regions = CountedRegions(counts)
    call, result = RegionTable.__call__, AsyncHostCopy.result

    def counted_call(table: RegionTable, name: str, *given: Any, **static: Any) -> Any:
        return regions.call(call, table, name, *given, **static)

    def counted_result(copy: AsyncHostCopy) -> Tensor:
        tensor = result(copy)
        with torch._C.DisableTorchFunction():
            count_read(counts, tensor)
        return tensor

    modes = ExitStack()

    def begin() -> None:
        modes.enter_context(CountedReads(counts))
        modes.enter_context(CountedTensors(counts, regions))

    with (
        mock.patch.object(RegionTable, "__call__", counted_call),
        mock.patch.object(AsyncHostCopy, "result", counted_result),
    ):
        driver.engine.submit(begin).result()  # modes belong to a thread
        try:
            driver.run(kind)
        finally:
            driver.engine.submit(modes.close).result()
    counts["messages"].update(type(event).__name__ for event in driver.events)
    counts["python_calls"] = _calls(driver, kind)
    counts["python_kib"] = Counter({"peak": _peak_kib(driver, kind)})
    return {name: Counter({culprit: n for culprit, n in sorted(of.items()) if n}) for name, of in counts.items()}


def _calls(driver: UnitDriver, kind: str) -> Counter[str]:
    """Calls of functions of the program on the engine's thread, by file."""
    calls: Counter[str] = Counter()

    def on_event(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PROGRAM):
            calls[frame.f_code.co_filename] += 1

    driver.engine.submit(sys.setprofile, on_event).result()
    try:
        driver.run(kind)
    finally:
        driver.engine.submit(sys.setprofile, None).result()
    return Counter({str(Path(name).relative_to(ROOT)): n for name, n in calls.items()})


def _peak_kib(driver: UnitDriver, kind: str) -> int:
    """KiB of Python objects at the peak, beyond those before the unit."""
    with collected():
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            tracemalloc.reset_peak()
            driver.run(kind)
            return -(-(tracemalloc.get_traced_memory()[1] - before) // 1024)
        finally:
            tracemalloc.stop()


@contextmanager
def collected() -> Iterator[None]:
    """Without garbage collections meanwhile."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
