"""How far every region is from the same region in float32, eager, on the same inputs and the same slots.

While a conversation runs, each call of a region is made twice: as served, and by a twin engine that was given the
served one's slots just before. So errors do not add up from call to call, and whatever a unit calls is compared,
without knowing it by name. Of caches only rows that are held, and as many more as a call can add, are given and
compared; all of it stays on the device, and the host waits twice a call.
"""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks import report
from benchmarks.region_slots import Slots, paired_slots
from models.graphs import RegionTable
from models.input_block import Input
from worker.building import Parts

MOST_ADDED = 520  # cache rows that one call of a unit or a prompt adds


@dataclass
class Errors:
    """Of one region over its calls; reference is the twin. relative: norm of the difference over the reference's norm,
    the largest of all calls. mean, largest: absolute difference. integers: values that are not equal, of n_integers.
    alike_...: over the n_alike calls whose integers are equal, returned and kept in slots: after another choice the
    rest of a call works on other tokens. alike_relative: the larger of what is returned and what is kept. seconds: of
    all calls, both engines and the comparison.
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
    seconds: float = 0.0
    error: str = ""


class _Doubled:
    """Stands in a runner's or vocoder's place of regions."""

    def __init__(self, served: RegionTable, twin: RegionTable, own: Slots, others: Slots, until: float = math.inf):
        self._served, self._twin, self._own, self._others = served, twin, own, others
        self._until = until
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
            n_rows = [held + MOST_ADDED for held in self._own.held()]
            own, others = self._own.views(n_rows), self._others.views(n_rows)
            before = [tensor.clone() for tensor in own]
            for other, tensor in zip(others, before, strict=True):
                other.copy_(tensor)
            inputs, versions = [self._given(one) for one in given], [tensor._version for tensor in others]
        except Exception as error:  # memory, for one; what cannot be doubled must not cost what is served
            errors.error = f"{type(error).__name__}: {error}"[:300]
            return self._served(name, *given, **static)
        out = self._served(name, *given, **static)
        try:
            with exact():
                expected = self._twin.uncaptured(name, *inputs, **static)
            # The twin is plain PyTorch, which counts writes: most tensors a call leaves alone.
            written = [tensor._version != version for tensor, version in zip(others, versions, strict=True)]
            live = _live(inputs[0], self._own.scratch)
            returned = ([_rows(one, live) for one in _flat(value)] for value in (out, expected))
            _compare(errors, tuple(returned), (own, others, before), written)
            held = self._own.held()
            assert all(a <= b for a, b in zip(held, n_rows, strict=True)), f"expected at most {n_rows} rows, got {held}"
        except Exception as error:  # nor one region the others
            errors.error = f"{type(error).__name__}: {error}"[:300]
        errors.seconds += time.monotonic() - begun
        return out

    def _given(self, one: Input) -> Input:
        """A copy in the twin's type: the served call may overwrite what it was given."""
        if isinstance(one, np.ndarray):
            return one.copy()
        narrow = one.dtype in (torch.bfloat16, torch.float16)
        return one.to(torch.float32 if narrow else one.dtype, copy=True)


def _compare(
    errors: Errors,
    returned: tuple[list[Tensor], list[Tensor]],
    kept: tuple[list[Tensor], list[Tensor], list[Tensor]],
    written: list[bool],
) -> None:
    """returned: by the served call and by the twin's. kept: the slots of both, and as they were before. written: which
    of them the twin has written to.
    """
    differing, sums = [], [[], []]
    for own, other in zip(*returned, strict=True):
        if own.is_floating_point():
            sums[0].append(_sums(own, other, None))
        else:
            differing.append((own != other).sum())
            errors.n_integers += own.numel()
    for own, other, old, is_written in zip(*kept, written, strict=True):
        if own.is_floating_point() and is_written:
            sums[1].append(_sums(own, other, other != old))
        elif not own.is_floating_point():
            differing.append((own != other).sum())
    n_other = int(torch.stack(differing).sum()) if differing else 0
    differences = [_Difference(torch.stack(one).cpu()) if one else _Difference(torch.zeros(1, 5)) for one in sums]
    errors.integers += n_other
    errors.relative = _larger(errors.relative, differences[0].relative)
    errors.state_relative = _larger(errors.state_relative, differences[1].relative)
    for one in differences:
        errors.mean, errors.largest = _larger(errors.mean, one.mean), _larger(errors.largest, one.largest)
    if n_other == 0:
        errors.n_alike += 1
        for one in differences:
            errors.alike_relative = _larger(errors.alike_relative, one.relative)
            errors.alike_mean = _larger(errors.alike_mean, one.mean)
            errors.alike_largest = _larger(errors.alike_largest, one.largest)


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
def doubled(served: Parts, twin: Parts, limit_s: float = math.inf) -> Iterator["Tables"]:
    """Inside, every call of a region is compared, until `limit_s` have passed: from then on calls are only served.

    Gives: what is found, complete behind the block.
    Raises: AssertionError if the engines' slots differ in shape.
    """
    runner, vocoder, until = served.duplex.runner, served.vocoder, time.monotonic() + limit_s
    pairs = paired_slots(served, twin)
    tables = {"omni": _Doubled(runner.regions, twin.duplex.runner.regions, *pairs["omni"], until)}
    runner.regions = tables["omni"]
    if vocoder is not None:
        tables["vocoder"] = _Doubled(vocoder.regions, twin.vocoder.regions, *pairs["vocoder"], until)
        vocoder.regions = tables["vocoder"]
    try:
        yield Tables(tables)
    finally:
        runner.regions = tables["omni"]._served
        if vocoder is not None:
            vocoder.regions = tables["vocoder"]._served


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
