"""Error of every region relative to the same region in eager float32, on the same inputs and slots.

During a conversation each call of a region runs twice: in the served engine, and in a twin engine that receives a copy
of the served slots before the call. Errors therefore do not accumulate between calls, and every region that a unit
calls is compared. Only the held cache rows and the rows that a call can add are copied and compared. Tensors stay on
the device; the host synchronizes a few times per call. If the served dtype is narrow (bfloat16), a second eager twin in
that dtype repeats the call: its error is the error of the dtype alone.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks import report
from benchmarks.duplex.region_slots import SlotTensors, paired_slots
from models.graphs.input_block import Input
from models.graphs.region_graphs import RegionTable
from worker.assembly.parts import EngineParts

MAX_ADDED = 520  # cache rows that one call adds at most, in a unit or a prompt
NARROW_SHARE = 0.5  # share of the time limit in which the second twin runs


@dataclass
class RegionErrors:
    """Errors of one region, the maximum over its calls; the float32 twin is the reference.

    After a different token choice the rest of a call works on other tokens. Therefore `alike_*` covers only calls whose
    integers, returned and in the slots, all equal the reference's.

    Attributes:
        n, n_alike: calls, and calls with equal integers.
        relative, state_relative: norm of the difference / norm of the reference, of outputs and of slots.
        mean, largest: absolute difference.
        integers, n_integers: differing integers, of all returned integers.
        alike_relative: the larger of the outputs' and the slots' relative error.
        n_narrow: calls that the narrow twin ran too.
        n_both: of these, calls whose integers equal the reference's in the served engine and in the narrow twin.
        both_relative, narrow_relative: as `alike_relative`, over the n_both calls; served engine and narrow twin.
        seconds: of the calls in all engines and of the comparison.
        error, narrow_error: last error; the second one affects only the narrow twin's figures.
    """

    n: int = 0
    n_alike: int = 0
    relative: float = 0.0
    state_relative: float = 0.0
    mean: float = 0.0
    largest: float = 0.0
    integers: int = 0
    n_integers: int = 0
    alike_relative: float = 0.0
    alike_mean: float = 0.0
    alike_largest: float = 0.0
    n_narrow: int = 0
    n_both: int = 0
    both_relative: float = 0.0
    narrow_relative: float = 0.0
    seconds: float = 0.0
    error: str = ""
    narrow_error: str = ""

    def add(self, call: "_CallComparison") -> None:
        """Add a call of the served engine."""
        returned, kept = call.differences
        self.integers += call.n_other
        self.n_integers += call.n_integers
        self.relative = _max_or_nan(self.relative, returned.relative)
        self.state_relative = _max_or_nan(self.state_relative, kept.relative)
        for one in call.differences:
            self.mean, self.largest = _max_or_nan(self.mean, one.mean), _max_or_nan(self.largest, one.largest)
        if call.n_other == 0:
            self.n_alike += 1
            self.alike_relative = _max_or_nan(self.alike_relative, call.relative)
            for one in call.differences:
                self.alike_mean = _max_or_nan(self.alike_mean, one.mean)
                self.alike_largest = _max_or_nan(self.alike_largest, one.largest)

    def add_narrow(self, served: "_CallComparison", narrow: "_CallComparison") -> None:
        """Add a call that both engines ran."""
        self.n_narrow += 1
        if served.n_other == narrow.n_other == 0:
            self.n_both += 1
            self.both_relative = _max_or_nan(self.both_relative, served.relative)
            self.narrow_relative = _max_or_nan(self.narrow_relative, narrow.relative)


@dataclass(frozen=True)
class NarrowTwin:
    """The twin in the served dtype. until: end of its use, on the monotonic clock."""

    regions: RegionTable
    slots: SlotTensors
    until: float = math.inf

    def __call__(
        self, name: str, given: Sequence[Input], static: dict[str, Any], before: Sequence[Tensor], n_rows: Sequence[int]
    ) -> tuple[Any, list[Tensor]]:
        """Run a call from a copy of the slots before it. Returns: the outputs, and the slots after the call."""
        slots = self.slots.views(n_rows)
        for own, tensor in zip(slots, before, strict=True):
            own.copy_(tensor)
        with exact_float32():
            return self.regions.uncaptured(name, *given, **static), slots


class _ComparedRegions:
    """Replaces a region table: runs each call in the served table and in the twins, and compares them."""

    def __init__(
        self,
        served: RegionTable,
        twin: RegionTable,
        own: SlotTensors,
        others: SlotTensors,
        until: float = math.inf,
        narrow: NarrowTwin | None = None,
    ):
        self._served, self._twin, self._own, self._others = served, twin, own, others
        self._until, self._narrow = until, narrow
        self.errors: dict[str, RegionErrors] = {}
        self.n_left_out = 0  # calls after the time limit

    def __getattr__(self, name: str) -> Any:
        return getattr(self._served, name)

    def run(self, function: Callable[..., Any], *given: Input, **static: Any) -> Any:
        return self(self._served.name_of(function), *given, **static)

    def __call__(self, name: str, *given: Input, **static: Any) -> Any:
        started_at = time.monotonic()
        if started_at > self._until:
            self.n_left_out += 1
            return self._served(name, *given, **static)
        errors = self.errors.setdefault(name, RegionErrors())
        errors.n += 1
        report.say(f"  call {errors.n} of {name}")  # before the call, so that the last line names a call that hangs
        try:
            n_rows = [held + MAX_ADDED for held in self._own.held()]
            own, others = self._own.views(n_rows), self._others.views(n_rows)
            before = [tensor.clone() for tensor in own]
            for other, tensor in zip(others, before, strict=True):
                other.copy_(tensor)
            inputs, versions = [_float32_copy(one) for one in given], [tensor._version for tensor in others]
        except Exception as error:  # for example out of memory: the served call still runs
            errors.error = short_error(error)
            return self._served(name, *given, **static)
        copies = self._for_narrow(given, errors) if self._narrow and started_at <= self._narrow.until else None
        out = self._served(name, *given, **static)
        try:
            with exact_float32():
                expected = self._twin.uncaptured(name, *inputs, **static)
            # The twin is plain PyTorch, so the version counters show which tensors the call wrote.
            written = [tensor._version != version for tensor, version in zip(others, versions, strict=True)]
            live = _live_rows(inputs[0], self._own.scratch)
            reference = [_select_rows(one, live) for one in _flatten(expected)]
            returned = [_select_rows(one, live) for one in _flatten(out)]
            call = _compare((returned, reference), (own, others, before), written)
            errors.add(call)
            held = self._own.held()
            assert all(a <= b for a, b in zip(held, n_rows, strict=True)), f"expected at most {n_rows} rows, got {held}"
        except Exception as error:  # the other regions are still compared
            errors.error, copies = short_error(error), None
        if copies is not None:  # after the served call's own comparison
            try:
                third, slots = self._narrow(name, copies, static, before, n_rows)
                returned = [_select_rows(one, live) for one in _flatten(third)]
                errors.add_narrow(call, _compare((returned, reference), (slots, others, before), written))
            except Exception as error:
                errors.narrow_error = short_error(error)
        errors.seconds += time.monotonic() - started_at
        return out

    def _for_narrow(self, given: Sequence[Input], errors: RegionErrors) -> list[Input] | None:
        """Copies of the inputs, which calls may overwrite; None if there is no memory for them."""
        try:
            return [one.copy() if isinstance(one, np.ndarray) else one.clone() for one in given]
        except Exception as error:
            errors.narrow_error = short_error(error)
            return None


def short_error(error: Exception) -> str:
    """Class and message, at most 300 characters."""
    return f"{type(error).__name__}: {error}"[:300]


def _float32_copy(one: Input) -> Input:
    """A copy in float32 if the input is narrower: the served call may overwrite its inputs."""
    if isinstance(one, np.ndarray):
        return one.copy()
    narrow = one.dtype in (torch.bfloat16, torch.float16)
    return one.to(torch.float32 if narrow else one.dtype, copy=True)


@dataclass(frozen=True)
class _CallComparison:
    """One call compared with the twin's.

    n_other: differing integers, returned and in slots. n_integers: returned integers. differences: of the outputs, and
    of the slots.
    """

    n_other: int
    n_integers: int
    differences: tuple["_TensorDifference", "_TensorDifference"]

    @property
    def relative(self) -> float:
        return _max_or_nan(*(one.relative for one in self.differences))


def _compare(
    returned: tuple[list[Tensor], list[Tensor]],
    kept: tuple[list[Tensor], list[Tensor], list[Tensor]],
    written: list[bool],
) -> _CallComparison:
    """Compare a call with the twin's.

    Args:
        returned: outputs of the call and of the twin's call.
        kept: slot tensors of both after the call, and before it.
        written: for each slot tensor, whether the twin wrote to it.
    """
    differing, sums, n_integers = [], [[], []], 0
    for own, other in zip(*returned, strict=True):
        if own.is_floating_point():
            sums[0].append(_difference_sums(own, other, None))
        else:
            differing.append((own != other).sum())
            n_integers += own.numel()
    for own, other, old, is_written in zip(*kept, written, strict=True):
        if own.is_floating_point() and is_written:
            sums[1].append(_difference_sums(own, other, other != old))
        elif not own.is_floating_point():
            differing.append((own != other).sum())
    n_other = int(torch.stack(differing).sum()) if differing else 0
    returned_sums, kept_sums = (torch.stack(one).cpu() if one else torch.zeros(1, 5) for one in sums)
    return _CallComparison(n_other, n_integers, (_TensorDifference(returned_sums), _TensorDifference(kept_sums)))


def _difference_sums(own: Tensor, reference: Tensor, counts: Tensor | None) -> Tensor:
    """Sums over the elements of one tensor where `counts` is true; None = everywhere.

    Returns: [5] float64 on the device: squared differences, squared reference, absolute differences, number of
        elements, largest absolute difference.
    """
    if not own.numel():
        return torch.zeros(5, dtype=torch.float64, device=own.device)
    own = own.to(reference.dtype)
    # Logits are -inf for forbidden tokens; such elements must be non-finite on both sides.
    finite = torch.isfinite(reference)
    mismatched = torch.isfinite(own) != finite
    if counts is not None:
        finite, mismatched = finite & counts, mismatched & counts
    difference = torch.where(finite, own - reference, 0).double()
    squares = torch.where(finite, reference, 0).double().square().sum()
    size = difference.abs()
    largest = torch.maximum(size.max(), torch.where(mismatched.any(), math.inf, 0.0).double())
    return torch.stack((difference.square().sum(), squares, size.sum(), finite.sum().double(), largest))


class _TensorDifference:
    """Difference of several tensors together. sums: [n, 5], one row per tensor."""

    def __init__(self, sums: Tensor):
        square, norm, total, n, _ = sums.sum(0).tolist()
        self.relative = math.sqrt(square / norm) if norm else math.sqrt(square)
        self.mean = total / n if n else 0.0
        self.largest = float(sums[:, 4].max())


@contextmanager
def compare_calls(
    served: EngineParts, twin: EngineParts, limit_s: float = math.inf, narrow: EngineParts | None = None
) -> Iterator["ComparedTables"]:
    """Compare every call of a region in the `with` body.

    Args:
        twin: the float32 reference engine.
        limit_s: seconds after which calls are only served.
        narrow: the twin in the served dtype, used in the first half of `limit_s`.
    Yields: the results, complete after the body.
    Raises: AssertionError if the engines' slots differ in shape.
    """
    now, owners = time.monotonic(), _region_owners(served)
    pairs, twins = paired_slots(served, twin), _region_owners(twin)
    thirds: dict[str, NarrowTwin] = {}
    if narrow is not None:
        more, until = paired_slots(served, narrow), now + NARROW_SHARE * limit_s
        thirds = {
            name: NarrowTwin(owner.regions, more[name][1], until) for name, owner in _region_owners(narrow).items()
        }
    tables = {
        name: _ComparedRegions(owner.regions, twins[name].regions, *pairs[name], now + limit_s, thirds.get(name))
        for name, owner in owners.items()
    }
    for name, owner in owners.items():
        owner.regions = tables[name]
    try:
        yield ComparedTables(tables)
    finally:
        for name, owner in owners.items():
            owner.regions = tables[name]._served


class ComparedTables:
    """Results of all compared region tables."""

    def __init__(self, tables: dict[str, _ComparedRegions]):
        self._tables = tables

    def errors(self) -> dict[str, dict[str, RegionErrors]]:
        """Errors by table and region."""
        return {name: dict(table.errors) for name, table in self._tables.items()}

    @property
    def n_left_out(self) -> int:
        """Calls that were not compared because of the time limit."""
        return sum(table.n_left_out for table in self._tables.values())


def _region_owners(parts: EngineParts) -> dict[str, Any]:
    """Owner of each region table, in whose `regions` attribute the table is replaced."""
    return {"omni": parts.unit_steps, **({} if parts.vocoder is None else {"vocoder": parts.vocoder})}


def _live_rows(slots: Input, scratch: int) -> list[int] | None:
    """Rows of a call that are not padding; None = all. slots: a region's first input, of any kind.

    Outputs of padding rows are never read, and kernels do not compute them.
    """
    if not isinstance(slots, np.ndarray) or slots.dtype != np.int64 or slots.ndim != 1 or scratch not in slots:
        return None
    return np.flatnonzero(slots != scratch).tolist()


def _select_rows(returned: Tensor, live: list[int] | None) -> Tensor:
    """Select the live rows: the first axis of floating-point outputs, the last axis of integer outputs."""
    if live is None:
        return returned
    axis = 0 if returned.is_floating_point() else returned.ndim - 1
    return returned.index_select(axis, torch.tensor(live, device=returned.device))


def _flatten(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for part in value for tensor in _flatten(part)] if isinstance(value, tuple | list) else []


def _max_or_nan(a: float, b: float) -> float:
    """The maximum; NaN if either is NaN."""
    return math.nan if math.isnan(a) or math.isnan(b) else max(a, b)


@contextmanager
def exact_float32() -> Iterator[None]:
    """Compute float32 products in float32. Compiled regions run outside, so their guards are not affected."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]
