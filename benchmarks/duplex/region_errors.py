"""How far every region is from the same region in float32, eager, on the same inputs and the same slots.

While a conversation runs, each call of a region is made twice: as served, and by a twin engine that was given the
served one's slots just before. So errors do not add up from call to call, and whatever a unit calls is compared,
without knowing it by name. Of caches only rows that are held, and as many more as a call can add, are given and
compared; all of it stays on the device, and the host waits a few times a call. Where what is served is narrow
(bfloat16), a second twin of that type, eager, makes calls a third time: what the type alone comes to.
"""

import math
import time
from collections.abc import Iterator, Sequence
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

MAX_ADDED = 520  # cache rows that one call of a unit or a prompt adds
NARROW_SHARE = 0.5  # of the time limit; the rest is left to the comparison itself


@dataclass
class Errors:
    """Of one region over its calls; reference is the twin. relative: norm of the difference over the reference's norm,
    the largest of all calls. mean, largest: absolute difference. integers: values that are not equal, of n_integers.
    alike_...: over the n_alike calls whose integers are equal, returned and kept in slots: after another choice the
    rest of a call works on other tokens. alike_relative: the larger of what is returned and what is kept.
    n_narrow: calls that the narrow twin made as well. both_relative, narrow_relative: what alike_relative is, of the
    served engine and of the narrow twin, over those n_both of them in which the integers of both are the reference's.
    seconds: of all calls, all engines and the comparison. error, narrow_error: the latest; the second one has cost
    nothing but figures of the narrow twin.
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

    def add(self, call: "_Compared") -> None:
        """One more call."""
        returned, kept = call.differences
        self.integers += call.n_other
        self.n_integers += call.n_integers
        self.relative = _larger(self.relative, returned.relative)
        self.state_relative = _larger(self.state_relative, kept.relative)
        for one in call.differences:
            self.mean, self.largest = _larger(self.mean, one.mean), _larger(self.largest, one.largest)
        if call.n_other == 0:
            self.n_alike += 1
            self.alike_relative = _larger(self.alike_relative, call.relative)
            for one in call.differences:
                self.alike_mean = _larger(self.alike_mean, one.mean)
                self.alike_largest = _larger(self.alike_largest, one.largest)

    def add_narrow(self, served: "_Compared", narrow: "_Compared") -> None:
        """The same call, by both."""
        self.n_narrow += 1
        if served.n_other == narrow.n_other == 0:
            self.n_both += 1
            self.both_relative = _larger(self.both_relative, served.relative)
            self.narrow_relative = _larger(self.narrow_relative, narrow.relative)


@dataclass(frozen=True)
class Narrow:
    """The second twin. until: on the monotonic clock, what comes later it is not asked."""

    regions: RegionTable
    slots: SlotTensors
    until: float = math.inf

    def __call__(
        self, name: str, given: Sequence[Input], static: dict[str, Any], before: Sequence[Tensor], n_rows: Sequence[int]
    ) -> tuple[Any, list[Tensor]]:
        """The call from slots as they were before. Returns: what comes back, and the slots behind it."""
        slots = self.slots.views(n_rows)
        for own, tensor in zip(slots, before, strict=True):
            own.copy_(tensor)
        with exact():
            return self.regions.uncaptured(name, *given, **static), slots


class _Doubled:
    """Stands in a runner's or vocoder's place of regions."""

    def __init__(
        self,
        served: RegionTable,
        twin: RegionTable,
        own: SlotTensors,
        others: SlotTensors,
        until: float = math.inf,
        narrow: Narrow | None = None,
    ):
        self._served, self._twin, self._own, self._others = served, twin, own, others
        self._until, self._narrow = until, narrow
        self.errors: dict[str, Errors] = {}
        self.n_left_out = 0  # calls behind the time limit

    def __getattr__(self, name: str) -> Any:
        return getattr(self._served, name)

    def __call__(self, name: str, *given: Input, **static: Any) -> Any:
        begun = time.monotonic()
        if begun > self._until:
            self.n_left_out += 1
            return self._served(name, *given, **static)
        errors = self.errors.setdefault(name, Errors())
        errors.n += 1
        report.say(f"  call {errors.n} of {name}")  # before it is made: the last line names what hangs
        try:
            n_rows = [held + MAX_ADDED for held in self._own.held()]
            own, others = self._own.views(n_rows), self._others.views(n_rows)
            before = [tensor.clone() for tensor in own]
            for other, tensor in zip(others, before, strict=True):
                other.copy_(tensor)
            inputs, versions = [_wide(one) for one in given], [tensor._version for tensor in others]
        except Exception as error:  # memory, for one; what cannot be doubled must not cost what is served
            errors.error = in_short(error)
            return self._served(name, *given, **static)
        copies = self._for_narrow(given, errors) if self._narrow and begun <= self._narrow.until else None
        out = self._served(name, *given, **static)
        try:
            with exact():
                expected = self._twin.uncaptured(name, *inputs, **static)
            # The twin is plain PyTorch, which counts writes: most tensors a call leaves alone.
            written = [tensor._version != version for tensor, version in zip(others, versions, strict=True)]
            live = _live(inputs[0], self._own.scratch)
            reference = [_rows(one, live) for one in _flat(expected)]
            returned = [_rows(one, live) for one in _flat(out)]
            call = _compare((returned, reference), (own, others, before), written)
            errors.add(call)
            held = self._own.held()
            assert all(a <= b for a, b in zip(held, n_rows, strict=True)), f"expected at most {n_rows} rows, got {held}"
        except Exception as error:  # nor one region the others
            errors.error, copies = in_short(error), None
        if copies is not None:  # behind all that the served call is judged by
            try:
                third, slots = self._narrow(name, copies, static, before, n_rows)
                returned = [_rows(one, live) for one in _flat(third)]
                errors.add_narrow(call, _compare((returned, reference), (slots, others, before), written))
            except Exception as error:
                errors.narrow_error = in_short(error)
        errors.seconds += time.monotonic() - begun
        return out

    def _for_narrow(self, given: Sequence[Input], errors: Errors) -> list[Input] | None:
        """Copies, which the served call and the twin's may not overwrite; None without memory for them."""
        try:
            return [one.copy() if isinstance(one, np.ndarray) else one.clone() for one in given]
        except Exception as error:
            errors.narrow_error = in_short(error)
            return None


def in_short(error: Exception) -> str:
    """For a table."""
    return f"{type(error).__name__}: {error}"[:300]


def _wide(one: Input) -> Input:
    """A copy in the twin's type: the served call may overwrite what it was given."""
    if isinstance(one, np.ndarray):
        return one.copy()
    narrow = one.dtype in (torch.bfloat16, torch.float16)
    return one.to(torch.float32 if narrow else one.dtype, copy=True)


@dataclass(frozen=True)
class _Compared:
    """One call beside the twin's. n_other: integers that are not equal, returned and kept in slots. n_integers: those
    returned. differences: of what is returned, and of what is kept.
    """

    n_other: int
    n_integers: int
    differences: tuple["_Difference", "_Difference"]

    @property
    def relative(self) -> float:
        return _larger(*(one.relative for one in self.differences))


def _compare(
    returned: tuple[list[Tensor], list[Tensor]],
    kept: tuple[list[Tensor], list[Tensor], list[Tensor]],
    written: list[bool],
) -> _Compared:
    """returned: by a call and by the twin's. kept: the slots of both, and as they were before. written: which of them
    the twin has written to.
    """
    differing, sums, n_integers = [], [[], []], 0
    for own, other in zip(*returned, strict=True):
        if own.is_floating_point():
            sums[0].append(_sums(own, other, None))
        else:
            differing.append((own != other).sum())
            n_integers += own.numel()
    for own, other, old, is_written in zip(*kept, written, strict=True):
        if own.is_floating_point() and is_written:
            sums[1].append(_sums(own, other, other != old))
        elif not own.is_floating_point():
            differing.append((own != other).sum())
    n_other = int(torch.stack(differing).sum()) if differing else 0
    returned_sums, kept_sums = (torch.stack(one).cpu() if one else torch.zeros(1, 5) for one in sums)
    return _Compared(n_other, n_integers, (_Difference(returned_sums), _Difference(kept_sums)))


def _sums(own: Tensor, reference: Tensor, counts: Tensor | None) -> Tensor:
    """Of one tensor, where it counts: squares of the difference, squares of the reference, absolute differences, how
    many there are, the largest of them. Returns: [5] float64, not waited for.
    """
    if not own.numel():
        return torch.zeros(5, dtype=torch.float64, device=own.device)
    own = own.to(reference.dtype)
    # Logits hold minus infinity where a token is forbidden; what is not finite must be so on both sides.
    known = torch.isfinite(reference)
    strange = torch.isfinite(own) != known
    if counts is not None:
        known, strange = known & counts, strange & counts
    difference = torch.where(known, own - reference, 0).double()
    squares = torch.where(known, reference, 0).double().square().sum()
    size = difference.abs()
    largest = torch.maximum(size.max(), torch.where(strange.any(), math.inf, 0.0).double())
    return torch.stack((difference.square().sum(), squares, size.sum(), known.sum().double(), largest))


class _Difference:
    """Of several tensors together, from the sums [n, 5] of each."""

    def __init__(self, sums: Tensor):
        square, norm, total, n, _ = sums.sum(0).tolist()
        self.relative = math.sqrt(square / norm) if norm else math.sqrt(square)
        self.mean = total / n if n else 0.0
        self.largest = float(sums[:, 4].max())


@contextmanager
def doubled(
    served: EngineParts, twin: EngineParts, limit_s: float = math.inf, narrow: EngineParts | None = None
) -> Iterator["Tables"]:
    """Inside, every call of a region is compared, until `limit_s` have passed: from then on calls are only served.

    Args: narrow: the second twin, of the served type, which is asked in the first half of that time.
    Gives: what is found, complete behind the block.
    Raises: AssertionError if the engines' slots differ in shape.
    """
    now, owners = time.monotonic(), _owners(served)
    pairs, twins = paired_slots(served, twin), _owners(twin)
    thirds: dict[str, Narrow] = {}
    if narrow is not None:
        more, until = paired_slots(served, narrow), now + NARROW_SHARE * limit_s
        thirds = {name: Narrow(owner.regions, more[name][1], until) for name, owner in _owners(narrow).items()}
    tables = {
        name: _Doubled(owner.regions, twins[name].regions, *pairs[name], now + limit_s, thirds.get(name))
        for name, owner in owners.items()
    }
    for name, owner in owners.items():
        owner.regions = tables[name]
    try:
        yield Tables(tables)
    finally:
        for name, owner in owners.items():
            owner.regions = tables[name]._served


class Tables:
    """What calls of all tables have come to so far."""

    def __init__(self, tables: dict[str, _Doubled]):
        self._tables = tables

    def errors(self) -> dict[str, dict[str, Errors]]:
        """By table and region."""
        return {name: dict(table.errors) for name, table in self._tables.items()}

    @property
    def n_left_out(self) -> int:
        """Calls that came too late to be compared."""
        return sum(table.n_left_out for table in self._tables.values())


def _owners(parts: EngineParts) -> dict[str, Any]:
    """What calls the regions of each table."""
    return {"omni": parts.duplex.runner, **({} if parts.vocoder is None else {"vocoder": parts.vocoder})}


def _live(slots: Input, scratch: int) -> list[int] | None:
    """Rows of a call that are somebody's; None: all. slots: a region's first input, whatever that is.

    What is returned for padding, nobody reads, and kernels make nothing of it.
    """
    if not isinstance(slots, np.ndarray) or slots.dtype != np.int64 or slots.ndim != 1 or scratch not in slots:
        return None
    return np.flatnonzero(slots != scratch).tolist()


def _rows(returned: Tensor, live: list[int] | None) -> Tensor:
    """Of numbers slots are the first axis, of choices and counts the last."""
    if live is None:
        return returned
    axis = 0 if returned.is_floating_point() else returned.ndim - 1
    return returned.index_select(axis, torch.tensor(live, device=returned.device))


def _flat(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for part in value for tensor in _flat(part)] if isinstance(value, tuple | list) else []


def _larger(a: float, b: float) -> float:
    """A NaN stays."""
    return math.nan if math.isnan(a) or math.isnan(b) else max(a, b)


@contextmanager
def exact() -> Iterator[None]:
    """float32 products in float32; what is compiled for another setting does not notice, it runs outside."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]
