"""Measures callables: equal inputs, comparison of outputs, latency, memory, and the machine they ran on.

Handles tensors anywhere in nested values. The callables and the meaning of "compiled" are in the reports.
"""

import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from models.graphs.growing_memory import mapped_bytes
from worker.report.compile_report import Equivalence, Header, Latency, Memory, Repeats, Scalar
from worker.version import driver_version, package_version

Call = Callable[[], Any]
SEED = 20_240_607
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
# Limits of absolute differences in float32, and of the relative norm of the difference in any dtype.
MAX_MAE, MAX_MAX = 1e-6, 1e-5
MAX_RELATIVE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
MIN_RELATIVE = 1e-5  # for other dtypes


def header(what: str, device: torch.device, settings: Mapping[str, Scalar], cache: str | None = None) -> Header:
    """Versions, machine, time and settings. cache: description of the kernel cache; None: taken from its folder."""
    is_cuda = device.type == "cuda"
    cpu = f"cpu ({platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads)"
    return Header(
        what=what,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        device=f"{device} ({torch.cuda.get_device_name(device)})" if is_cuda else cpu,
        driver=driver_version() if is_cuda else None,
        torch=torch.__version__,
        triton=package_version("triton"),
        cuda=torch.version.cuda,
        python=platform.python_version(),
        settings=dict(settings),
        cache=cache or _cache(),
        allocator=allocator() if is_cuda else None,
        memory=device_memory(device) | {"free": torch.cuda.mem_get_info(device)[0]} if is_cuda else {},
    )


def allocator() -> str:
    """torch's GPU allocator, with the environment variables that configure it."""
    set_to = [f"{name}={value}" for name in ALLOCATOR_VARIABLES if (value := os.environ.get(name))]
    return " ".join([torch.cuda.get_allocator_backend(), *set_to])


def device_memory(device: torch.device) -> dict[str, int]:
    """GPU bytes of this process: in tensors, reserved for them, and the peak; growing blocks count as tensors."""
    mapped = mapped_bytes(device)
    return {
        "allocated": torch.cuda.memory_allocated(device) + mapped,
        "reserved": torch.cuda.memory_reserved(device) + mapped,
        "peak": torch.cuda.max_memory_allocated(device) + mapped,
    }


def _cache() -> str:
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if not folder:
        return "torch's default folder"
    try:
        is_used = any(Path(folder).iterdir())
    except OSError:
        is_used = False
    return f"{folder}, {'in use' if is_used else 'empty'}"


# --- values ------------------------------------------------------------------------------------


def cloned(value: Any, device: torch.device | None = None) -> Any:
    """A value with every tensor copied, to `device` if one is given; objects without tensors are shared."""
    if isinstance(value, Tensor):
        return value.detach().clone() if device is None else value.detach().to(device, copy=True)
    if isinstance(value, Mapping):
        copies = {key: cloned(inner, device) for key, inner in value.items()}
        return copies if type(value) is dict else _rebuilt(value, copies)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(cloned(inner, device) for inner in value))
    if isinstance(value, (list, tuple)):
        return type(value)(cloned(inner, device) for inner in value)
    if is_dataclass(value) and not isinstance(value, type):
        names = [one.name for one in fields(value) if one.init]
        return replace(value, **{name: cloned(getattr(value, name), device) for name in names})
    return value


def _rebuilt(value: Any, copies: dict[Any, Any]) -> Any:
    try:
        return type(value)(**copies)  # a model's output class
    except TypeError:
        return type(value)(copies)


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of a nested value, each with its path."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from leaves(inner, f"{path}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            yield from leaves(inner, f"{path}[{index}]")
    elif is_dataclass(value) and not isinstance(value, type):
        for one in fields(value):
            yield from leaves(getattr(value, one.name), f"{path}.{one.name}")
    else:
        yield path or "output", value


def compare(eager: Any, compiled: Any) -> Equivalence:
    """Compare two nested values: floating-point tensors by their differences, others exactly.

    NaN equals NaN at the same place.
    """
    pairs = [list(leaves(value)) for value in (eager, compiled)]
    paths = [[path for path, _ in side] for side in pairs]
    if paths[0] != paths[1]:
        unmatched = sorted(set(paths[0]) ^ set(paths[1]))
        return Equivalence(is_equal=False, note=f"different structure: {', '.join(unmatched[:5]) or 'other order'}")
    total, largest, difference, norm, n, n_unequal = 0.0, 0.0, 0.0, 0.0, 0, 0
    kinds: list[torch.dtype] = []
    notes: list[str] = []
    for (path, one), (_, other) in zip(*pairs, strict=True):
        if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
            n_unequal += not _same(one, other)
        elif one.shape != other.shape or one.dtype != other.dtype:
            notes.append(f"{path}: {_kind(one)} eager, {_kind(other)} compiled")
        elif not one.dtype.is_floating_point and not one.dtype.is_complex:
            n_unequal += int((one != other).sum())
        else:
            kinds.append(one.dtype)
            gap, size = _gap(one, other)
            total += float(gap.sum())
            largest = max(largest, float(gap.max())) if gap.numel() else largest
            difference += float(gap.square().sum())
            norm += float(size.square().sum())
            n += gap.numel()
    relative = (difference / norm) ** 0.5 if norm else 0.0 if difference == 0 else float("inf")
    kind = max(kinds, key=_coarseness, default=None)
    figures: dict[str, Any] = {}
    is_close = True
    if kind is not None:
        mae = total / n if n else 0.0
        figures = {"dtype": str(kind).removeprefix("torch."), "mae": mae, "max_abs": largest, "relative": relative}
        is_single = kind in (torch.float32, torch.float64)
        is_close = (is_single and mae < MAX_MAE and largest < MAX_MAX) or relative <= _max_relative(kind)
    is_equal = is_close and not n_unequal and not notes
    return Equivalence(is_equal=is_equal, n_unequal=n_unequal, note="; ".join(notes[:5]) or None, **figures)


def _same(one: Any, other: Any) -> bool:
    """Equality of values other than tensors; objects without `__eq__` are equal if their types are."""
    if type(one) is not type(other):
        return False
    if "__eq__" not in {name for base in type(one).__mro__[:-1] for name in vars(base)}:
        return True
    return bool(one == other) or (isinstance(one, float) and one != one and other != other)


def _gap(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Absolute differences and eager values in double precision; infinite where only one of the two is a number."""
    one, other = (torch.view_as_real(t) if t.is_complex() else t for t in (one, other))
    one, other = one.double(), other.double()
    alike = (one == other) | (one.isnan() & other.isnan())
    gap = torch.where(alike, 0.0, (one - other).abs().nan_to_num(nan=float("inf")))
    return gap, torch.where(one.isfinite(), one, 0.0)


def _coarseness(kind: torch.dtype) -> float:
    return torch.finfo(kind).eps


def _max_relative(kind: torch.dtype) -> float:
    kind = {torch.complex64: torch.float32, torch.complex128: torch.float64}.get(kind, kind)
    return MAX_RELATIVE.get(kind, MIN_RELATIVE)


def _kind(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def is_identical(one: Any, other: Any) -> bool:
    """Whether two nested values are bit-identical."""
    sides = list(leaves(one)), list(leaves(other))
    if [path for path, _ in sides[0]] != [path for path, _ in sides[1]]:
        return False
    for (_, left), (_, right) in zip(*sides, strict=True):
        if isinstance(left, Tensor) and isinstance(right, Tensor):
            if left.shape != right.shape or left.dtype != right.dtype or not torch.equal(_bits(left), _bits(right)):
                return False
        elif not _same(left, right):
            return False
    return True


def _bits(tensor: Tensor) -> Tensor:
    """The tensor's bytes, in which a NaN equals itself and -0 differs from 0."""
    return tensor.contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else tensor


# --- runs --------------------------------------------------------------------------------------


def finish(device: torch.device) -> None:
    """Wait for the device to finish all work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def latency(prepare: Callable[[], Call], runs: int, device: torch.device) -> Latency:
    """Wall-clock times of `runs` calls, including the device's work. prepare: returns each call; not timed."""
    samples = []
    for _ in range(runs):
        call = prepare()
        finish(device)
        start = time.perf_counter()
        call()
        finish(device)
        samples.append((time.perf_counter() - start) * 1e3)
    return Latency.of(samples)


def repeats(run: Call, n: int) -> Repeats:
    """Whether `n` runs are bit-identical. run: starts from equal state and inputs, and returns a copy."""
    with forked_draws():
        first = run()
        if all(is_identical(first, run()) for _ in range(n - 1)):
            return "yes"
    first = seeded(run)
    return "per seed" if all(is_identical(first, seeded(run)) for _ in range(n - 1)) else "no"


def seeded(run: Call) -> Any:
    """The result of a run with a fixed seed; the caller's random state is preserved."""
    with forked_draws():
        torch.manual_seed(SEED)
        return run()


@contextmanager
def forked_draws() -> Iterator[None]:
    """Preserve the random state of all devices outside of the block."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        yield


class PeakMemory:
    """Peak bytes of calls on a GPU; on a CPU the growth of resident memory."""

    def __init__(self, device: torch.device):
        self._device = device
        self.kind: Literal["device peak", "resident growth"]
        self.kind = "device peak" if device.type == "cuda" else "resident growth"

    def of(self, calls: Call) -> int | None:
        """Bytes of `calls`; None if the system does not report memory."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            calls()
            finish(self._device)
            return torch.cuda.max_memory_allocated(self._device) + mapped_bytes(self._device)
        before = _resident()
        calls()
        after = _resident()
        return None if before is None or after is None else max(after - before, 0)

    def both(self, eager: int | None, compiled: int | None) -> Memory:
        return Memory(kind=self.kind, eager_bytes=eager, compiled_bytes=compiled)


def _resident() -> int | None:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None


def shapes(tensors: Iterable[tuple[str, Any]]) -> dict[str, Scalar]:
    """Leaves as a row shows them: tensors by shape and dtype, other values unchanged."""
    named: dict[str, Scalar] = {}
    for path, leaf in tensors:
        if isinstance(leaf, Tensor):
            named[path] = f"{'x'.join(map(str, leaf.shape)) or 'scalar'} {str(leaf.dtype).removeprefix('torch.')}"
        elif leaf is None or isinstance(leaf, (bool, int, float, str)):
            named[path] = leaf
    return named
